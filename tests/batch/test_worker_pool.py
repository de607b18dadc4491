"""The pool: every task answered once, in bounded memory, through real processes. Deaths are in tests/faults."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner.errors import JobError
from npu_runner.processes.channel import Channel, ChannelClosed
from npu_runner.serving.workers.pool import PoolItem, PoolLimits, WorkerFailure, WorkerPool
from tests.batch.pool_tasks import Unreadable, allocate, allocate_and_keep, image, modules, square, without_job
from tests.full_set import only_full

DEFAULTS: dict[str, Any] = {"num_workers": 2, "task_timeout_seconds": 120.0, "are_forked": False}


@pytest.fixture(autouse=True, params=[False, True], ids=["started", "forked"])
def are_forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DEFAULTS, "are_forked", request.param)


def limits(**changes: Any) -> PoolLimits:
    return PoolLimits(**{**DEFAULTS, **changes})


def drained(pool: WorkerPool[Any], tasks: Iterable[Any]) -> list[PoolItem[Any]]:
    """The results of all of these, in the order in which they came."""
    asked = list(tasks)
    for task in asked:
        pool.submit(task)
    found = [waited_for(pool) for _ in asked]
    assert pool.get() is None
    assert pool.pending_bytes == 0
    return found


def waited_for(pool: WorkerPool[Any]) -> PoolItem[Any]:
    while (item := pool.get(1.0)) is None:
        """The test's own timeout ends this."""
    return item


def test_every_task_comes_back_once_with_its_result() -> None:
    with WorkerPool(square, limits()) as pool:
        found = drained(pool, range(200))
    assert sorted((item.task, item.result[0]) for item in found) == [(n, n * n) for n in range(200)]
    assert os.getpid() not in {item.result[1] for item in found}


def test_a_worker_comes_after_the_model() -> None:
    with WorkerPool(os.nice, limits(num_workers=1)) as pool:
        assert drained(pool, [0])[0].result == min(os.nice(0) + 10, 19)


def test_without_a_task_no_worker_is_started() -> None:
    with WorkerPool(square, limits()) as pool:
        assert pool.get(0.1) is None
        assert pool.worker_pids() == []


def test_arrays_arrive_whole_whatever_their_size() -> None:
    sides = [1, 10, 150, 700, 149, 1000]
    with WorkerPool(image, limits()) as pool:
        for item in drained(pool, sides):
            assert np.array_equal(item.result, image(item.task))
            assert item.num_bytes >= item.result.nbytes


@pytest.mark.from_nothing("what a worker imports")
def test_workers_import_neither_torch_nor_transformers() -> None:
    with WorkerPool(modules, limits(num_workers=1)) as pool:
        (item,) = drained(pool, [0])
    assert "npu_runner.serving.workers.worker" in item.result or "__main__" in item.result
    assert not {"torch", "transformers"} & {name.split(".")[0] for name in item.result}


@pytest.mark.parametrize("bound", [{"max_ready": 3}, {"max_ready_bytes": 600_000}])
def test_the_pool_runs_ahead_by_its_bounds_and_no_further(bound: dict[str, int]) -> None:
    num_tasks = 40
    with WorkerPool(image, limits(**bound)) as pool:
        for _ in range(num_tasks):
            pool.submit(300)
        for _ in range(19):
            waited_for(pool)
        # 270,000 bytes each: three fill either bound; two more may be under way when it is reached.
        num_left = len(pool.recall(num_tasks))
        assert num_tasks - 19 - (3 + 2) <= num_left <= num_tasks - 19


def test_tasks_that_no_worker_has_begun_can_be_had_back_the_last_ones_first() -> None:
    with WorkerPool(square, limits(num_workers=1, max_ready=1)) as pool:
        for task in range(10):
            pool.submit(task, num_bytes=100)
        assert pool.recall(3) == [9, 8, 7]
        assert pool.pending_bytes == 700
        assert sorted(waited_for(pool).task for _ in range(7)) == list(range(7))
        assert (pool.recall(5), pool.pending_bytes) == ([], 0)
        pool.submit(11)
        assert waited_for(pool).result[0] == 121, "it goes on"


def test_workers_that_never_start_end_the_job(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        WorkerPool(Unreadable(), limits(num_workers=1)) as pool,
        pytest.raises(JobError, match="die before their first row"),
    ):
        drained(pool, [1])
    assert "not a number" in capfd.readouterr().err


@pytest.mark.parametrize("seconds", [float("inf"), 1e10, 3e6])
def test_a_time_limit_may_be_none_or_longer_than_the_system_can_wait(seconds: float) -> None:
    with WorkerPool(square, limits(task_timeout_seconds=seconds)) as pool:
        assert sorted(item.task for item in drained(pool, range(20))) == list(range(20))


def test_closing_in_the_middle_leaves_no_process() -> None:
    pool = WorkerPool(square, limits())
    for task in range(1000):
        pool.submit(task)
    waited_for(pool)
    while len(pids := pool.worker_pids()) < 2:
        """The test's own timeout ends this."""
    pool.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_worker_output_does_not_reach_our_stdout(tmp_path: Path) -> None:
    script = """
import sys
from tests.batch.test_worker_pool import drained, limits
from npu_runner.serving.workers.pool import WorkerPool
with WorkerPool(print, limits(num_workers=1)) as pool:
    drained(pool, ["among the answers"])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_the_channel_tells_a_closed_end_from_a_message() -> None:
    ours, theirs = socket.socketpair()
    sender, receiver = Channel(ours), Channel(theirs)
    sent = {"array": np.arange(100_000), "small": np.arange(3), "text": "x"}
    thread = threading.Thread(target=sender.send, args=(sent,))
    thread.start()
    received, num_bytes = receiver.receive()
    thread.join()
    assert np.array_equal(received["array"], sent["array"])
    assert np.array_equal(received["small"], sent["small"])
    assert num_bytes > sent["array"].nbytes
    received["array"][0] = 5  # writable, and nobody else's
    assert sent["array"][0] == 0
    sender.close()
    with pytest.raises(ChannelClosed):
        receiver.receive()
    with pytest.raises(ChannelClosed):
        receiver.send("x")


def test_a_stuck_end_is_given_up_after_the_timeout() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with pytest.raises(ChannelClosed):
            Channel(ours, timeout_seconds=0.05).send(bytes(50_000_000))
        theirs.sendall(b"half a header")
        with pytest.raises(ChannelClosed):
            Channel(ours, timeout_seconds=0.05).receive()


@pytest.mark.from_nothing("what a worker has of memory")
def test_a_task_that_wants_more_memory_than_its_worker_has_fails_by_name_and_the_next_ones_do_not() -> None:
    mib, tasks = 1 << 20, [10 << 20, 400 << 20, 10 << 20, 150 << 20, 400 << 20, 150 << 20]
    with WorkerPool(allocate, limits(num_workers=1, worker_memory_bytes=200 * mib)) as pool:
        found = drained(pool, tasks)
    assert [item.task for item in found] == tasks
    for item in found:
        if item.task > 200 * mib:
            assert isinstance(item.result, WorkerFailure)
            assert item.result.code == "preprocessing_out_of_memory"
            assert f"{200 * mib} bytes" in item.result.message
            assert "worker_memory_bytes" in item.result.message
        else:
            assert item.result[0] == item.task
    assert pool.num_replaced == 4, "each of the two was refused by a worker that had served, and by a new one"
    assert len({item.result[1] for item in found if not isinstance(item.result, WorkerFailure)}) == 3


@pytest.mark.from_nothing("what a worker has of memory")
@pytest.mark.parametrize("num_workers", [1, *only_full("others that stand idle; one worker stays", 3)])
def test_what_other_tasks_left_in_a_worker_fails_none_that_a_new_one_has_room_for(num_workers: int) -> None:
    """Whether or not others that have served stand idle."""
    mib = 1 << 20
    settings = limits(num_workers=num_workers, worker_memory_bytes=200 * mib)
    found: list[PoolItem[Any]] = []
    with WorkerPool(allocate_and_keep, settings) as pool:
        while len({item.result[1] for item in found}) < num_workers:
            found += drained(pool, [2 * mib] * num_workers)
        found += drained(pool, [199 * mib])
    assert [item.result[0] for item in found] == [item.task for item in found]
    assert found[-1].task == 199 * mib
    assert pool.num_replaced == 1


@pytest.mark.from_nothing("what a worker has of memory")
def test_fewer_forked_workers_run_where_they_take_much_memory() -> None:
    """400 MiB and 80 MiB for each of four, of which each takes 300: two run."""
    with WorkerPool(allocate_and_keep, limits(num_workers=4, are_forked=True)) as pool:
        drained(pool, [300 << 20] * 4)
        assert len(pool.worker_pids()) == 2
        assert [item.result[0] for item in drained(pool, [1] * 10)] == [1] * 10
        assert len(pool.worker_pids()) == 2
    assert pool.num_replaced == 0


@pytest.mark.from_nothing("what a worker has of memory")
def test_a_library_that_aborts_for_want_of_memory_fails_its_task_and_names_the_limit() -> None:
    with WorkerPool(allocate, limits(num_workers=1, worker_memory_bytes=1 << 30)) as pool:
        found = {item.task: item.result for item in drained(pool, [5, -1, 6])}
    assert (found[5][0], found[6][0]) == (5, 6)
    assert found[-1].code == "preprocessing_crashed"
    assert "SIGABRT" in found[-1].message
    assert f"{1 << 30} bytes of memory" in found[-1].message


def test_without_a_limit_a_worker_takes_what_it_needs() -> None:
    with WorkerPool(allocate, limits(num_workers=1)) as pool:
        assert drained(pool, [300 << 20])[0].result[0] == 300 << 20


def test_a_job_fault_in_a_worker_ends_the_pool_with_it() -> None:
    with WorkerPool(without_job, limits(num_workers=1)) as pool, pytest.raises(JobError, match="input is gone"):
        drained(pool, ["a", "gone"])


def test_workers_can_read_a_descriptor_that_has_no_name(tmp_path: Path) -> None:
    with tempfile.TemporaryFile(dir=tmp_path) as file:
        file.write(b"rows")
        file.flush()
        with WorkerPool(os.fstat, limits(num_workers=1), [file.fileno()]) as pool:
            assert drained(pool, [file.fileno()])[0].result.st_size == 4
