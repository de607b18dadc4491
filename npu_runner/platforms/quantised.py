"""Quantised weights, the inputs that are rounded for them, and the operators that only they need (`QuantisedOps`), in
plain torch. Vendors replace the operators. Knows no vendor.

T tokens, I inputs, O outputs, D hidden size, E experts.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from npu_runner.platforms.grouped import GroupedWeight
from npu_runner.platforms.grouped import matmul as grouped_matmul
from npu_runner.platforms.ops import HeldExperts, Ops, loop_over_experts

INT8, INT8_STATIC = "int8", "int8_static"
"""The forms of weights that `Int8Weight` and `StaticInt8Weight` hold."""
INT8_MAX = 127.0
_LEAST, _MOST = -128, 127


class Int8Weight(NamedTuple):
    """Rows of int8 and a scale for each: values * scales. Matmuls take inputs that are rounded alike."""

    values_OI: Tensor
    """int8, contiguous."""
    scales_O: Tensor
    """float32."""


FP8, FP8_BLOCKS = "fp8", "fp8_blocks"
"""The forms of weights that `Fp8Weight` holds: with a scale for each row, or for each block of 128 x 128."""
FP8_BLOCK = 128
FP8_MAX = 448.0
FP8_ALIGNMENT = 16
"""The number of inputs and of outputs of an FP8 matmul is a multiple of it."""


class Fp8Weight(NamedTuple):
    """values * scales. Matmuls take inputs that are rounded to FP8, a scale for each row, or for each 128 of one."""

    values_OI: Tensor
    """float8_e4m3fn, contiguous."""
    scales: Tensor
    """float32, (O,), or (O / 128, I / 128)."""


INT8_EXPERTS, FP8_EXPERTS = "int8_experts", "fp8_block_experts"
"""The forms of experts that `QuantisedExperts` holds: int8 by row, and FP8 with a scale for each block of 128 x 128."""


class QuantisedExperts(NamedTuple):
    """Each expert has what `Int8Weight` or `Fp8Weight` holds: values * scales."""

    values: Tensor
    """int8 or float8_e4m3fn, contiguous: (E, O, I), or (E, I, O) with `Ops.experts_in_out`."""
    scales: Tensor
    """float32: (E, O) of int8, (E, O / 128, I / 128) of FP8."""


class Int8Rows(NamedTuple):
    """Inputs of such matmuls, rounded already: values * scales, one scale for each token."""

    values_TI: Tensor
    """int8."""
    scales_T: Tensor
    """float32."""
    dtype: torch.dtype
    """The dtype of the inputs before rounding, and of the outputs of matmuls."""


class Fp8Rows(NamedTuple):
    """Inputs of matmuls with `Fp8Weight`, rounded already: values * scales."""

    values_TI: Tensor
    """float8_e4m3fn."""
    scales: Tensor
    """float32, (T,), or (T, I / 128)."""
    dtype: torch.dtype
    """See `Int8Rows.dtype`."""


class StaticInt8Weight(NamedTuple):
    """Rows of int8 for matmuls with inputs of one scale and one offset: round(x * input_scale + input_offset)."""

    values_OI: Tensor
    """int8, contiguous."""
    shifts_O: Tensor
    """int32, scaled as the sums of integers: the bias, less the offset's share."""
    scales_O: Tensor
    """float32, of the sums: those of the weights times the scale of inputs, as this is rounded."""
    input_scale_1: Tensor
    input_offset_1: Tensor
    """Both of x's dtype."""
    ones_R: Tensor | None = None
    """float32, for matmuls in float16 that take their scales exactly only beside scales of rows."""


class NormRounding(NamedTuple):
    """A norm rounds the inputs of such a matmul as round(x / scales + offsets).

    In bfloat16 both are of it. Else scales are float32, and offsets int32.
    """

    scales_D: Tensor
    offsets_D: Tensor


class StaticRows(NamedTuple):
    """Inputs of such a matmul, rounded already."""

    values_TI: Tensor
    """int8."""
    dtype: torch.dtype
    """See `Int8Rows.dtype`."""


RoundedRows: TypeAlias = Int8Rows | Fp8Rows | StaticRows
QuantisedWeight: TypeAlias = Int8Weight | StaticInt8Weight | Fp8Weight | GroupedWeight


class QuantisedOps:
    """Operators for quantised weights, by their definition. `ops` are the platform's other operators.

    A weight comes in the forms that the platform's `weight_forms` name, and no other.
    """

    max_int8_features: int | None = None
    """The most inputs or outputs of an int8 matrix; None: any number."""
    fuses_rounding: bool = False
    """`add_rms_norm` costs no more than that of `Ops`. Else matmuls round their inputs themselves."""

    def __init__(self, ops: Ops):
        self.ops = ops

    def prepare_weight(self, weight: Int8Weight | Fp8Weight | GroupedWeight) -> QuantisedWeight:
        """The weight in the layout that `linear` reads, made once after loading. A StaticInt8Weight has the values of
        an Int8Weight. The number of bytes stays; shapes may change."""
        return weight

    def prepare_experts(self, gate_up: QuantisedExperts, down: QuantisedExperts,
                        dtype: torch.dtype) -> tuple[QuantisedExperts, QuantisedExperts]:
        """The same for `experts`, for a model of `dtype`."""
        return gate_up, down

    def linear(self, x_TI: Tensor | RoundedRows, weight: QuantisedWeight, bias_O: Tensor | None) -> Tensor:
        """x W^T + b, (T, O) of x's dtype. `weight` is prepared.

        Int8Weight: s * scales * (round(x / s) values^T) + b, with s = max|x| / 127 of each row. The sum of integers is
        exact, the rest float32, rounded once; b is float32.
        StaticInt8Weight: (q values^T + shifts) * scales without b, with q = round(x * input_scale + input_offset) in
        float32, clamped to -128 to 127. It is exact as above.
        Fp8Weight: (q s) (values scales)^T + b, where q s is x as `fp8_rows` rounds it. Sums are float32; b has x's
        dtype.
        GroupedWeight: x w^T + b with w = (values - zeros) * scales; b is float32 beside bfloat16, else of x's dtype.
        """
        if isinstance(weight, GroupedWeight):
            assert isinstance(x_TI, Tensor), "inputs of grouped weights are not rounded"
            return grouped_matmul(x_TI, weight, bias_O)
        if isinstance(weight, StaticInt8Weight):
            static = static_rows(x_TI, weight) if isinstance(x_TI, Tensor) else x_TI
            assert isinstance(static, StaticRows), "rows have no scales of their own here"
            return static_matmul(static, weight)
        if isinstance(weight, Int8Weight):
            rows = int8_rows(x_TI) if isinstance(x_TI, Tensor) else x_TI
            assert isinstance(rows, Int8Rows), "int8 weights take rows of int8"
            out_TO = torch._int_mm(rows.values_TI, weight.values_OI.t()).float() * rows.scales_T[:, None] * weight[1]
            return (out_TO if bias_O is None else out_TO + bias_O).to(rows.dtype)
        of_fp8 = fp8_rows(x_TI, in_blocks=weight.scales.dim() == 2) if isinstance(x_TI, Tensor) else x_TI
        assert isinstance(of_fp8, Fp8Rows), "FP8 weights take rows of FP8"
        out_TO = scaled(of_fp8.values_TI, of_fp8.scales, 1) @ scaled(*weight, FP8_BLOCK).t()
        return (out_TO if bias_O is None else out_TO + bias_O).to(of_fp8.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                     rounding: str | NormRounding) -> tuple[RoundedRows, Tensor]:
        """`Ops.add_rms_norm`, rounded for weights of the form `rounding`, or for one StaticInt8Weight. `weight_D` is of
        x's dtype."""
        normed_TD, total_TD = self.ops.add_rms_norm(x_TD, residual_TD, weight_D, eps)
        if isinstance(rounding, NormRounding):
            return divided_rows(normed_TD, rounding), total_TD
        is_int8, in_blocks = rounding == INT8, rounding == FP8_BLOCKS
        return int8_rows(normed_TD) if is_int8 else fp8_rows(normed_TD, in_blocks=in_blocks), total_TD

    def silu_and_mul(self, gate_up_T2I: Tensor, form: str | None) -> Tensor | RoundedRows:
        """`Ops.silu_and_mul` for a weight of this form; already rounded where this is faster. None: the model's dtype.
        """
        return self.ops.silu_and_mul(gate_up_T2I)

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: QuantisedExperts,
                down: QuantisedExperts, held: HeldExperts | None = None) -> Tensor:
        """`Ops.experts` with the matmuls of `linear`; the weights are prepared."""
        first = 0 if held is None else held.first
        return loop_over_experts(x_TD, weights_TK, experts_TK, range(first, first + len(gate_up.values)),
                                 lambda rows, expert: self._multiply_expert(rows, gate_up, expert),
                                 lambda rows, expert: self._multiply_expert(rows, down, expert))

    def _multiply_expert(self, rows: Tensor, weight: QuantisedExperts, expert: int) -> Tensor:
        values, scales = weight.values[expert], weight.scales[expert]
        return self.linear(rows, (Int8Weight if values.dtype == torch.int8 else Fp8Weight)(values, scales), None)


def fp8_rows(x_TI: Tensor, *, in_blocks: bool) -> Fp8Rows:
    """Rows rounded to the nearest, the largest at 448, of each row or of each 128 of one. Zeros have scale 0."""
    wide_TGI = x_TI.float().unflatten(-1, (-1, FP8_BLOCK if in_blocks else x_TI.shape[-1]))
    scales_TG = wide_TGI.abs().amax(-1) / FP8_MAX
    divisors_TG1 = scales_TG.masked_fill(scales_TG == 0, 1.0)[..., None]
    values_TI = (wide_TGI / divisors_TG1).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(torch.float8_e4m3fn)
    return Fp8Rows(values_TI, scales_TG if in_blocks else scales_TG[:, 0], x_TI.dtype)


def scaled(values: Tensor, scales: Tensor, num_rows: int) -> Tensor:
    """values * scales in float32; scales of rows, or of `num_rows` rows and 128 columns."""
    if scales.dim() == 1:
        return values.float() * scales[:, None]
    return values.float() * scales.repeat_interleave(num_rows, 0).repeat_interleave(FP8_BLOCK, 1)


def int8_rows(x_TI: Tensor) -> Int8Rows:
    """Rows rounded to the nearest, symmetric, the largest at 127. A row of zeros has scale 0."""
    wide_TI = x_TI.float()
    scales_T = wide_TI.abs().amax(-1) / INT8_MAX
    divisors_T1 = scales_T.masked_fill(scales_T == 0, 1.0)[:, None]
    return Int8Rows((wide_TI / divisors_T1).round().to(torch.int8), scales_T, x_TI.dtype)


def static_rows(x_TI: Tensor, weight: StaticInt8Weight) -> StaticRows:
    """round(x * input_scale + input_offset), computed in float32."""
    return _rows(x_TI.float() * weight.input_scale_1.float() + weight.input_offset_1.float(), x_TI.dtype)


def divided_rows(x_TD: Tensor, rounding: NormRounding) -> StaticRows:
    """round(x / scales + offsets), computed in float32."""
    return _rows(x_TD.float() / rounding.scales_D.float() + rounding.offsets_D.float(), x_TD.dtype)


def static_matmul(rows: StaticRows, weight: StaticInt8Weight) -> Tensor:
    """(q values^T + shifts) * scales, (T, O), where q are the rows; the sum is exact, the rest float32."""
    sums_TO = torch._int_mm(rows.values_TI, weight.values_OI.t()) + weight.shifts_O
    return (sums_TO.float() * weight.scales_O).to(rows.dtype)


def _rows(wide_TI: Tensor, dtype: torch.dtype) -> StaticRows:
    return StaticRows(wide_TI.round().clamp(_LEAST, _MOST).to(torch.int8), dtype)
