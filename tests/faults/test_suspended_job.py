"""A job that is suspended with all its processes, for longer than any limit, answers every row when it goes on.

Processes are real, and so is SIGSTOP. Those that are watched are stopped before the one that watches them, and
continued after it. The limits are short and the suspensions longer, which is what the seconds of these tests are.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.processes import stopwatch
from npu_runner.processes.stopwatch import Stopwatch
from tests import zygote
from tests.batch.scripted import row, write_rows
from tests.replicas.jobs import ROOT, processes

# Who waits for a process that is stopped waits for ever.
pytestmark = pytest.mark.timeout(300)
SUSPENDED_SECONDS, LATER_SECONDS = 3.0, 0.4
POOL = """
import json, sys
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool
from tests.faults.worker_tasks import TakeSteps
limits = PoolLimits(num_workers=2, task_timeout_seconds=1.5)
with WorkerPool(TakeSteps(sys.argv[1], hangs={4}), limits) as pool:
    found = {}
    for task in range(8):
        pool.submit(task)
    while len(found) < 8:
        item = pool.get(1.0)
        if item is None:
            continue
        found[item.task] = item.result.code if isinstance(item.result, WorkerFailure) else item.result
        print("a result", file=sys.stderr, flush=True)
print(json.dumps([found, pool.num_replaced]))
"""
FLEET = """
import functools, sys
from npu_runner.serving.replicas import process_replica
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.load_balancer import RowQueue
from tests.replicas.owners import Quiet
from tests.replicas.test_stopped_replicas import made, run_of
process_replica.STOPPED_SECONDS = 2.0
queue, answers = RowQueue(200), []
queue.allow(0)
replicas = [functools.partial(made, f"replica {number}") for number in range(2)]
with Fleet(replicas, queue, Quiet(make_run=run_of, notify=print)) as fleet:
    fleet.load()
    fleet.serve(None)
    print("serving", file=sys.stderr, flush=True)
    for _ in range(25):  # rows come when all is over; the driver looks at its replicas meanwhile
        answers += fleet.poll(0.1)[0]
    queue.allow(200)
    while not fleet.is_over:
        answers += fleet.poll(0.1)[0]
print(len(answers))
"""


def suspend(job: subprocess.Popen[bytes], *, first_alone: float = 0.05) -> None:
    """Stop all processes of the job, and continue them when every limit is over. `first_alone`: seconds in which the
    job's own process sees the others stopped."""
    others = processes(b"", job.pid)
    assert others
    for pid in others:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(first_alone)
    os.kill(job.pid, signal.SIGSTOP)
    time.sleep(SUSPENDED_SECONDS)
    os.kill(job.pid, signal.SIGCONT)
    time.sleep(LATER_SECONDS)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):  # given up meanwhile: the test will see it
            os.kill(pid, signal.SIGCONT)


def script(code: str, *arguments: str, start: Any = subprocess) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", code, *arguments]
    found: subprocess.Popen[bytes] = start.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return found


def wait_for_line(job: subprocess.Popen[bytes], line: str) -> None:
    """Others before it, a library's warning say, do not count."""
    assert job.stderr is not None
    assert line.encode() in iter(lambda: job.stderr.readline().strip(), b""), f"it ended without {line!r}"


def test_tasks_under_way_are_not_given_up_and_not_tried_again(tmp_path: Path) -> None:
    """7 s. One that hangs is given up all the same, alone."""
    with script(POOL, str(tmp_path)) as job:
        wait_for_line(job, "a result")
        suspend(job)
        found, num_replaced = json.loads(job.communicate()[0])
    assert found == {str(task): "preprocessing_timeout" if task == 4 else task for task in range(8)}
    assert num_replaced == 1
    begun = [int(path.name.partition(".")[0]) for path in tmp_path.iterdir()]
    assert sorted(begun) == list(range(8)), "none was tried twice"


def test_a_replica_that_goes_on_later_than_its_driver_is_none_that_was_stopped() -> None:
    """9 s."""
    with script(FLEET, start=zygote.unless_full()) as job:
        wait_for_line(job, "serving")
        suspend(job, first_alone=1.5)
        output, errors = job.communicate()
    assert output.decode().split() == ["200"], errors.decode()


def job_of(folder: Path, *options: str, texts: int = 12, max_tokens: int = 150) -> subprocess.Popen[bytes]:
    rows = [row(str(n), "What is this?", max_tokens=max_tokens + n, ignore_eos=True) for n in range(texts)]
    write_rows(folder / "in.jsonl", rows)
    command = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--platform", "cpu", "--max-model-len", "512",
               "--kv-cache-bytes", "32M", "--preprocessing-workers", "1", "--max-num-seqs", "4", "--progress", "off",
               "--preprocessing-timeout", "2", *options]  # fmt: skip
    return subprocess.Popen([sys.executable, "-m", "npu_runner", *command], cwd=folder, stderr=subprocess.PIPE,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


def wait_until_it_answers(folder: Path, job: subprocess.Popen[bytes]) -> None:
    while not (folder / "out.jsonl").exists() or not (folder / "out.jsonl").stat().st_size:
        assert job.poll() is None, job.communicate()
        time.sleep(0.05)


def check_all_answered(folder: Path, job: subprocess.Popen[bytes], num_rows: int = 12) -> None:
    _, errors = job.communicate()
    assert job.returncode == 0, errors.decode()
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert sorted(int(item["custom_id"]) for item in rows) == list(range(num_rows))
    assert [item["error"] for item in rows] == [None] * num_rows
    assert b"died" not in errors, errors.decode()


@pytest.mark.full("two ranks are suspended for longer than their limit; a pool and a fleet stay")
def test_a_step_of_two_ranks_is_not_given_up(tmp_path: Path) -> None:
    """20 s, of which the ranks' start takes half."""
    with job_of(tmp_path, "--tensor-parallel-size", "2", "--step-timeout-seconds", "2.5") as job:
        wait_until_it_answers(tmp_path, job)
        suspend(job)
        check_all_answered(tmp_path, job)


@pytest.mark.slow
@pytest.mark.full("two replicas of the model, suspended three times; a pool and a fleet stay")
def test_a_job_of_two_replicas_is_suspended_again_and_again(tmp_path: Path) -> None:
    with job_of(tmp_path, "--data-parallel-size", "2", texts=48) as job:
        wait_until_it_answers(tmp_path, job)
        for _ in range(3):
            suspend(job)
            time.sleep(1)
        check_all_answered(tmp_path, job, 48)


# -- the watch alone, on a clock of the test's own -----------------------------------------------------------------


@pytest.fixture
def pass_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(stopwatch.time, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def num_looks(watch: Stopwatch, limit: float, every: float, pass_seconds: Any) -> int:
    for count in range(1, 10_000):
        pass_seconds(every)
        if watch.exceeds(limit):
            return count
    raise AssertionError("never")


@pytest.mark.parametrize("limit", [1.0, 30.0, 600.0])
def test_without_a_suspension_it_is_a_clock(limit: float, pass_seconds: Any) -> None:
    assert num_looks(Stopwatch(), limit, 0.5, pass_seconds) == 2 * limit + 1


@pytest.mark.parametrize("already", [1, 59])
def test_a_suspension_counts_for_little_and_leaves_a_while(already: int, pass_seconds: Any) -> None:
    watch = Stopwatch()
    for _ in range(2 * already):
        pass_seconds(0.5)
        assert not watch.exceeds(60.0)
    pass_seconds(36_000)
    assert not watch.exceeds(60.0)
    assert num_looks(watch, 60.0, 0.5, pass_seconds) == 2 * max(60 - already - 2, 5) + 1


def test_one_that_always_looks_late_still_comes_to_an_end(pass_seconds: Any) -> None:
    assert num_looks(Stopwatch(), 60.0, 30.0, pass_seconds) == 31


def test_no_limit_is_never_exceeded(pass_seconds: Any) -> None:
    watch = Stopwatch()
    pass_seconds(1e9)
    assert not watch.exceeds(float("inf"))
    assert watch.poll_seconds(float("inf")) == stopwatch.POLL_SECONDS
