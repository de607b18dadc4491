"""Experts in int8 or FP8 on CUDA: which kernels, of which tile sizes, for how many tokens. Knows nothing of models.

T tokens, K experts a token, E experts, D hidden size, I width of an expert, P = T K pairs.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from npu_runner.platforms.cuda import quantised_expert_kernels as kernels
from npu_runner.platforms.cuda.dependent_launch import launch_settings
from npu_runner.platforms.cuda.experts import (
    FEW_PAIRS,
    UNSORTED_TOKENS,
    Pairs,
    Tile,
    Tiling,
    combine,
    sort_pairs,
    unsorted,
)
from npu_runner.platforms.cuda.quantised_inputs import quantise_rows
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import QuantisedExperts

# The quickest of those that `python scripts/bench_quantised_experts.py --part layer --sweep` tries, on an H100.
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


def tilings(values: Tensor) -> tuple[Tiling, ...]:
    return _IN_INT8 if values.dtype == torch.int8 else _IN_FP8


def run_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None) -> Tensor:
    """`QuantisedOps.experts`."""
    num_experts, choices = len(gate_up.values), tilings(gate_up.values)
    if x_TD.shape[0] <= UNSORTED_TOKENS:
        return products(x_TD, weights_TK, unsorted(experts_TK, held), gate_up, down, choices[0])
    average = experts_TK.numel() / (num_experts if held is None else held.total)
    tiling = next(tiling for tiling in choices if average <= tiling.most_pairs_per_expert)
    pairs = sort_pairs(experts_TK, num_experts, tiling.rows, held=held)
    return products(x_TD, weights_TK, pairs, gate_up, down, tiling)


def compile_all(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None) -> None:
    """Call each kernel that any number of tokens may need, over one token: none is then compiled while serving."""
    token = x_TD[:1], weights_TK[:1]
    choices = tilings(gate_up.values)
    products(*token, unsorted(experts_TK[:1], held), gate_up, down, choices[0])
    for tiling in choices:
        for few in (0, FEW_PAIRS):
            pairs = sort_pairs(experts_TK[:1], len(gate_up.values), tiling.rows, few, held=held)
        products(*token, pairs, gate_up, down, tiling)


def products(x_TD: Tensor, weights_TK: Tensor, pairs: Pairs, gate_up: QuantisedExperts, down: QuantisedExperts,
             tiling: Tiling) -> Tensor:
    """(T, D). Inputs of both products are rounded before."""
    num_tokens, hidden_size = x_TD.shape
    top_k, width = weights_TK.shape[1], down.values.shape[2]
    shared = {"IS_SORTED": pairs.is_sorted, "HOLDS_ALL": pairs.held is None,
              "IS_INT8": gate_up.values.dtype == torch.int8, "ROWS": tiling.rows, **launch_settings()}
    here = (pairs.first_expert, len(gate_up.values))
    blocks = (pairs.order, pairs.block_experts, pairs.block_rows, *here)
    hidden_PI = torch.empty((num_tokens * top_k, width), dtype=x_TD.dtype, device=x_TD.device)
    rows, scales, stride = _rounded(x_TD, gate_up)
    tile = tiling.gate_up
    kernels.gate_up[(pairs.num_blocks * triton.cdiv(width, tile.columns),)](
        rows, scales, *gate_up, *blocks, hidden_PI, rows.stride(0), stride, top_k, hidden_size, width,
        IS_EVEN=hidden_size % tile.depth == 0, COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.num_warps,
        num_stages=tile.num_stages, **shared)
    outputs_PD = torch.empty((num_tokens * top_k, hidden_size), dtype=x_TD.dtype, device=x_TD.device)
    rows, scales, stride = _rounded(hidden_PI, down)
    tile = tiling.down
    kernels.down[(pairs.num_blocks * triton.cdiv(hidden_size, tile.columns),)](
        rows, scales, *down, *blocks, outputs_PD, stride, width, hidden_size, IS_EVEN=width % tile.depth == 0,
        COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.num_warps, num_stages=tile.num_stages, **shared)
    return combine(outputs_PD, weights_TK, pairs, here)


def _rounded(x_MI: Tensor, weight: QuantisedExperts) -> tuple[Tensor, Tensor, int]:
    """Rows as a product with `weight` takes them, their scales, and the stride from one group's to the next."""
    in_groups = weight.scales.dim() == 3
    rows, scales = quantise_rows(x_MI, weight.values.dtype, in_groups=in_groups)
    return rows, scales, scales.stride(1) if in_groups else 0
