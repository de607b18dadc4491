"""Chooses kernels and tiles of a mixture of experts by the number of tokens. Knows nothing of models.

T tokens, K experts a token, E experts, D hidden size, I width of an expert, P = T K pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import launch_settings
from npu_runner.platforms.cuda.matmul.quantised_inputs import quantise_rows
from npu_runner.platforms.cuda.matmul.small_m import Tile
from npu_runner.platforms.cuda.moe import kernels, quantised_kernels
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import QuantisedExperts

# Pairs that a program of the sort handles at a time. Up to `FEW_PAIRS` a single program sorts all of them. In a graph,
# where three more launches cost less, the limit is `_FEW_IN_GRAPHS`.
_SORT_PAIRS, FEW_PAIRS, _FEW_IN_GRAPHS = 1024, 4096, 1024
# Up to this number tokens share too few experts for a sort to pay.
UNSORTED_TOKENS = 2
_COMBINE_COLUMNS = 1024


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """The pairs of a block and the tiles of both GEMMs, for up to `most_pairs_per_expert` on average."""

    most_pairs_per_expert: float
    rows: int
    gate_up: Tile
    down: Tile


# The quickest of those that `bench.kernels --part experts --sweep` of f89c05bf tries, on an H200,
# but for the last: with four stages it took 6 % less, and had no room in an A100's shared memory.
_IN_16_BITS = (
    Tiling(most_pairs_per_expert=8, rows=16, gate_up=Tile(64, 128, 4, 3), down=Tile(128, 128, 4, 3)),
    Tiling(most_pairs_per_expert=48, rows=32, gate_up=Tile(128, 64, 4, 3), down=Tile(256, 64, 4, 3)),
    Tiling(most_pairs_per_expert=float("inf"), rows=128, gate_up=Tile(128, 64, 8, 3), down=Tile(256, 64, 8, 3)),
)
# For unsorted pairs, which are few: small tiles, so that every multiprocessor has one (H100).
_UNSORTED = Tiling(most_pairs_per_expert=1, rows=16, gate_up=Tile(32, 128, 4, 5), down=Tile(64, 64, 4, 5))
_IN_FLOAT32 = (
    Tiling(most_pairs_per_expert=8, rows=16, gate_up=Tile(32, 32, 4, 2), down=Tile(64, 32, 4, 2)),
    Tiling(most_pairs_per_expert=float("inf"), rows=64, gate_up=Tile(32, 32, 4, 2), down=Tile(64, 32, 4, 2)),
)
# The quickest of those that `bench.kernels --part experts --sweep` of f89c05bf tries, on an H100.
_IN_FP8 = (
    Tiling(most_pairs_per_expert=8, rows=16, gate_up=Tile(64, 128, 8, 3), down=Tile(64, 128, 8, 4)),
    Tiling(most_pairs_per_expert=32, rows=32, gate_up=Tile(64, 128, 4, 4), down=Tile(128, 128, 4, 4)),
    Tiling(most_pairs_per_expert=128, rows=64, gate_up=Tile(128, 128, 8, 3), down=Tile(128, 128, 8, 3)),
    Tiling(most_pairs_per_expert=float("inf"), rows=128, gate_up=Tile(128, 128, 8, 3), down=Tile(128, 128, 8, 4)),
)
_IN_INT8 = (
    Tiling(most_pairs_per_expert=8, rows=16, gate_up=Tile(64, 256, 4, 3), down=Tile(128, 256, 4, 2)),
    Tiling(most_pairs_per_expert=32, rows=32, gate_up=Tile(128, 128, 4, 3), down=Tile(256, 128, 4, 3)),
    Tiling(most_pairs_per_expert=128, rows=64, gate_up=Tile(128, 128, 8, 3), down=Tile(128, 128, 8, 3)),
    Tiling(most_pairs_per_expert=float("inf"), rows=128, gate_up=Tile(128, 128, 8, 3), down=Tile(256, 128, 8, 3)),
)


class Pairs(NamedTuple):
    """The pairs of each block, int32: see kernels.py. `num_blocks` is the number that the worst routing needs.

    `experts` has each pair's expert, (T, K). `held` are the experts of this rank, None if it holds all.
    """

    experts: Tensor
    order: Tensor
    block_experts: Tensor
    block_rows: Tensor
    num_blocks: int
    is_sorted: bool
    held: HeldExperts | None

    @property
    def first_expert(self) -> int:
        return 0 if self.held is None else self.held.first


def route(logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """`Ops.route`."""
    num_tokens, num_experts = logits_TE.shape
    weights_TK = torch.empty((num_tokens, top_k), dtype=logits_TE.dtype, device=logits_TE.device)
    experts_TK = torch.empty((num_tokens, top_k), dtype=torch.int32, device=logits_TE.device)
    kernels.route[(num_tokens,)](
        logits_TE, weights_TK, experts_TK, logits_TE.stride(0), num_experts, RENORMALISE=renormalise, TOP_K=top_k,
        EXPERTS=triton.next_power_of_2(num_experts), PLACES=triton.next_power_of_2(top_k), num_warps=1,
        **launch_settings(),
    )
    return weights_TK, experts_TK


def tilings(dtype: torch.dtype) -> tuple[Tiling, ...]:
    return {torch.float32: _IN_FLOAT32, torch.int8: _IN_INT8, torch.float8_e4m3fn: _IN_FP8}.get(dtype, _IN_16_BITS)


def _tiling_of_unsorted(dtype: torch.dtype) -> Tiling:
    choices = tilings(dtype)
    return _UNSORTED if choices is _IN_16_BITS else choices[0]


def run_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor | QuantisedExperts,
                down: Tensor | QuantisedExperts, held: HeldExperts | None) -> Tensor:
    """`Ops.experts` and `QuantisedOps.experts`."""
    gemms, values = _gemms_of(gate_up)
    if x_TD.shape[0] <= UNSORTED_TOKENS:
        return gemms(x_TD, weights_TK, unsorted(experts_TK, held), gate_up, down, _tiling_of_unsorted(values.dtype))
    average = experts_TK.numel() / (len(values) if held is None else held.total)
    tiling = next(tiling for tiling in tilings(values.dtype) if average <= tiling.most_pairs_per_expert)
    pairs = sort_pairs(experts_TK, len(values), tiling.rows, held=held)
    return gemms(x_TD, weights_TK, pairs, gate_up, down, tiling)


def compile_all(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor | QuantisedExperts,
                down: Tensor | QuantisedExperts, held: HeldExperts | None) -> None:
    """Call each kernel that any number of tokens may need, over one token: none is then compiled while serving."""
    gemms, values = _gemms_of(gate_up)
    token = x_TD[:1], weights_TK[:1]
    gemms(*token, unsorted(experts_TK[:1], held), gate_up, down, _tiling_of_unsorted(values.dtype))
    for tiling in tilings(values.dtype):
        for few in (0, FEW_PAIRS):
            pairs = sort_pairs(experts_TK[:1], len(values), tiling.rows, few, held=held)
        gemms(*token, pairs, gate_up, down, tiling)


def _gemms_of(gate_up: Tensor | QuantisedExperts) -> tuple[Callable[..., Tensor], Tensor]:
    return (quantised_gemms, gate_up.values) if isinstance(gate_up, QuantisedExperts) else (dense_gemms, gate_up)


def unsorted(experts_TK: Tensor, held: HeldExperts | None = None) -> Pairs:
    """Each pair is a block of its own."""
    return Pairs(experts_TK, experts_TK, experts_TK, experts_TK, experts_TK.numel(), is_sorted=False, held=held)


def sort_pairs(experts_TK: Tensor, num_experts: int, rows: int, few: int | None = None, *,
               held: HeldExperts | None = None) -> Pairs:
    """Sort pairs by expert into blocks of `rows`; up to `few` pairs are one launch. This rank holds `num_experts`."""
    num_pairs = experts_TK.numel()
    if few is None:
        is_captured = experts_TK.is_cuda and torch.cuda.is_current_stream_capturing()
        few = _FEW_IN_GRAPHS if is_captured else FEW_PAIRS
    num_blocks = min(num_pairs, num_pairs // rows + min(num_experts, num_pairs))
    counts, starts, ranks, order, block_experts, block_rows = (
        torch.empty(size, dtype=torch.int32, device=experts_TK.device)
        for size in (num_experts, num_experts, num_pairs, num_blocks * rows, num_blocks, num_blocks))
    width = triton.next_power_of_2(num_experts)
    pairs = Pairs(experts_TK, order, block_experts, block_rows, num_blocks, is_sorted=True, held=held)
    if num_pairs <= few:
        kernels.sort_few[(1,)](
            experts_TK, counts, starts, ranks, order, block_experts, block_rows, num_pairs, num_experts, num_blocks,
            rows, pairs.first_expert, EXPERTS=width, PAIRS=_SORT_PAIRS, num_warps=8, **launch_settings(),
        )
        return pairs
    counts.zero_()
    grid = (triton.cdiv(num_pairs, _SORT_PAIRS),)
    kernels.count_pairs[grid](experts_TK, counts, ranks, num_pairs, pairs.first_expert, num_experts,
                              PAIRS=_SORT_PAIRS, num_warps=8)
    kernels.lay_out_blocks[(1,)](counts, starts, block_experts, block_rows, num_experts, num_blocks, rows,
                                 EXPERTS=width, num_warps=4)
    kernels.place_pairs[grid](experts_TK, starts, ranks, order, num_pairs, rows, pairs.first_expert, num_experts,
                              PAIRS=_SORT_PAIRS, num_warps=8)
    return pairs


def dense_gemms(x_TD: Tensor, weights_TK: Tensor, pairs: Pairs, gate_up_E2ID: Tensor, down_EDI: Tensor,
                tiling: Tiling) -> Tensor:
    num_tokens, hidden_size = x_TD.shape
    top_k, width = weights_TK.shape[1], down_EDI.shape[2]
    hidden_PI = torch.empty((num_tokens * top_k, width), dtype=x_TD.dtype, device=x_TD.device)
    outputs_PD = torch.empty((num_tokens * top_k, hidden_size), dtype=x_TD.dtype, device=x_TD.device)
    here = (pairs.first_expert, len(gate_up_E2ID))
    blocks = (pairs.order, pairs.block_experts, pairs.block_rows, *here)
    holds_all = pairs.held is None
    tile = tiling.gate_up
    kernels.gate_up[(pairs.num_blocks * triton.cdiv(width, tile.block_n),)](
        x_TD, gate_up_E2ID, *blocks, hidden_PI, x_TD.stride(0), top_k, hidden_size, width, IS_SORTED=pairs.is_sorted,
        HOLDS_ALL=holds_all, IS_EVEN=hidden_size % tile.block_k == 0, BLOCK_M=tiling.rows, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_settings(),
    )
    tile = tiling.down
    kernels.down[(pairs.num_blocks * triton.cdiv(hidden_size, tile.block_n),)](
        hidden_PI, down_EDI, *blocks, outputs_PD, width, hidden_size, IS_SORTED=pairs.is_sorted,
        HOLDS_ALL=holds_all, IS_EVEN=width % tile.block_k == 0, BLOCK_M=tiling.rows, BLOCK_N=tile.block_n,
        BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_settings(),
    )
    return combine(outputs_PD, weights_TK, pairs, here)


def quantised_gemms(x_TD: Tensor, weights_TK: Tensor, pairs: Pairs, gate_up: QuantisedExperts, down: QuantisedExperts,
                    tiling: Tiling) -> Tensor:
    """(T, D). The inputs of both GEMMs are rounded first."""
    num_tokens, hidden_size = x_TD.shape
    top_k, width = weights_TK.shape[1], down.values.shape[2]
    shared = {"IS_SORTED": pairs.is_sorted, "HOLDS_ALL": pairs.held is None,
              "IS_INT8": gate_up.values.dtype == torch.int8, "BLOCK_M": tiling.rows, **launch_settings()}
    here = (pairs.first_expert, len(gate_up.values))
    blocks = (pairs.order, pairs.block_experts, pairs.block_rows, *here)
    hidden_PI = torch.empty((num_tokens * top_k, width), dtype=x_TD.dtype, device=x_TD.device)
    rows, scales, stride = _rounded(x_TD, gate_up)
    tile = tiling.gate_up
    quantised_kernels.gate_up[(pairs.num_blocks * triton.cdiv(width, tile.block_n),)](
        rows, scales, *gate_up, *blocks, hidden_PI, rows.stride(0), stride, top_k, hidden_size, width,
        IS_EVEN=hidden_size % tile.block_k == 0, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **shared)
    outputs_PD = torch.empty((num_tokens * top_k, hidden_size), dtype=x_TD.dtype, device=x_TD.device)
    rows, scales, stride = _rounded(hidden_PI, down)
    tile = tiling.down
    quantised_kernels.down[(pairs.num_blocks * triton.cdiv(hidden_size, tile.block_n),)](
        rows, scales, *down, *blocks, outputs_PD, stride, width, hidden_size, IS_EVEN=width % tile.block_k == 0,
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages, **shared)
    return combine(outputs_PD, weights_TK, pairs, here)


def _rounded(x_MI: Tensor, weight: QuantisedExperts) -> tuple[Tensor, Tensor, int]:
    """Rows in the dtype of `weight`, their scales, and the stride between the scales of groups."""
    in_groups = weight.scales.dim() == 3
    rows, scales = quantise_rows(x_MI, weight.values.dtype, in_groups=in_groups)
    return rows, scales, scales.stride(1) if in_groups else 0


def combine(outputs_PD: Tensor, weights_TK: Tensor, pairs: Pairs, here: tuple[int, int]) -> Tensor:
    """Each token's weighted sum of its pairs' outputs, (T, D). `here`: this rank's first expert, and their number."""
    (num_tokens, top_k), hidden_size = weights_TK.shape, outputs_PD.shape[1]
    out_TD = torch.empty((num_tokens, hidden_size), dtype=outputs_PD.dtype, device=outputs_PD.device)
    kernels.combine[(triton.cdiv(hidden_size, _COMBINE_COLUMNS), num_tokens)](
        outputs_PD, weights_TK, pairs.experts, out_TD, *here, hidden_size, TOP_K=top_k, HOLDS_ALL=pairs.held is None,
        BLOCK_N=_COMBINE_COLUMNS, num_warps=4, **launch_settings(),
    )
    return out_TD
