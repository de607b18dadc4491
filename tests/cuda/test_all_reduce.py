"""Our all-reduce gives the bits of float32 sums in rank order, in one shot and in two, eagerly and replayed.

Ranks share a GPU where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.full_set import only_full

pytestmark = pytest.mark.ranks
_SECONDS = 240
ALL_IN_ONE_SHOT, ALL_IN_TWO_SHOTS = 32 << 20, 0


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@contextmanager
def ranks(case: str, num_ranks: int, num_calls: int, *more: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Running ranks, each of which is ready; killed at the end."""
    from npu_runner.engine.executors.shared_memory import open_store

    store = open_store()
    started: list[subprocess.Popen[str]] = []
    try:
        for rank in range(num_ranks):
            command = [sys.executable, "-m", "tests.cuda.all_reduce_ranks", case,
                       *map(str, (rank, num_ranks, store.port, num_calls, *more))]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for each in started:
            assert each.stdout is not None
            assert each.stdout.readline() == "ready\n"
        yield started
    finally:
        for each in started:
            each.kill()
        for each in started:
            each.wait()


def assert_right(started: list[subprocess.Popen[str]]) -> None:
    for each in started:
        assert each.communicate(timeout=_SECONDS)[0] == "wrong 0\n"
        assert each.returncode == 0


@pytest.mark.parametrize("most_one_shot", [ALL_IN_ONE_SHOT, ALL_IN_TWO_SHOTS], ids=["one shot", "two shots"])
@pytest.mark.parametrize(("num_ranks", "num_calls"),
                         [(2, 10_000), (3, 200), *only_full("more ranks take the way of three", (4, 200), (8, 200))])
def test_sums_are_those_of_float32_in_rank_order(num_ranks: int, num_calls: int, most_one_shot: int) -> None:
    if num_ranks > torch.cuda.device_count():  # contexts that share a GPU take turns of some milliseconds
        num_calls = min(num_calls, 200)
    with ranks("sums", num_ranks, num_calls, most_one_shot) as started:
        assert_right(started)


def test_a_rank_that_is_suspended_is_waited_for() -> None:
    with ranks("sums", 2, 2000) as started:
        for seconds in (1, 3):
            started[1].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            started[1].send_signal(signal.SIGCONT)
            time.sleep(0.2)
        assert_right(started)


@pytest.mark.parametrize("case", ["endless-eager", "endless-replayed"])
def test_a_rank_that_waits_for_a_dead_one_can_be_killed(case: str) -> None:
    with ranks(case, 2, 0) as started:
        time.sleep(0.5)
        started[0].kill()
        started[0].wait()
        time.sleep(0.5)
        started[1].kill()
        assert started[1].wait(_SECONDS) in (-signal.SIGKILL, -signal.SIGABRT, 1)


def test_messages_that_are_not_its_own_are_left_to_nccl() -> None:
    from npu_runner.platforms.cuda.all_reduce import CustomAllReduce

    reduce = CustomAllReduce.__new__(CustomAllReduce)
    reduce.most_bytes = 1 << 20
    halves = torch.zeros(1 << 20, device="cuda", dtype=torch.bfloat16)
    refused = (halves, halves[:9], halves[4:12], halves[:64].view(8, 8).t(), halves[:64].double(), halves[:64].long())
    assert not any(reduce(x) for x in refused)
    assert reduce(halves[:0]), "nothing to sum, and no kernel for it"


def test_peers_that_cannot_be_reached_are_named() -> None:
    """Both ranks go on with NCCL: one says why, the other learns of it."""
    from npu_runner.platforms.cuda.peer_memory import NoPeerMemory, PeerMemory

    def refuses() -> None:
        raise RuntimeError("no such kernel")

    sent = []

    def exchange(message: bytes) -> list[bytes]:
        sent.append(message)
        return [message, b"-GPUs 1 and 0 are not joined by NVLink"]

    with pytest.raises(NoPeerMemory, match="rank 1: GPUs 1 and 0 are not joined"):
        PeerMemory(0, 1 << 20, 0, exchange, lambda: None)
    with pytest.raises(NoPeerMemory, match="rank 0: no such kernel"):
        PeerMemory(0, 1 << 20, 0, exchange, refuses)
    assert sent[2] == b"-no such kernel"
