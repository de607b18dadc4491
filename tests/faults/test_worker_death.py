"""A preprocessing worker that dies is replaced and its row tried once more, then failed; a stuck one is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.reports.report import run_batch_and_report
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool
from tests.batch.scripted import ScriptedModel, ScriptedProcessor, read_rows, row, write_rows
from tests.faults.worker_tasks import DieAt, HangAt

DEFAULTS: dict[str, Any] = {"num_workers": 2, "task_timeout_seconds": 120.0, "are_forked": False}


@pytest.fixture(params=[False, True], ids=["started", "forked"])
def are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(DEFAULTS, "are_forked", request.param)
    return bool(request.param)


def run_pool(function: Any, num_tasks: int, **limits: Any) -> tuple[dict[int, Any], int]:
    results: dict[int, Any] = {}
    with WorkerPool(function, PoolLimits(**{**DEFAULTS, **limits})) as pool:
        for task in range(num_tasks):
            pool.submit(task)
        while len(results) < num_tasks:
            item = pool.get(1.0)
            if item is not None:
                assert item.task not in results, "a task came back twice"
                results[item.task] = item.result
    return results, pool.num_replaced


@pytest.mark.usefixtures("are_forked")
def test_a_dead_workers_task_is_tried_once_more(tmp_path: Path) -> None:
    results, num_replaced = run_pool(DieAt(tmp_path, always=set(), once={0, 3, 4, 9}), 10)
    assert results == {task: task + 1000 for task in range(10)}
    assert num_replaced == 4


@pytest.mark.usefixtures("are_forked")
def test_a_task_that_kills_two_workers_is_failed_and_named(tmp_path: Path) -> None:
    results, num_replaced = run_pool(DieAt(tmp_path, always={2, 5}, once=set()), 8)
    for task, result in results.items():
        if task in (2, 5):
            assert isinstance(result, WorkerFailure)
            assert result.code == "preprocessing_crashed"
            assert "2 worker processes (killed by SIGSEGV)" in result.message
        else:
            assert result == task + 1000
    assert sorted(results) == list(range(8))
    assert num_replaced == 4


@pytest.mark.usefixtures("are_forked")
def test_an_idle_worker_that_is_killed_costs_no_task(tmp_path: Path) -> None:
    limits = PoolLimits(**{**DEFAULTS, "num_workers": 1})
    pool: WorkerPool[int] = WorkerPool(DieAt(tmp_path, set(), set()), limits)
    found = []
    with pool:
        for task in range(6):
            if task == 1:
                for pid in pool.worker_pids():
                    os.kill(pid, signal.SIGKILL)
            pool.submit(task)
            while (item := pool.get(1.0)) is None:
                """The test's own timeout ends this."""
            found.append((item.task, item.result))
    assert sorted(found) == [(task, task + 1000) for task in range(6)]


@pytest.mark.usefixtures("are_forked")
def test_a_stuck_task_is_failed_without_a_second_try_and_its_worker_replaced() -> None:
    results, num_replaced = run_pool(HangAt({1, 2}), 6, task_timeout_seconds=1.0)
    assert [results[task] for task in (0, 3, 4, 5)] == [0, 3, 4, 5]
    for task in (1, 2):
        assert results[task].code == "preprocessing_timeout"
        assert "longer than 1 s" in results[task].message
    assert num_replaced == 2


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dead_forker_costs_no_task_and_leaves_no_worker(tmp_path: Path, signal_number: int) -> None:
    """It dies while it loads, and later while its workers serve."""
    limits = PoolLimits(num_workers=3, task_timeout_seconds=120.0, are_forked=True)
    found: dict[int, int] = {}
    pids: set[int] = set()
    with WorkerPool(DieAt(tmp_path, set(), once={7}), limits) as pool:
        pool.submit(0)
        while pool._forker is None:
            time.sleep(0.001)
        os.kill(pool._forker.pid, signal_number)
        for task in range(1, 30):
            pool.submit(task)
            if task in (9, 19):
                while 7 not in found:  # that row's own death and the forker's would be its two
                    if (item := pool.get(1.0)) is not None:
                        found[item.task] = item.result
                while not (alive := set(pool.worker_pids()) - pids):
                    time.sleep(0.01)
                pids |= alive
                os.kill(_parent_of(alive), signal_number)
                while len(found) <= task:
                    if (item := pool.get(1.0)) is not None:
                        found[item.task] = item.result
        while len(found) < 30:
            if (item := pool.get(1.0)) is not None:
                found[item.task] = item.result
        pids |= set(pool.worker_pids())
    assert found == {task: task + 1000 for task in range(30)}
    while any(_is_alive(pid) for pid in pids):  # the kernel kills them in its own time
        time.sleep(0.01)


def test_a_forker_that_stands_still_is_killed_with_the_worker_that_is_to_end() -> None:
    limits, found = PoolLimits(num_workers=2, task_timeout_seconds=1.0, are_forked=True), {}
    with WorkerPool(HangAt({3}), limits) as pool:
        for task in range(3):
            pool.submit(task)
        while len(found) < 3:
            if (item := pool.get(1.0)) is not None:
                found[item.task] = item.result
        forker = _parent_of(pool.worker_pids())
        os.kill(forker, signal.SIGSTOP)
        pool.submit(3)
        pool.submit(4)
        while len(found) < 5:
            if (item := pool.get(1.0)) is not None:
                found[item.task] = item.result
        assert not _is_alive(forker)
    assert found[3].code == "preprocessing_timeout"
    assert found[4] == 4


def _parent_of(pids: Iterable[int]) -> int:
    """The forker of these workers."""
    (parent,) = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in pids}
    return parent


def test_the_job_writes_a_row_for_every_fate(tmp_path: Path) -> None:
    texts = ["fine 1", "die", "fine 2", "bug", "bad", "hang", "fine 3", "engine error", "x" * 101]
    log = tmp_path / "begun.txt"
    summary = run_batch_and_report(
        RunnerConfig(model=str(write_model(tmp_path))),
        BatchOptions.from_keywords(
            input=str(write_rows(tmp_path / "in.jsonl", [row(text, text) for text in texts])),
            output=str(tmp_path / "out.jsonl"),
            preprocessing_workers=2,
            preprocessing_timeout=2.0,
            progress="off",
        ),
        open_model=lambda config: ScriptedModel(config, processor=ScriptedProcessor(str(log))),
    )
    rows = {item["custom_id"]: item for item in read_rows(tmp_path / "out.jsonl")}
    assert sorted(rows) == sorted(texts)
    codes = {name: item["error"] and item["error"]["code"] for name, item in rows.items()}
    assert codes == {
        "fine 1": None,
        "fine 2": None,
        "fine 3": None,
        "die": "preprocessing_crashed",
        "hang": "preprocessing_timeout",
        "bug": "internal_error",
        "bad": "scripted_bad",
        "engine error": "generation_failed",
        "x" * 101: "prompt_too_long",
    }
    statuses = {name: item["response"]["status_code"] for name, item in rows.items()}
    assert {name for name, status in statuses.items() if status == 500} == {"die", "hang", "bug", "engine error"}
    assert {name for name, status in statuses.items() if status == 400} == {"bad", "x" * 101}
    begun = log.read_text().splitlines()
    assert begun.count("die") == 2
    assert begun.count("hang") == 1
    assert summary.exit_status == 3
    assert summary.all_stats.num_workers_replaced == 3


def write_model(folder: Path) -> Path:
    """As much of a checkpoint as the job itself looks at; the engine is scripted."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text("{}")
    return folder / "model"


def test_workers_die_with_a_parent_that_is_killed(are_forked: bool) -> None:
    script = f"""
import sys
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool
from tests.faults.worker_tasks import HangAt
pool = WorkerPool(HangAt({{1, 2}}), PoolLimits(num_workers=3, task_timeout_seconds=3600, are_forked={are_forked}))
for task in range(100):
    pool.submit(task)
while pool.get(1.0) is None or len(pool.worker_pids()) < 3:
    pass
print(*pool.worker_pids(), flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = json.loads("[" + ",".join(parent.stdout.readline().split()) + "]")
        assert len(pids) == 3
        parent.kill()
    while any(_is_alive(pid) for pid in pids):  # the test's own timeout ends this if one stays
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    """A zombie that nobody reaps in a container is dead all the same."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False
