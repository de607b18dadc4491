"""Products whose inputs are rounded to FP8 (e4m3), in float64: what the format and the formulas say.

Source of the format: arXiv 2209.05433, section 3. T tokens, K inputs, N outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST, LEAST_EXPONENT, MANTISSA_BITS = 448.0, -6, 3


def nearest_fp8(x: Tensor) -> Tensor:
    """float64: the nearest number of e4m3, ties to the even one."""
    exponent = x.abs().clamp_min(2.0**-40).log2().floor().clamp_min(LEAST_EXPONENT)
    step = torch.exp2(exponent - MANTISSA_BITS)
    return ((x / step).round() * step).clamp(-LARGEST, LARGEST)


def rounded_fp8(x_TK: Tensor, group: int) -> Tensor:
    """float64 (T, K): q s with s = max|x| / 448 of every `group` columns of a row, q = nearest(x / s)."""
    x_TGC = x_TK.double().unflatten(-1, (-1, group))
    scale_TG1 = x_TGC.abs().amax(-1, keepdim=True) / LARGEST
    return (nearest_fp8(x_TGC / torch.where(scale_TG1 == 0, 1.0, scale_TG1)) * scale_TG1).flatten(-2)


def multiplied_out(values_NK: Tensor, scales: Tensor) -> Tensor:
    """float64 (N, K) of values and their scales, (N,) or of blocks of 128 x 128."""
    if scales.dim() == 1:
        return values_NK.double() * scales.double()[:, None]
    return values_NK.double() * scales.double().repeat_interleave(128, 0).repeat_interleave(128, 1)


def fp8_product(x_TK: Tensor, values_NK: Tensor, scales: Tensor, bias_N: Tensor | None) -> Tensor:
    """float64 (T, N)."""
    rounded_TK = rounded_fp8(x_TK, 128 if scales.dim() == 2 else x_TK.shape[-1])
    out_TN = rounded_TK @ multiplied_out(values_NK, scales).T
    return out_TN if bias_N is None else out_TN + bias_N.double()
