"""A Triton kernel that only reads, in the forms among which the fastest differs by GPU."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

# (values a program reads at once, warps, programs for each multiprocessor)
_FORMS = ((2048, 4, 8), (4096, 8, 4), (8192, 8, 2), (8192, 16, 2), (16384, 16, 2))


def readers(values: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Ways to read `values` (int32), by what they are."""
    multiprocessors = torch.cuda.get_device_properties(values.device).multi_processor_count
    return {f"Triton, {block} values, {warps} warps, {programs} programs":
            _reader(values, block, warps, multiprocessors * programs) for block, warps, programs in _FORMS}


def _reader(values: torch.Tensor, block: int, warps: int, num_programs: int) -> Callable[[], object]:
    sums = torch.empty(num_programs, dtype=torch.int32, device=values.device)
    return lambda: _sum_kernel[(num_programs,)](values, sums, values.numel() // block, BLOCK=block, num_warps=warps)


@triton.jit
def _sum_kernel(values_ptr, sums_ptr, num_blocks, BLOCK: tl.constexpr):
    """Each program sums every num_programs-th block, value by value of a block, and these at the end."""
    first, stride = tl.program_id(0), tl.num_programs(0)
    places = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for index in range(first, num_blocks, stride):
        total += tl.load(values_ptr + tl.cast(index, tl.int64) * BLOCK + places)
    tl.store(sums_ptr + first, tl.sum(total, 0))
