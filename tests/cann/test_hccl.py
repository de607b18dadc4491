"""HCCL between processes: values, graphs, and a rank that never arrives."""

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests import zygote

from .checks import check_names
from .environment import ROOT, environment, has_real_cann

pytestmark = pytest.mark.npu
emulated = pytest.mark.skipif(has_real_cann(), reason="a device takes what it takes, or hangs")


def run_ranks(size: int, mode: str, *, program: str = "tests.cann.programs.hccl_rank", **options: object) -> list[str]:
    """Starts `size` ranks and returns what each printed; a rank that fails fails the test with its output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = environment(num_devices=size, memory_bytes=256 << 20, **options)  # type: ignore[arg-type]
    env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", program, mode]
    start: Any = subprocess.Popen if has_real_cann() else zygote.Popen
    ranks = [
        start(
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


def expect(word: str, outputs: list[str]) -> None:
    assert all(word in out for out in outputs), outputs


def test_collectives() -> None:
    assert_collectives(2, "all")


@pytest.mark.full("four processes on two cores; two stay")
def test_collectives_of_four() -> None:
    assert_collectives(4, "quick")


def assert_collectives(size: int, mode: str) -> None:
    """quick leaves out the graph engine, which four ranks take long to compile for and which needs two at most."""
    before = set(os.listdir("/dev/shm"))
    wanted = [name for name in check_names("hccl_rank") if mode == "all" or "graph_engine" not in name]
    for out in run_ranks(size, mode):
        assert [line.removeprefix("PASSED ") for line in out.splitlines() if line.startswith("PASSED ")] == wanted
    assert {name for name in set(os.listdir("/dev/shm")) - before if "cann" in name} == set()


@pytest.mark.full("two ranks compile; the emulation's refusals of single operators stay")
def test_the_graph_engine_refuses_a_communicator_of_single_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operators are waited for: torch_npu may lose the error of one that is not (docs/ascend.md)."""
    monkeypatch.setenv("ASCEND_LAUNCH_BLOCKING", "1")
    expect("REFUSED", run_ranks(2, "shared"))


A3 = {"soc": "Ascend910_9382"}
AIV = {"HCCL_OP_EXPANSION_MODE": "AIV"}


@emulated
@pytest.mark.parametrize("where", [AIV, A3], ids=["aiv", "a3"])
def test_int64_is_not_compared_on_the_device(where: dict[str, str]) -> None:
    expect("REFUSED", run_ranks(2, "int64", TASK_QUEUE_ENABLE="0", **where))


@emulated
@pytest.mark.full("two ranks start twice; what one communicator does stays")
def test_a_second_communicator_on_the_vector_cores_is_refused() -> None:
    expect("REFUSED", run_ranks(2, "second", TASK_QUEUE_ENABLE="0", **AIV))
    expect("BOTH", run_ranks(2, "two", **AIV))


@emulated
@pytest.mark.full("two ranks capture seven graphs; graphs that run out stay, without ranks")
def test_an_a3_takes_six_graphs_with_collectives_on_the_ai_cpu() -> None:
    expect("REFUSED AFTER 6", run_ranks(2, "seven", **A3))


@emulated
@pytest.mark.parametrize("mode", ["longer", "eager"])
def test_ranks_that_captured_different_collectives_are_told(mode: str) -> None:
    expect("NAMED", run_ranks(2, mode))


def test_a_rank_that_never_arrives_times_out() -> None:
    first, second, last = run_ranks(3, "absent", hccl_timeout_ms=1500)
    assert "TIMED OUT" in first
    assert "TIMED OUT" in second
    assert "ABSENT" in last
