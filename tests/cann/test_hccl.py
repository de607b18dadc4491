"""HCCL between processes: values, graphs, and a rank that never arrives."""

import os

import pytest

from tests.cann.ranks import A3, AIV, run_ranks

from .checks import check_names
from .environment import has_real_cann

pytestmark = pytest.mark.npu
emulated = pytest.mark.skipif(has_real_cann(), reason="a device takes what it takes, or hangs")


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
