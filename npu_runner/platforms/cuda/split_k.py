"""Split-K: several programs share the K of one tile, and the last of them to finish adds the partial accumulators.

They are added in the order of the splits, so the result does not depend on which program was last. Knows no weights.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
MOST_TILES = 16_384


def make_counters(device: torch.device, num_tiles: int) -> Tensor:
    """A counter for each tile, 0 before and after each kernel. Each stream has its own, since streams run at once."""
    assert num_tiles <= MOST_TILES, f"{num_tiles} tiles are more than {MOST_TILES}"
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
    return _COUNTERS[key]


@triton.jit
def finish(acc, bias, out, partials, counters, M, N, offs_n, offs_m, HAS_BIAS: tl.constexpr, SPLIT_K: tl.constexpr):
    """Store the tile (offs_n, offs_m) of `out` (M, N), after the last of its SPLIT_K programs."""
    mask = (offs_m < M)[None, :] & (offs_n < N)[:, None]
    offsets = offs_m[None, :] * N + offs_n[:, None]
    is_last = True
    if SPLIT_K > 1:
        own_partials = partials + tl.program_id(1).to(tl.int64) * M * N
        tl.store(own_partials + offsets, acc, mask=mask)
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tl.program_id(0), 1, sem="acq_rel") == SPLIT_K - 1
    if is_last:
        if SPLIT_K > 1:
            tl.store(counters + tl.program_id(0), 0)
            acc = tl.zeros_like(acc)
            for index in tl.static_range(SPLIT_K):
                acc += tl.load(partials + index * M * N + offsets, mask=mask, other=0.0,
                               cache_modifier=".cg")
        if HAS_BIAS:
            acc += tl.load(bias + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[:, None]
        tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=mask)
