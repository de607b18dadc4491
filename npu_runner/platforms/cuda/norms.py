"""Layer norm of rows, with the sum that it is taken of, in one kernel. Knows nothing of models.

T rows, D row width. A program handles one row, in registers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# What differs from call to call: no variants for some values of it.
_CHANGES = ["stride_x", "stride_r"]


def layer_norm(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor,
               eps: float) -> tuple[Tensor, Tensor]:
    """See Ops.add_layer_norm; without a residual the sum is x itself. Rows of both are contiguous."""
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    total_TD = x_TD if residual_TD is None else torch.empty_like(out_TD)
    num_rows, width = x_TD.shape
    if num_rows:
        other_TD = x_TD if residual_TD is None else residual_TD
        _layer_norm[(num_rows,)](
            x_TD, other_TD, weight_D, bias_D, out_TD, total_TD, x_TD.stride(0), other_TD.stride(0), eps,
            ADDS=residual_TD is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )
    return out_TD, total_TD


@triton.jit(do_not_specialize=_CHANGES)
def _layer_norm(x, residual, weight, bias, out, total, stride_x, stride_r, eps, ADDS: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
        summed = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, summed, mask=mask)
        values = summed.to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (normed * scale + shift).to(out.dtype.element_ty), mask=mask)
