"""Operators of decoder layers through torch_npu's fused kernels; experts.py has those of experts. Knows no models.

T tokens, N query heads, K kv heads, H head dim, R dims of a head that turn, D hidden size, I width of an MLP or expert,
E experts, K of them a token, G groups of inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_runner.platforms.grouped import GroupedWeight, packed, unpacked
from npu_runner.platforms.npu.draw import draw_from_softmax
from npu_runner.platforms.npu.experts import run_experts, run_int8_experts
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.weight_layout import WeightLayout, packed_words
from npu_runner.platforms.ops import HeldExperts, TorchOps
from npu_runner.platforms.quantised import (
    Int8Rows,
    Int8Weight,
    NormRounding,
    QuantisedExperts,
    StaticInt8Weight,
    StaticRows,
)

# npu_apply_rotary_pos_emb turns q and k in one launch, in place; A2 and A3 devices take it for these head dims only.
_FUSED_ROTARY_HEAD_DIMS = (64, 128)


class NpuOps(TorchOps):
    experts_form = "npu_moe_init_routing_v2 and npu_grouped_matmul"
    fuses_rounding = True
    experts_in_out = True  # the grouped product takes (groups, in, out)
    down_scales_dtype = torch.bfloat16
    most_int8_features = 65535

    def __init__(self) -> None:
        self._layout = WeightLayout(npu_settings().nz_weights)

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_OD, bias_O)

    def int8_linear(self, x_TI: Tensor | Int8Rows, weight: Int8Weight, bias_O: Tensor | None) -> Tensor:
        rows = _rounded(x_TI) if isinstance(x_TI, Tensor) else x_TI
        return torch_npu.npu_quant_matmul(rows.values_TI, self._layout.product_view(weight.values_OI), weight.scales_O,
                                          pertoken_scale=rows.scales_T, bias=bias_O, output_dtype=rows.dtype)

    def int8_static_linear(self, x_TI: Tensor | StaticRows, weight: StaticInt8Weight) -> Tensor:
        rows = x_TI if isinstance(x_TI, StaticRows) else StaticRows(torch_npu.npu_quantize(
            x_TI, weight.input_scale_1, weight.input_offset_1, torch.qint8, -1, False), x_TI.dtype)
        return torch_npu.npu_quant_matmul(rows.values_TI, self._layout.product_view(weight.values_OI), weight.scales_O,
                                          pertoken_scale=_scales_of_rows(rows, weight), bias=weight.shifts_O,
                                          output_dtype=rows.dtype)

    def add_rms_norm_int8_static(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                                 rounding: NormRounding) -> tuple[StaticRows, Tensor]:
        # The operator divides, on A2 and A3, by scales of the weight's shape.
        values_TD, _, total_TD = torch_npu.npu_add_rms_norm_quant(
            x_TD, residual_TD, weight_D, rounding.scales_D, rounding.offsets_D, None, epsilon=eps)
        return StaticRows(values_TD, x_TD.dtype), total_TD

    def settled_int8(self, values_OI: Tensor) -> Tensor:
        return self._layout.linear_weight(values_OI)

    def settled_int8_experts(self, gate_up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
        return self._layout.expert_weights(gate_up, down)

    def settled(self, weight: GroupedWeight) -> GroupedWeight:
        """Four bits: int32 (I, O / 8), eight outputs a word, the lowest bits first. int8 in groups: (I, O); by row it
        stays (O, I), which is quicker turned, unless it is to lie in NZ, which is not.

        Scales and zeros, which the operator adds: (G, O); by row (O,). Bits are moved on the host, as the vendor's own
        packing does.
        """
        by_row = weight.scales.shape[1] == 1
        scales, zeros = (None if each is None else each[:, 0].contiguous() if by_row else each.t().contiguous()
                         for each in weight[1:])
        assert scales is not None, "a weight has scales"
        values, num_groups = weight.values, weight.scales.shape[1]
        num_outputs, width = values.shape
        num_inputs = width * 2 if values.dtype == torch.uint8 else width
        group_size = 0 if by_row else num_inputs // num_groups
        if values.dtype == torch.int8:
            stays = by_row and not self._layout.turns_rows
            values = values if stays else self._layout.weight_alone(values.t().contiguous(), group_size)
        elif self._layout.takes_words(num_inputs, num_outputs, group_size):
            values = packed_words(unpacked(values.cpu()).t().contiguous().to(values.device))
        else:
            values = packed(unpacked(values.cpu()).t().contiguous()).view(torch.int32).to(values.device)
        return GroupedWeight(values, scales, None if zeros is None else -zeros)

    def grouped_linear(self, x_TI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
        values, scales, offsets = weight
        is_turned = values.dtype == torch.int8 and scales.dim() == 1 and not self._layout.turns_rows
        group_size = 0 if scales.dim() == 1 else x_TI.shape[1] // scales.shape[0]
        return torch_npu.npu_weight_quant_batchmatmul(x_TI, values.t() if is_turned else values, scales, offsets,
                                                      bias=bias_O, antiquant_group_size=group_size)

    def add_rms_norm_int8(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor,
                          eps: float) -> tuple[Int8Rows, Tensor]:
        # The mask is spelled out: before release 26.2.0, torch_npu cannot read its own default of it.
        values_TD, _, total_TD, scales_T, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x_TD, residual_TD, weight_D, epsilon=eps, output_mask=[True, False])
        return Int8Rows(values_TD, scales_T, x_TD.dtype), total_TD

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if weight_D.dtype != x_TD.dtype:  # float32: the norm's own kernel takes such weights, the fused one not
            total_TD = x_TD + residual_TD
            return self.rms_norm(total_TD, weight_D, eps), total_TD
        normed_TD, _, total_TD = torch_npu.npu_add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return normed_TD, total_TD

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        # swiglu computes silu of the first half times the second in float32, and rounds once.
        return torch_npu.npu_swiglu(torch.cat((gate, self.rms_norm(x, weight, eps)), dim=-1))

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        num_dims = cos_TR.shape[-1]
        if num_dims == q_TNH.shape[-1]:
            return _rotate(q_TNH, k_TKH, cos_TR, sin_TR)
        heads = [x[..., :num_dims].contiguous() for x in (q_TNH, k_TKH)]
        turned = _rotate(heads[0], heads[1], cos_TR, sin_TR)
        q, k = (torch.cat((head, x[..., num_dims:]), dim=-1) for head, x in zip(turned, (q_TNH, k_TKH), strict=True))
        return q, k

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        # One kernel for q and k as heads of one tensor. The casts back also make both contiguous, as attention wants.
        cos_1T1H, sin_1T1H = cos_TH[None, :, None], sin_TH[None, :, None]
        turned_1THH = torch_npu.npu_rotary_mul(qk_T2NH.float().flatten(1, 2).unsqueeze(0), cos_1T1H, sin_1T1H)
        q_TNH, k_TNH = (half.to(qk_T2NH.dtype, memory_format=torch.contiguous_format)
                        for half in turned_1THH.squeeze(0).chunk(2, dim=1))
        return q_TNH, k_TNH

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return torch_npu.npu_swiglu(gate_up_T2I)

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        # renorm 1 is the softmax over the k largest: the same as dividing by their sum.
        weights_TK, experts_TK, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits_TE, k=top_k,
                                                                              renorm=int(renormalise))
        return weights_TK, experts_TK

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        return run_experts(x_TD, weights_TK, experts_TK, gate_up, down, held)

    def quantised_experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                          down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        return run_int8_experts(x_TD, weights_TK, experts_TK, gate_up, down, held, self._layout)

    @staticmethod
    def add_at(table_N: Tensor, places_B: Tensor, amounts_B: Tensor) -> None:
        # scatter_add_ and index_add_ of a long table run on the AI CPU or copy it; this operator writes in place.
        torch_npu.npu_scatter_nd_update_(table_N, places_B[:, None], table_N.index_select(0, places_B) + amounts_B)

    def softmax_draw(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        return draw_from_softmax

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        # F.gelu drops the approximation on its way: the kernel behind it computes the one with tanh for both.
        return torch_npu.npu_gelu(x, approximate=approximate)


def _rounded(x_TI: Tensor) -> Int8Rows:
    values_TI, scales_T = torch_npu.npu_dynamic_quant(x_TI)
    return Int8Rows(values_TI, scales_T, x_TI.dtype)


def _rotate(q_TNR: Tensor, k_TKR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    cos_1T1R, sin_1T1R = cos_TR[None, :, None], sin_TR[None, :, None]
    q_1TNR, k_1TKR = q_TNR.unsqueeze(0), k_TKR.unsqueeze(0)
    if q_TNR.shape[-1] in _FUSED_ROTARY_HEAD_DIMS:
        # It turns in place, and a trace takes what it returns for fresh and contiguous: so it must be that before.
        q_1TNR, k_1TKR = q_1TNR.contiguous(), k_1TKR.contiguous()
        # BSND with one batch, by views: every CANN from 8.3 on takes it, and TND came with releases after that.
        turned = torch_npu.npu_apply_rotary_pos_emb(q_1TNR, k_1TKR, cos_1T1R, sin_1T1R, layout="BSND")
        return turned[0].squeeze(0), turned[1].squeeze(0)
    q, k = (torch_npu.npu_rotary_mul(x, cos_1T1R, sin_1T1R).squeeze(0) for x in (q_1TNR, k_1TKR))
    return q, k


def _scales_of_rows(rows: StaticRows, weight: StaticInt8Weight) -> Tensor | None:
    """Ones, beside which a float16 product takes float32 scales. Without them it keeps 10 bits of each."""
    count = len(rows.values_TI)
    if rows.dtype != torch.float16:
        return None
    if weight.ones_R is None or count > len(weight.ones_R):
        return torch.ones(count, device=rows.values_TI.device)
    return weight.ones_R[:count]
