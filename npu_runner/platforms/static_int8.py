"""Products of int8 rows with inputs that share one scale and one offset, in plain torch. Knows no vendor.

T tokens, I inputs, O outputs, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_LEAST, _MOST = -128, 127


class StaticInt8Weight(NamedTuple):
    """Rows of int8 for products with inputs of one scale and one offset: round(x * input_scale + input_offset)."""

    values_OI: Tensor
    """int8, contiguous."""
    shifts_O: Tensor
    """int32, in units of the sums of integers: the bias, less what the offset adds."""
    scales_O: Tensor
    """float32, of the sums: those of the weights times the scale of inputs, as this is rounded."""
    input_scale_1: Tensor
    input_offset_1: Tensor
    """Both of x's dtype."""
    ones_R: Tensor | None = None
    """float32, for products in float16 that take their scales exactly only beside scales of rows."""


class NormRounding(NamedTuple):
    """How a norm rounds what such a product takes: round(x / scales + offsets).

    In bfloat16 both are of it. Else scales are float32, and offsets int32.
    """

    scales_D: Tensor
    offsets_D: Tensor


class StaticRows(NamedTuple):
    """Inputs of such a product, rounded already."""

    values_TI: Tensor
    """int8."""
    dtype: torch.dtype
    """What they were, and what products with them are."""


def static_rows(x_TI: Tensor, weight: StaticInt8Weight) -> StaticRows:
    """round(x * input_scale + input_offset), computed in float32."""
    return _rows(x_TI.float() * weight.input_scale_1.float() + weight.input_offset_1.float(), x_TI.dtype)


def divided_rows(x_TD: Tensor, rounding: NormRounding) -> StaticRows:
    """round(x / scales + offsets), computed in float32."""
    return _rows(x_TD.float() / rounding.scales_D.float() + rounding.offsets_D.float(), x_TD.dtype)


def static_product(rows: StaticRows, weight: StaticInt8Weight) -> Tensor:
    """(q values^T + shifts) * scales, (T, O), where q are the rows; the sum is exact, the rest float32."""
    sums_TO = torch._int_mm(rows.values_TI, weight.values_OI.t()) + weight.shifts_O
    return (sums_TO.float() * weight.scales_O).to(rows.dtype)


def _rows(wide_TI: Tensor, dtype: torch.dtype) -> StaticRows:
    return StaticRows(wide_TI.round().clamp(_LEAST, _MOST).to(torch.int8), dtype)
