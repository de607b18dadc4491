"""HCCL between processes: values, graphs, and a rank that never arrives."""

import os
import socket
import subprocess
import sys

import pytest

from .checks import check_names
from .environment import ROOT, environment

pytestmark = pytest.mark.npu


def run_ranks(size: int, mode: str, **options: object) -> list[str]:
    """Starts `size` ranks and returns what each printed; a rank that fails fails the test with its output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(num_devices=size, memory_bytes=256 << 20, **options)  # type: ignore[arg-type]
    env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.cann.programs.hccl_rank", mode]
    ranks = [
        subprocess.Popen(
            command, env=env | {"RANK": str(rank)}, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(size)
    ]
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, f"{out}\n{err[-4000:]}"
    return [out for out, _ in outputs]


@pytest.mark.parametrize("size", [2, 4])
def test_collectives(size: int) -> None:
    before = set(os.listdir("/dev/shm"))
    outputs = run_ranks(size, "all")
    for out in outputs:
        assert [line.removeprefix("PASSED ") for line in out.splitlines() if line.startswith("PASSED ")] == check_names(
            "hccl_rank"
        )
    assert {name for name in set(os.listdir("/dev/shm")) - before if "cann" in name} == set()


def test_a_rank_that_never_arrives_times_out() -> None:
    first, second, last = run_ranks(3, "absent", hccl_timeout_ms=1500)
    assert "TIMED OUT" in first
    assert "TIMED OUT" in second
    assert "ABSENT" in last
