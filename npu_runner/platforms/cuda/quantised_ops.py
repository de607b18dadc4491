"""Operators for quantised weights as our own kernels. Know nothing of models.

T tokens, I inputs, O outputs, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.platforms.cuda import grouped_products, quantised_experts
from npu_runner.platforms.cuda import quantised_inputs as inputs
from npu_runner.platforms.cuda import quantised_products as quantised
from npu_runner.platforms.grouped import GroupedWeight
from npu_runner.platforms.ops import HeldExperts, Ops
from npu_runner.platforms.quantised import (
    FP8,
    FP8_BLOCKS,
    INT8,
    Fp8Rows,
    Fp8Weight,
    Int8Rows,
    Int8Weight,
    NormRounding,
    QuantisedExperts,
    QuantisedOps,
    QuantisedWeight,
    RoundedRows,
    StaticInt8Weight,
)

# Among what is compiled: no weight has this number of features.
_MATMUL, _GROUPED, _EXPERTS = -1, -2, -3


class TritonQuantisedOps(QuantisedOps):
    """Of int8 by row, FP8 and grouped weights. None has inputs of one scale."""

    fuses_rounding = True

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._compiled: set[tuple[object, ...]] = set()

    def prepare_weight(self, weight: Int8Weight | Fp8Weight | GroupedWeight) -> QuantisedWeight:
        return grouped_products.settled(weight) if isinstance(weight, GroupedWeight) else weight

    def linear(self, x_TI: Tensor | RoundedRows, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
        if isinstance(weight, GroupedWeight):
            assert isinstance(x_TI, Tensor), "inputs of grouped weights are not rounded"
            return self._multiply_groups(x_TI, weight, bias_O)
        assert not isinstance(weight, StaticInt8Weight), "no weight has inputs of one scale here"
        values_OI, scales = weight
        rows = x_TI
        if isinstance(rows, Tensor) and isinstance(weight, Int8Weight):
            rows = Int8Rows(*inputs.quantise_rows(rows, torch.int8), rows.dtype)
        elif isinstance(rows, Tensor):
            rows = Fp8Rows(*inputs.quantise_rows(rows, inputs.FP8, in_groups=scales.dim() == 2), rows.dtype)
        assert isinstance(rows, Int8Rows if isinstance(weight, Int8Weight) else Fp8Rows), "rows have the weight's form"
        kind = (*values_OI.shape, rows.dtype, scales.dim(), int(values_OI.dtype == torch.int8),
                int(bias_O is not None), _MATMUL)
        if kind not in self._compiled and len(rows.values_TI):
            self._compiled.add(kind)
            quantised.compile_all(values_OI, scales, bias_O, rows.dtype)
        return quantised.product(rows.values_TI, rows[1], values_OI, scales, bias_O, rows.dtype)

    def _multiply_groups(self, x_TI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
        kind = (*weight.values.shape, len(weight.scales), int(weight.zeros is not None), int(bias_O is not None),
                x_TI.dtype, _GROUPED)
        if kind not in self._compiled and len(x_TI):
            self._compiled.add(kind)
            grouped_products.compile_all(weight, bias_O, x_TI.dtype)
        return grouped_products.product(x_TI, weight, bias_O)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                     rounding: str | NormRounding) -> tuple[RoundedRows, Tensor]:
        assert isinstance(rounding, str), "no weight has inputs of one scale here"
        values_TD, scales, total_TD = inputs.add_rms_norm_quantised(
            x_TD, residual_TD, weight_D, eps, torch.int8 if rounding == INT8 else inputs.FP8,
            in_groups=rounding == FP8_BLOCKS)
        return (Int8Rows if rounding == INT8 else Fp8Rows)(values_TD, scales, x_TD.dtype), total_TD

    def silu_and_mul(self, gate_up_T2I: Tensor, form: str | None) -> Tensor | RoundedRows:
        if form not in (INT8, FP8, FP8_BLOCKS):
            return self.ops.silu_and_mul(gate_up_T2I)
        rows = inputs.silu_and_mul_quantised(gate_up_T2I, torch.int8 if form == INT8 else inputs.FP8,
                                             in_groups=form == FP8_BLOCKS)
        return (Int8Rows if form == INT8 else Fp8Rows)(*rows, gate_up_T2I.dtype)

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        kind = (*gate_up.values.shape, experts_TK.shape[1], held, gate_up.scales.dim(), _EXPERTS)
        if kind not in self._compiled:
            self._compiled.add(kind)
            quantised_experts.compile_all(x_TD, weights_TK, experts_TK, gate_up, down, held)
        return quantised_experts.run_experts(x_TD, weights_TK, experts_TK, gate_up, down, held)
