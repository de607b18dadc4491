"""Operators for quantised weights as our own kernels. Know nothing of models.

T tokens, I inputs, O outputs, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compile_ahead import CompileOnce
from npu_runner.platforms.cuda.matmul import quantised_inputs as inputs
from npu_runner.platforms.cuda.matmul.grouped import lay_out
from npu_runner.platforms.cuda.matmul.kernels import multiply
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.moe import experts
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


class TritonQuantisedOps(QuantisedOps):
    """Supports int8 by row, FP8 and grouped weights. No weight has inputs of one scale."""

    fuses_rounding = True

    def __init__(self, ops: Ops) -> None:
        super().__init__(ops)
        self._compile_once = CompileOnce()

    def prepare_weight(self, weight: Int8Weight | Fp8Weight | GroupedWeight) -> QuantisedWeight:
        return lay_out(weight) if isinstance(weight, GroupedWeight) else weight

    def linear(self, x_TI: Tensor | RoundedRows, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
        if isinstance(weight, GroupedWeight):
            assert isinstance(x_TI, Tensor), "inputs of grouped weights are not rounded"
            return multiply(Matmul(x_TI, weight, bias_O, x_TI.dtype), self._compile_once)
        assert not isinstance(weight, StaticInt8Weight), "no weight has inputs of one scale here"
        is_int8, rows = isinstance(weight, Int8Weight), x_TI
        if isinstance(rows, Tensor):
            rows = _rounded(rows, inputs.quantise_rows(rows, torch.int8 if is_int8 else inputs.FP8,
                                                       in_groups=weight[1].dim() == 2))
        assert isinstance(rows, Int8Rows if is_int8 else Fp8Rows), "rows have the weight's form"
        return multiply(Matmul.from_rounded(rows, weight, bias_O), self._compile_once)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                     rounding: str | NormRounding) -> tuple[RoundedRows, Tensor]:
        assert isinstance(rounding, str), "no weight has inputs of one scale here"
        *rows, total_TD = inputs.add_rms_norm_quantised(
            x_TD, residual_TD, weight_D, eps, torch.int8 if rounding == INT8 else inputs.FP8,
            in_groups=rounding == FP8_BLOCKS)
        return _rounded(x_TD, rows), total_TD

    def silu_and_mul(self, gate_up_T2I: Tensor, form: str | None) -> Tensor | RoundedRows:
        if form not in (INT8, FP8, FP8_BLOCKS):
            return self.ops.silu_and_mul(gate_up_T2I)
        return _rounded(gate_up_T2I, inputs.silu_and_mul_quantised(
            gate_up_T2I, torch.int8 if form == INT8 else inputs.FP8, in_groups=form == FP8_BLOCKS))

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        given = (x_TD, weights_TK, experts_TK, gate_up, down, held)
        self._compile_once(("quantised experts", gate_up.values.shape, gate_up.scales.shape, experts_TK.shape[1], held),
                           lambda: experts.compile_all(*given))
        return experts.run_experts(*given)


def _rounded(x: Tensor, parts: Sequence[Tensor]) -> Int8Rows | Fp8Rows:
    values, scales = parts
    return (Int8Rows if values.dtype == torch.int8 else Fp8Rows)(values, scales, x.dtype)
