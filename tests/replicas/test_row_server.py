"""The replica of its caller's thread, through its contract: rows by place or with their bytes, rows given back."""

from __future__ import annotations

import functools
import json
import pickle
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.row_book import CarriedRows, RowBook, SharedFile
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.row_server import RowServer, server_plan
from npu_runner.batch.rows.openai_response import JobStamp
from npu_runner.config import RunnerConfig
from npu_runner.errors import JobError
from npu_runner.serving.replica import Event, Finished, Loading, Opened, Progressed, Ready, Returned, Started
from npu_runner.serving.replicas.process_main import ReplicaHost
from tests.batch.scripted import ScriptedEngine, ScriptedModel, row, write_rows

NUM_ROWS = 200
STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


class SlowEngine(ScriptedEngine):
    """Two rows at a time: all others wait in it."""

    def __init__(self, config: RunnerConfig):
        super().__init__(config, latency=lambda text: 3, max_running=2)


def open_slow(config: RunnerConfig) -> ScriptedModel:
    return ScriptedModel(config, SlowEngine)


class StuckEngine(ScriptedEngine):
    """No row ever ends."""

    def __init__(self, config: RunnerConfig):
        super().__init__(config, latency=lambda text: 10**9, max_running=2)


def open_stuck(config: RunnerConfig) -> ScriptedModel:
    return ScriptedModel(config, StuckEngine)


@pytest.fixture
def file(tmp_path: Path) -> Any:
    lines: list[Any] = [row(f"r{n}", "bad" if n % 9 == 4 else f"text {n}") for n in range(NUM_ROWS - 1)]
    write_rows(tmp_path / "in.jsonl", [*lines, b"not json"])
    with InputFile(str(tmp_path / "in.jsonl"), tmp_path) as opened:
        yield opened


def server_of(file: InputFile, source: Any, open_model: Any = open_slow) -> tuple[RowServer, RowBook]:
    options = BatchOptions(input=file.name, output="-")
    plan = server_plan(RunnerConfig(model="m"), options, source, open_model, 1)
    scan = file.scan()
    server = RowServer(pickle.loads(pickle.dumps(plan)))
    server.start(lambda: None, lambda event: None)
    assert isinstance(server.poll(0.0)[0], Ready)
    server.serve(STAMP)
    return server, RowBook(scan, np.ones(scan.num_rows, dtype=bool), file.source)


class Wire:
    """What a host needs of a channel to the driver, with nobody at the other end."""

    def __init__(self) -> None:
        self.commands: SimpleQueue[Any] = SimpleQueue()
        self.sent: list[Any] = []

    def receive(self) -> tuple[Any, int]:
        return self.commands.get(), 0

    def send(self, message: Any) -> None:
        self.sent += pickle.loads(pickle.dumps(message))
        if isinstance(self.sent[-1], Ready):
            self.commands.put(("end", None))


def test_a_replicas_process_says_what_it_opened_and_what_it_does_before_it_is_ready(file: InputFile) -> None:
    options, wire = BatchOptions(input=file.name, output="-", max_thinking_tokens=None), Wire()
    plan = server_plan(RunnerConfig(model="m", seed=7), options, file.source, open_slow, 1)
    ReplicaHost(functools.partial(RowServer, plan), wire).run()
    opened, loading, ready = wire.sent
    assert opened == Opened({"seed": "7", "prompts.kind": "scripted"})
    assert loading == Loading("learning the script")
    assert ready.facts.settings == {"engine": "scripted", **opened.settings}


def finish(server: RowServer, count: int) -> tuple[dict[int, bytes], list[Event]]:
    done: dict[int, bytes] = {}
    events: list[Event] = []
    while len(done) < count:
        for event in server.poll(0.2):
            events.append(event)
            for finished in event.rows if isinstance(event, Finished) else ():
                assert finished.number not in done, "a row comes once"
                done[finished.number] = finished.data
    return done, events


def test_rows_by_place_by_path_and_with_their_bytes_are_the_same(file: InputFile) -> None:
    answers = []
    for kind in ("inherited", "path", "carried"):
        source = {"inherited": file.source, "path": SharedFile(file.name), "carried": CarriedRows(file.name)}[kind]
        server, book = server_of(file, source)
        with server:
            make = book.run_with_data if kind == "carried" else book.run
            server.submit(pickle.loads(pickle.dumps(make(range(NUM_ROWS)))))
            done, events = finish(server, NUM_ROWS)
        begun = [index for event in events if isinstance(event, Started) for index in event.indices]
        answered = {index for index, data in done.items() if json.loads(data)["error"] is None}
        assert sorted(begun) == sorted(answered)
        answers.append(done)
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == NUM_ROWS


def test_what_is_given_back_is_no_longer_counted_as_under_way(file: InputFile) -> None:
    """Nobody is left with the figures of before until the replica has something else to say."""
    server, book = server_of(file, file.source, open_stuck)
    with server:
        server.submit(book.run(range(NUM_ROWS)))
        while not (server.stats().engine.num_running and server.stats().engine.num_waiting):
            server.poll(0.02)
        server.recall(NUM_ROWS, include_started=True)
        returned, told = server.poll(0.0)[:2]
        assert isinstance(returned, Returned)
        assert isinstance(told, Progressed)
        assert (told.stats.engine.num_running, told.stats.engine.num_waiting) == (0, 0)


@pytest.mark.parametrize("num_polls", [0, 3, 60])
def test_what_is_given_back_is_not_done_and_the_rest_is(file: InputFile, num_polls: int) -> None:
    server, book = server_of(file, file.source)
    with server:
        server.submit(book.run(range(NUM_ROWS)))
        early: list[Event] = []
        for _ in range(num_polls):
            early += server.poll(0.2)
        server.recall(NUM_ROWS)
        early += server.poll(0.0)
        (returned,) = [event.indices for event in early if isinstance(event, Returned)]
        num_early = sum(len(event.rows) for event in early if isinstance(event, Finished))
        assert len(set(returned)) == len(returned)
        # Two run, two are with the worker or on their way to it; all others can be had back.
        assert NUM_ROWS - num_early - len(returned) <= 5
        done, _ = finish(server, NUM_ROWS - num_early - len(returned))
        assert not set(returned) & set(done)
        server.submit(book.run(sorted(returned)))
        again, _ = finish(server, len(returned))
        assert sorted(again) == sorted(returned)


@pytest.mark.parametrize("kind", ["path", "carried"])
def test_a_row_that_was_changed_ends_the_job(file: InputFile, kind: str) -> None:
    server, book = server_of(file, SharedFile(file.name) if kind == "path" else CarriedRows(file.name))
    changed = Path(file.name).read_bytes().replace(b'"r5"', b'"x5"')
    with open(file.name, "r+b") as opened:
        opened.write(changed)
    with server:
        server.submit(book.run_with_data(range(20)) if kind == "carried" else book.run(range(20)))
        with pytest.raises(JobError, match="is not what it was"):
            finish(server, NUM_ROWS)
