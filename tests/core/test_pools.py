"""Memory of pools: the kernel says what is taken of it."""

from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch

from npu_runner.platforms.pools import zeros
from npu_runner.platforms.transfers import HOST
from npu_runner.request.limits import GIB, MIB

STATM = Path("/proc/self/statm")


def resident_bytes() -> int:
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("sizes", [(3, 5, 7), (2, 0, 4)])
def test_they_are_zeros_that_can_be_written(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    pool = zeros(sizes, dtype, HOST)
    assert torch.equal(pool, torch.zeros(sizes, dtype=dtype))
    assert pool.is_contiguous()
    pool += 1
    assert int(pool.sum()) == math.prod(sizes)


@pytest.mark.skipif(not STATM.exists(), reason="asks Linux for this process's memory")
def test_memory_is_taken_as_it_is_written() -> None:
    before = resident_bytes()
    pool = zeros((2, GIB // 2), torch.int8, HOST)
    assert resident_bytes() - before < 16 * MIB
    pool[1, : 64 * MIB] = 1
    assert resident_bytes() - before >= 64 * MIB
    del pool
    assert resident_bytes() - before < 16 * MIB


def test_more_than_the_system_has_is_an_error_of_memory() -> None:
    with pytest.raises(MemoryError, match="no 281474976710656 bytes"):
        zeros((1 << 48,), torch.int8, HOST)
