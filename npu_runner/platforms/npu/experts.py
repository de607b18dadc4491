"""A mixture of experts through torch_npu's fused kernels, in 16 bits or in int8. Knows nothing of models.

T tokens, K experts a token, E experts, D hidden size, I width of an expert, P = T K pairs.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_runner.platforms.npu.weight_layout import WeightLayout
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import QuantisedExperts

# npu_dequant_swiglu_quant is right on A2 and A3 devices for these outputs of an expert, and pairs of narrow ones. With
# others its kernel reads or overwrites the scales of other rows and says nothing.
_SWIGLU_ALIGNMENT, _MOST_OF_SWIGLU, _WIDE, _LEAST_PAIRS = 64, 3616, 256, 8
_NOT_ROUNDED, _BY_ROW = -1, 1


def run_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None) -> Tensor:
    """`Ops.experts`."""
    rows_PD, places_P, counts_E, _ = _sort(x_TD, experts_TK, len(gate_up), held, _NOT_ROUNDED)
    hidden_PI = torch_npu.npu_swiglu(_grouped(rows_PD, gate_up, counts_E))
    return _add_up(_grouped(hidden_PI, down, counts_E), places_P, weights_TK, held)


def run_int8_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                     down: QuantisedExperts, held: HeldExperts | None, layout: WeightLayout, *,
                     dequantises: bool = True) -> Tensor:
    """`QuantisedOps.experts` of int8. Where gate and up lie in NZ one kernel makes the rows that down takes. Else sums
    stay integers until theirs rounds them again, unless `dequantises` is False."""
    rows_PD, places_P, counts_E, scales_P = _sort(x_TD, experts_TK, len(gate_up.values), held, _BY_ROW)
    width = gate_up.values.shape[2] // 2
    if layout.fuses_experts(x_TD.shape[1], 2 * width):
        hidden_PI, of_hidden_P = torch_npu.npu_grouped_matmul_swiglu_quant_v2(
            rows_PD, [gate_up.values], [gate_up.scales], scales_P, counts_E, group_list_type=_list_type(counts_E))
    elif (dequantises and width % _SWIGLU_ALIGNMENT == 0 and width <= _MOST_OF_SWIGLU
          and (width >= _WIDE or experts_TK.numel() >= _LEAST_PAIRS)):
        sums_P2I = _grouped(rows_PD, gate_up.values, counts_E, output_dtype=torch.int32)
        hidden_PI, of_hidden_P = torch_npu.npu_dequant_swiglu_quant(
            sums_P2I, weight_scale=gate_up.scales, activation_scale=scales_P, group_index=counts_E, activate_left=True,
            quant_mode=_BY_ROW)
    else:
        # A matmul whose result is bfloat16 takes no float32 scales of outputs.
        scales = gate_up.scales.to(torch.bfloat16) if x_TD.dtype == torch.bfloat16 else gate_up.scales
        both_P2I = _grouped(rows_PD, gate_up.values, counts_E, scale=[scales], per_token_scale=[scales_P],
                            output_dtype=x_TD.dtype)
        hidden_PI, of_hidden_P = torch_npu.npu_dynamic_quant(torch_npu.npu_swiglu(both_P2I))
    outputs_PD = _grouped(hidden_PI, down.values, counts_E, scale=[down.scales], per_token_scale=[of_hidden_P],
                          output_dtype=x_TD.dtype)
    return _add_up(outputs_PD, places_P, weights_TK, held)


def _sort(x_TD: Tensor, experts_TK: Tensor, count: int, held: HeldExperts | None,
          quant_mode: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows by expert, each pair's place among them, rows of each expert, and the scales of rows that are rounded."""
    first, total = held or (0, count)
    # The range is spelled out: without it torch_npu looks into an empty list for some shapes.
    rows, places, counts, scales = torch_npu.npu_moe_init_routing_v2(
        x_TD, experts_TK, active_num=experts_TK.numel(), expert_num=total, expert_tokens_num_type=1,
        expert_tokens_num_flag=True, active_expert_range=[first, first + count], quant_mode=quant_mode, row_idx_type=0)
    return rows, places, counts, scales


def _add_up(outputs_PD: Tensor, places_P: Tensor, weights_TK: Tensor, held: HeldExperts | None) -> Tensor:
    """Each token's sum of its pairs' outputs by weight, (T, D)."""
    # The graph engine has no converter of npu_moe_token_unpermute: torchair.py brings one.
    if held is None:
        return torch_npu.npu_moe_token_unpermute(outputs_PD, places_P, probs=weights_TK)
    # Pairs of other ranks' experts have place -1. They take row 0 with weight 0, and rows behind the pairs that are
    # here are undefined: row 0 is, where there are none.
    is_away_TK = (places_P < 0).view_as(weights_TK)
    weights_TK = weights_TK.masked_fill(is_away_TK, 0.0)
    out_TD = torch_npu.npu_moe_token_unpermute(outputs_PD, torch.relu(places_P), probs=weights_TK)
    return out_TD.masked_fill_(is_away_TK.all(), 0.0)


def _grouped(rows: Tensor, weight: Tensor, counts: Tensor, *, scale: list[Tensor] | None = None,
             per_token_scale: list[Tensor] | None = None, output_dtype: torch.dtype | None = None) -> Tensor:
    """Each group's rows, of which there are `counts`, times its weight (in, out)."""
    return torch_npu.npu_grouped_matmul([rows], [weight], split_item=2, group_type=0, group_list=counts,
                                        group_list_type=_list_type(counts), scale=scale,
                                        per_token_scale=per_token_scale, output_dtype=output_dtype)[0]


def _list_type(counts: Tensor) -> int:
    # As counts (type 1) a list of one is refused; as running totals (type 0) it says the same.
    return 0 if counts.shape[0] == 1 else 1
