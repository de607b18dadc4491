"""Products whose inputs are rounded to int8, in float64: what QUANT's formulas say, and nobody's code."""

from __future__ import annotations

import torch
from torch import Tensor


def rounded_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """float64: whole numbers (T, K) and scales (T, 1); s = max|x| / 127, q = round(x / s)."""
    scale_T1 = x_TK.double().abs().amax(-1, keepdim=True) / 127
    return torch.where(scale_T1 == 0, 0.0, x_TK.double() / scale_T1).round(), scale_T1


def rounded_product(x_TK: Tensor, values_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None) -> Tensor:
    """(q W^T) * s * scales + bias, float64 (T, N)."""
    q_TK, scale_T1 = rounded_rows(x_TK)
    out_TN = (q_TK @ values_NK.double().T) * scale_T1 * scales_N.double()
    return out_TN if bias_N is None else out_TN + bias_N.double()


def static_product(x_TK: Tensor, values_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None, scale: float,
                   offset: float) -> Tensor:
    """(q - offset) W^T * scale * scales + bias with q = clamp(round(x / scale + offset), -128, 127), float64 (T, N)."""
    q_TK = (x_TK.double() / scale + offset).round().clamp(-128, 127) - offset
    out_TN = (q_TK @ values_NK.double().T) * scale * scales_N.double()
    return out_TN if bias_N is None else out_TN + bias_N.double()
