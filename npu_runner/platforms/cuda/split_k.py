"""Sums of a product whose inputs are cut into parts: each part's program leaves its sum, the last to come adds them.

They are added in the order of the parts, so a result does not depend on which came last. Knows nothing of weights.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}
MOST_TILES = 16_384


def counters(device: torch.device, num_tiles: int) -> Tensor:
    """A counter for each tile, 0 before and after each product. Each stream has its own: streams run at once."""
    assert num_tiles <= MOST_TILES, f"{num_tiles} tiles are more than {MOST_TILES}"
    key = (device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    if key not in _COUNTERS:
        _COUNTERS[key] = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
    return _COUNTERS[key]


@triton.jit
def finish(results, bias, out, parts, counts, num_rows, num_outputs, outputs, rows, HAS_BIAS: tl.constexpr,
           SPLITS: tl.constexpr):
    """Store one tile (outputs, rows) of `out` (rows, outputs), of one part or of all SPLITS parts."""
    is_there = (rows < num_rows)[None, :] & (outputs < num_outputs)[:, None]
    places = rows[None, :] * num_outputs + outputs[:, None]
    is_last = True
    if SPLITS > 1:
        part = parts + tl.program_id(1).to(tl.int64) * num_rows * num_outputs
        tl.store(part + places, results, mask=is_there)
        tl.debug_barrier()
        is_last = tl.atomic_add(counts + tl.program_id(0), 1, sem="acq_rel") == SPLITS - 1
    if is_last:
        if SPLITS > 1:
            tl.store(counts + tl.program_id(0), 0)
            results = tl.zeros_like(results)
            for index in tl.static_range(SPLITS):
                results += tl.load(parts + index * num_rows * num_outputs + places, mask=is_there, other=0.0,
                                   cache_modifier=".cg")
        if HAS_BIAS:
            results += tl.load(bias + outputs, mask=outputs < num_outputs, other=0.0).to(tl.float32)[:, None]
        tl.store(out + places, results.to(out.dtype.element_ty), mask=is_there)
