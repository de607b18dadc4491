"""Weights of 4 or 8 bit integers with a scale for each row, or for each group of a row's inputs, and matmuls with
inputs that are not rounded: w = (values - zeros) * scales. In plain torch; knows no vendor.

O output features, I input features, G groups of I / G inputs, T tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED = "grouped"
"""The form of weights that `GroupedWeight` holds."""


class GroupedWeight(NamedTuple):
    """The weight as the loader fills it. `QuantisedOps.prepare_weight` may change the layout, for the same platform's
    `linear`."""

    values: Tensor
    """int8 (O, I); or of 4 bits `packed`, uint8 (O, I / 2)."""
    scales: Tensor
    """(O, G), of the model's dtype."""
    zeros: Tensor | None
    """(O, G), whole numbers of the model's dtype; None: all are 0."""


def packed(values_OI: Tensor) -> Tensor:
    """uint8 (O, I / 2) of int8 from -8 to 7: two's complement in 4 bits, inputs 0, 2, 4, ... in the low bits."""
    low, high = values_OI.view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return (low & 15) | (high << 4)


def unpacked(values: Tensor) -> Tensor:
    """int8 (O, I) of `GroupedWeight.values`."""
    if values.dtype == torch.int8:
        return values
    numbers = torch.stack((values & 15, values >> 4), dim=2).flatten(1).view(torch.int8)
    return (numbers ^ 8) - 8


def dequantised(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """(values - zeros) * scales in float32, rounded once, (O, I)."""
    num_groups = weight.scales.shape[1]
    wide_OGI = unpacked(weight.values).float().unflatten(1, (num_groups, -1))
    if weight.zeros is not None:
        wide_OGI -= weight.zeros.float()[..., None]
    return wide_OGI.mul_(weight.scales.float()[..., None]).flatten(1).to(dtype)


def matmul(x_TI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
    """The definition of `QuantisedOps.linear` with a GroupedWeight."""
    return F.linear(x_TI, dequantised(weight, x_TI.dtype), None if bias_O is None else bias_O.to(x_TI.dtype))
