"""Ranks agree on the smallest cache wherever HCCL lays its collectives out: it compares int64 in few places."""

from __future__ import annotations

import pytest

from tests.cann.environment import has_real_cann
from tests.cann.ranks import A3, AIV, run_ranks

pytestmark = pytest.mark.npu


@pytest.mark.skipif(has_real_cann(), reason="the chip is chosen here")
def test_the_smallest_count_of_all_ranks_is_known_to_each() -> None:
    assert_known(A3)


@pytest.mark.skipif(has_real_cann(), reason="the chip is chosen here")
@pytest.mark.full("two ranks once more, with collectives on the vector cores; another chip's stay")
def test_the_smallest_count_is_known_on_the_vector_cores() -> None:
    assert_known(AIV)


def assert_known(where: dict[str, str]) -> None:
    found = run_ranks(2, "", program="tests.npu.programs.smallest", **where)
    assert [out.split("SMALLEST ")[1].strip() for out in found] == [str(2**31 - 2)] * 2
