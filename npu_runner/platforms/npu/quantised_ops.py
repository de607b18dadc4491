"""Operators for quantised weights through torch_npu's fused kernels. Knows no models.

T tokens, I inputs, O outputs, G groups of inputs, D hidden size, E experts, K of them a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch_npu
from torch import Tensor

from npu_runner.platforms.grouped import GroupedWeight, packed, unpacked
from npu_runner.platforms.npu.experts import run_int8_experts
from npu_runner.platforms.npu.kernels import FIRST_CHOICES, KERNELS
from npu_runner.platforms.npu.settings import npu_settings
from npu_runner.platforms.npu.weight_layout import WeightLayout, packed_words
from npu_runner.platforms.ops import HeldExperts, Ops
from npu_runner.platforms.quantised import (
    Fp8Weight,
    Int8Rows,
    Int8Weight,
    NormRounding,
    QuantisedExperts,
    QuantisedOps,
    QuantisedWeight,
    RoundedRows,
    StaticInt8Weight,
    StaticRows,
)


class NpuQuantisedOps(QuantisedOps):
    """Supports int8 and grouped weights; the devices compute no FP8."""

    fuses_rounding = True
    max_int8_features = 65535

    def __init__(self, ops: Ops, kernels: Mapping[str, str] = FIRST_CHOICES) -> None:
        super().__init__(ops)
        self._kernels = kernels
        self._layout = WeightLayout(npu_settings().nz_weights if kernels["layout"] == "NZ" else "none",
                                    kernels["experts"] == FIRST_CHOICES["experts"])

    def prepare_weight(self, weight: Int8Weight | Fp8Weight | GroupedWeight) -> QuantisedWeight:
        if isinstance(weight, GroupedWeight):
            return self._prepare_groups(weight)
        assert isinstance(weight, Int8Weight), "no weight of FP8 is multiplied here"
        return Int8Weight(self._layout.linear_weight(weight.values_OI), weight.scales_O)

    def prepare_experts(self, gate_up: QuantisedExperts, down: QuantisedExperts,
                        dtype: torch.dtype) -> tuple[QuantisedExperts, QuantisedExperts]:
        gate_up_values, down_values = self._layout.expert_weights(gate_up.values, down.values)
        # A matmul whose result is bfloat16 takes no float32 scales of outputs.
        down_scales = down.scales.to(dtype) if dtype == torch.bfloat16 else down.scales
        return QuantisedExperts(gate_up_values, gate_up.scales), QuantisedExperts(down_values, down_scales)

    def linear(self, x_TI: Tensor | RoundedRows, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
        if isinstance(weight, GroupedWeight):
            assert isinstance(x_TI, Tensor), "inputs of grouped weights are not rounded"
            return self._multiply_groups(x_TI, weight, bias_O)
        if isinstance(weight, StaticInt8Weight):
            static = (_static_rows(x_TI, weight.input_scale_1, weight.input_offset_1) if isinstance(x_TI, Tensor)
                      else x_TI)
            assert isinstance(static, StaticRows), "rows have no scales of their own here"
            return torch_npu.npu_quant_matmul(
                static.values_TI, self._layout.matmul_view(weight.values_OI), weight.scales_O,
                pertoken_scale=_scales_of_rows(static, weight), bias=weight.shifts_O, output_dtype=static.dtype)
        assert isinstance(weight, Int8Weight), "no weight of FP8 is multiplied here"
        rows = _int8_rows(x_TI) if isinstance(x_TI, Tensor) else x_TI
        assert isinstance(rows, Int8Rows), "int8 weights take rows of int8"
        return torch_npu.npu_quant_matmul(rows.values_TI, self._layout.matmul_view(weight.values_OI), weight.scales_O,
                                          pertoken_scale=rows.scales_T, bias=bias_O, output_dtype=rows.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                     rounding: str | NormRounding) -> tuple[RoundedRows, Tensor]:
        if self._kernels["norm"] != FIRST_CHOICES["norm"]:
            normed_TD, total_TD = self.ops.add_rms_norm(x_TD, residual_TD, weight_D, eps)
            if isinstance(rounding, NormRounding):
                return _static_rows(normed_TD, rounding.scales_D.reciprocal(), rounding.offsets_D), total_TD
            return _int8_rows(normed_TD), total_TD
        if isinstance(rounding, NormRounding):
            # The operator divides, on A2 and A3, by scales of the weight's shape.
            values_TD, _, total_TD = torch_npu.npu_add_rms_norm_quant(
                x_TD, residual_TD, weight_D, rounding.scales_D, rounding.offsets_D, None, epsilon=eps)
            return StaticRows(values_TD, x_TD.dtype), total_TD
        # The mask is spelled out: before release 26.2.0, torch_npu cannot read its own default of it.
        values_TD, _, total_TD, scales_T, _ = torch_npu.npu_add_rms_norm_dynamic_quant(
            x_TD, residual_TD, weight_D, epsilon=eps, output_mask=[True, False])
        return Int8Rows(values_TD, scales_T, x_TD.dtype), total_TD

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        return run_int8_experts(x_TD, weights_TK, experts_TK, gate_up, down, held, self._layout,
                                dequantises=self._kernels["experts"] != KERNELS["experts"][-1])

    def _prepare_groups(self, weight: GroupedWeight) -> GroupedWeight:
        """Four bits: int32 (I, O / 8), eight outputs a word, the lowest bits first. int8 in groups: (I, O); by row it
        stays (O, I), which is faster transposed, unless it is to be in NZ, which is not.

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
        elif self._layout.accepts_words(num_inputs, num_outputs, group_size):
            values = packed_words(unpacked(values.cpu()).t().contiguous().to(values.device))
        else:
            values = packed(unpacked(values.cpu()).t().contiguous()).view(torch.int32).to(values.device)
        return GroupedWeight(values, scales, None if zeros is None else -zeros)

    def _multiply_groups(self, x_TI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
        values, scales, offsets = weight
        is_turned = values.dtype == torch.int8 and scales.dim() == 1 and not self._layout.turns_rows
        group_size = 0 if scales.dim() == 1 else x_TI.shape[1] // scales.shape[0]
        return torch_npu.npu_weight_quant_batchmatmul(x_TI, values.t() if is_turned else values, scales, offsets,
                                                      bias=bias_O, antiquant_group_size=group_size)


def _int8_rows(x_TI: Tensor) -> Int8Rows:
    values_TI, scales_T = torch_npu.npu_dynamic_quant(x_TI)
    return Int8Rows(values_TI, scales_T, x_TI.dtype)


def _static_rows(x_TI: Tensor, scales: Tensor, offsets: Tensor) -> StaticRows:
    return StaticRows(torch_npu.npu_quantize(x_TI, scales, offsets, torch.qint8, -1, False), x_TI.dtype)


def _scales_of_rows(rows: StaticRows, weight: StaticInt8Weight) -> Tensor | None:
    """Ones, beside which a float16 matmul takes float32 scales. Without them it keeps 10 bits of each."""
    count = len(rows.values_TI)
    if rows.dtype != torch.float16:
        return None
    if weight.ones_R is None or count > len(weight.ones_R):
        return torch.ones(count, device=rows.values_TI.device)
    return weight.ones_R[:count]
