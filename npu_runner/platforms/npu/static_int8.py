"""Products of int8 whose inputs share one scale, and norms that round such inputs, through torch_npu's operators.

T tokens, I inputs, O outputs, D hidden size.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_runner.platforms.npu.weight_layout import WeightLayout
from npu_runner.platforms.static_int8 import NormRounding, StaticInt8Weight, StaticRows


def static_linear(x_TI: Tensor | StaticRows, weight: StaticInt8Weight, layout: WeightLayout) -> Tensor:
    """`Ops.int8_static_linear`."""
    rows = x_TI if isinstance(x_TI, StaticRows) else StaticRows(torch_npu.npu_quantize(
        x_TI, weight.input_scale_1, weight.input_offset_1, torch.qint8, -1, False), x_TI.dtype)
    return torch_npu.npu_quant_matmul(rows.values_TI, layout.product_view(weight.values_OI), weight.scales_O,
                                      pertoken_scale=_scales_of_rows(rows, weight), bias=weight.shifts_O,
                                      output_dtype=rows.dtype)


def add_rms_norm_rounded(x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float,
                         rounding: NormRounding) -> tuple[StaticRows, Tensor]:
    """`Ops.add_rms_norm_int8_static`. The operator divides, on A2 and A3, by scales of the weight's shape."""
    values_TD, _, total_TD = torch_npu.npu_add_rms_norm_quant(
        x_TD, residual_TD, weight_D, rounding.scales_D, rounding.offsets_D, None, epsilon=eps)
    return StaticRows(values_TD, x_TD.dtype), total_TD


def _scales_of_rows(rows: StaticRows, weight: StaticInt8Weight) -> Tensor | None:
    """Ones, beside which a float16 product takes float32 scales. Without them it keeps 10 bits of each."""
    count = len(rows.values_TI)
    if rows.dtype != torch.float16:
        return None
    if weight.ones_R is None or count > len(weight.ones_R):
        return torch.ones(count, device=rows.values_TI.device)
    return weight.ones_R[:count]
