"""Whatever the rows look like: each is in the output exactly once, under its own name, resumed and ordered as well."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.answer_writer import Delivery
from npu_runner.batch.job.driver import Driver
from npu_runner.batch.job.history import JobSummary
from npu_runner.errors import JobError
from npu_runner.request.limits import LIMITS
from npu_runner.serving.replicas.fleet import Fleet
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row
from tests.full_set import only_full

Name = str | int
"""What a row is known by: its custom_id or its line."""


def hostile_rows() -> list[tuple[bytes, str | None]]:
    """Lines, and the custom_id that each has to be answered under; None: its line."""
    made: list[tuple[bytes, str | None]] = []

    def add(template: bytes, named: bool = True) -> None:
        name = f"row-{len(made)}"
        made.append((template.replace(b"NAME", name.encode()), name if named else None))

    head = b'{"custom_id": "NAME", "method": "POST", "url": "/v1/chat/completions", "body": '
    limit = LIMITS.max_nesting
    for depth in [*range(limit - 3, limit + 3), *range(300, 1100, 25), *range(985, 1003), 5000, 200_000]:
        add(head + b"[" * depth + b"]" * depth + b"}")
        add(head + b'{"a":' * depth + b"1" + b"}" * depth + b"}")
        add(head + b"[" * depth + b"}", named=False)
    good = json.dumps(row("NAME")).encode()
    for broken in (good[:-1], good + b"x", b"\xef\xbb\xbf" + good, good.replace(b"NAME", b"\xffNAME"),
                   good + b"\0", b"\0", b"[]", b"null", b'"NAME"', good.replace(b'"NAME"', b"7"),
                   good.replace(b"NAME", b"\\ud83d"), good.replace(b"NAME", b""), good.replace(b"NAME", b"n" * 2000),
                   ):  # fmt: skip
        add(broken, named=False)
    for odd in (good[:-1] + b', "custom_id": "NAME"}', b'{"custom_id": "other", ' + good[1:],
                b" \t" + good + b" \r", good.replace(b"custom_id", b"custom\\u005fid"),
                good.replace(b'"hello"', b'"%s"' % (b"x" * (3 << 20))), good.replace(b'"hello"', b'"\\"{[\\\\"'),
                good[:-1] + b', "%s": 1}' % (b"long" * 1000), good.replace(b"temperature", b"t" * 1_000_000),
                good.replace(b"0", b"9" * 5000),
                head + b"{}" + b"}", head + b"[" + b"1," * 200_000 + b"1]}"):  # fmt: skip
        add(odd)
    return made


def lines_of(rows: list[tuple[bytes, str | None]]) -> list[Name]:
    return [line if name is None else name for line, (_, name) in enumerate(rows, 1)]


def names_in(output: Path) -> list[Name]:
    return [item["error"]["line"] if item["custom_id"] is None else item["custom_id"] for item in read_rows(output)]


@pytest.fixture(scope="module")
def rows() -> list[tuple[bytes, str | None]]:
    made = hostile_rows()
    random.Random(5).shuffle(made)
    return made


@pytest.mark.parametrize("ordered", [True, *only_full("as they finish; in order stays", False)])
def test_every_row_is_in_the_output_once_and_a_second_run_finds_nothing_to_do(
    job: Job, rows: list[tuple[bytes, str | None]], ordered: bool
) -> None:
    job.input.write_bytes(b"".join(line + b"\n" for line, _ in rows))
    summary = job.run(ordered=ordered)
    assert (summary.num_rows, summary.tally.num_done) == (len(rows), len(rows))
    found = names_in(job.output)
    assert found == lines_of(rows) if ordered else Counter(found) == Counter(lines_of(rows))
    assert max(map(len, job.output.read_bytes().splitlines())) < 5000, "no answer repeats a megabyte of its row"
    again = job.run(ordered=ordered)
    assert (again.num_resumed, again.tally.num_done) == (len(rows), 0)
    assert names_in(job.output) == found


@pytest.mark.full("hostile rows of an interrupted job; those of a whole one stay, and interrupted jobs")
def test_an_interrupted_job_answers_each_of_them_once_in_all(
    job: Job, rows: list[tuple[bytes, str | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    job.input.write_bytes(b"".join(line + b"\n" for line, _ in rows))
    runs: list[JobSummary] = []
    while not runs or runs[-1].is_interrupted:
        with monkeypatch.context() as patch:
            patch.setattr(Driver, "run", stopping_after(20))
            runs.append(job.run())
    assert len(runs) > 1
    assert Counter(names_in(job.output)) == Counter(lines_of(rows))


def stopping_after(num_rows: int) -> Any:
    """So many, and those that come with the last of them: more on a busy machine."""
    run = Driver.run

    def run_some(driver: Driver, fleet: Fleet, delivery: Delivery, should_stop: Callable[[], bool],
                 report: Callable[[], None]) -> None:
        run(driver, fleet, delivery, lambda: delivery.tally.num_done >= num_rows, report)  # as SIGTERM would

    return run_some


def test_a_row_that_kills_its_worker_is_answered_under_its_name(job: Job) -> None:
    lines = [json.dumps(row(name, text)).encode() for name, text in (("a", "fine"), ("b", "die"), ("c", "fine"))]
    job.input.write_bytes(b"\n".join(lines))
    job.run()
    codes = {item["custom_id"]: item["error"] and item["error"]["code"] for item in read_rows(job.output)}
    assert codes == {"a": None, "b": "preprocessing_crashed", "c": None}


@pytest.mark.full("changes of the input stay (test_input_changed.py)")
def test_an_input_that_is_changed_while_the_job_runs_ends_it(job: Job) -> None:
    job.input.write_bytes(b"".join(json.dumps(row(f"{n:03d}")).encode() + b"\n" for n in range(300)))

    def change(engine: ScriptedEngine) -> None:
        changed = job.input.read_bytes().replace(b'"custom_id": "2', b'"custom_id": "9')
        with open(job.input, "r+b") as file:
            file.write(changed)

    with pytest.raises(JobError, match="changed while the job ran"):
        job.run(lambda config: ScriptedEngine(config, on_step=change))
