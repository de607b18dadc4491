"""Rows that end a job of several ranks are found by running suspects alone and given up; nobody else is harmed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

from npu_runner.batch.files.names import manifest_path
from npu_runner.config import RunnerConfig
from npu_runner.errors import EngineDeadError
from npu_runner.request.outputs import RequestOutput
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
NUM_ROWS = 60
_STEP_SECONDS = 0.02  # so long that rows arrive faster than they are answered, and run together
POISONED = ("r0", "r13", "r14", "r59")


@dataclass
class PoisonedEngine(ScriptedEngine):
    """Dies in a step that a row takes part in whose text says so."""

    blame: str | None = "out_of_memory"

    def step(self) -> list[RequestOutput]:
        time.sleep(_STEP_SECONDS)
        while self.waiting and len(self.running) < self.max_running:
            request_id, text, params = self.waiting.pop(0)
            self.running[request_id] = (self.latency(text), text, params)
        if any(text.startswith("poison") for _, text, _ in self.running.values()):
            raise EngineDeadError("rank 1 failed\nand more", request_ids=tuple(self.running), blame=self.blame)
        return super().step()


def engine(blame: str | None) -> Callable[[RunnerConfig], ScriptedEngine]:
    return lambda config: PoisonedEngine(config, blame=blame)


def rows() -> list[dict[str, Any]]:
    return [row(f"r{n}", f"poison {n}" if f"r{n}" in POISONED else "x" * (n % 9 + 1)) for n in range(NUM_ROWS)]


def suspects_of(job: Job) -> dict[str, Any]:
    return dict(json.loads(manifest_path(job.output).read_text()).get("suspects", {}))


def die_with(job: Job, *names: str) -> None:
    """A run that ends with these rows under way, before it has answered one."""

    def die(engine: ScriptedEngine) -> NoReturn:
        raise EngineDeadError("dead", request_ids=names, blame="out_of_memory" if len(names) == 1 else None)

    with pytest.raises(EngineDeadError):
        job.run(lambda config: ScriptedEngine(config, on_step=die))
    assert suspects_of(job).keys() == {*names}


def run_until_it_ends(job: Job, blame: str | None, **options: Any) -> int:
    """How often it died."""
    most_suspects = 0
    for num_deaths in range(20):
        try:
            summary = job.run(engine(blame), **options)
        except EngineDeadError:
            most_suspects = max(most_suspects, len(suspects_of(job)))
            continue
        assert summary.exit_status == 3
        assert most_suspects > 3, "they ran together"
        return num_deaths
    raise AssertionError("it never ends")


@pytest.mark.parametrize(("blame", "code", "deaths_each", "ordered"), [
    (None, "request_failed", 3, False),  # a rank was killed: alone it has to happen twice
    *only_full("another blame, and each in the other order",
               ("out_of_memory", "out_of_memory", 2, True),  # once together, once alone
               ("out_of_memory", "out_of_memory", 2, False), (None, "request_failed", 3, True)),
])  # fmt: skip
def test_rows_that_end_the_job_are_given_up_by_name(blame: str | None, code: str, deaths_each: int, ordered: bool,
                                                    job: Job, tmp_path_factory: Any) -> None:
    undisturbed = Job(tmp_path_factory.mktemp("undisturbed"))
    for where in (job, undisturbed):
        write_rows(where.input, rows())
    undisturbed.run(ordered=ordered)
    assert run_until_it_ends(job, blame, ordered=ordered) <= deaths_each * len(POISONED)
    expected = {item["custom_id"]: item for item in read_rows(undisturbed.output)}
    found = {item["custom_id"]: item for item in read_rows(job.output)}
    assert found.keys() == expected.keys()
    for name, item in found.items():
        if name in POISONED:
            assert item["error"]["code"] == code
            assert item["error"]["message"] == "alone in its step, this request ended the engine: rank 1 failed"
            assert item["response"]["status_code"] == 500
        else:
            assert item == expected[name]
    if ordered:
        assert job.names() == [f"r{n}" for n in range(NUM_ROWS)]
    assert not suspects_of(job), "no row is under suspicion any more"


def test_suspects_run_alone(job: Job) -> None:
    write_rows(job.input, rows()[1:10])
    die_with(job, "r3", "r7", "r8")
    beside: list[set[str]] = []
    together: list[int] = []

    def look(engine: ScriptedEngine) -> None:
        time.sleep(_STEP_SECONDS)
        together.append(len(engine.running))
        held = {*engine.running, *(name for name, _, _ in engine.waiting)}
        if held & {"r3", "r7", "r8"}:
            beside.append(held)

    assert job.run(lambda config: ScriptedEngine(config, on_step=look)).exit_status == 0
    assert {frozenset(held) for held in beside} == {frozenset({name}) for name in ("r3", "r7", "r8")}
    assert max(together) > 1, "the others ran together"
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(1, 10))


def test_rows_that_were_given_up_are_tried_again_where_errors_are(job: Job) -> None:
    """The job was stopped before the end, so the verdict is still there: with its row in the output, or without."""
    write_rows(job.input, rows()[1:10])
    die_with(job, "r3")
    beside: list[set[str]] = []

    def look(engine: ScriptedEngine) -> None:
        held = {*engine.running, *(name for name, _, _ in engine.waiting)}
        if "r3" in held:
            beside.append(held)

    assert job.run(lambda config: ScriptedEngine(config, on_step=look), retry_errors=True).exit_status == 0
    assert {frozenset(held) for held in beside} == {frozenset({"r3"})}, "it runs, and alone"
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(1, 10))


def test_an_output_begun_afresh_suspects_nobody(job: Job) -> None:
    write_rows(job.input, rows()[1:10])
    die_with(job, "r3")
    assert job.run(overwrite=True).exit_status == 0
    assert not suspects_of(job)
