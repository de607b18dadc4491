"""Rows of heads and their gates, as Triton kernels. Knows nothing of models.

T tokens, N heads, H or D their width. The heads of a token need not lie behind those of the one before.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings

# That one program has.
_VALUES = 1024
_CHANGES = ["num_rows"]


def rms_norm(x_TND: Tensor, gate_TND: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`Ops.gated_rms_norm`."""
    num_tokens, num_heads, width = x_TND.shape
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    stride_x, stride_gate = (part.stride(0) if num_tokens > 1 else 0 for part in (x_TND, gate_TND))
    block = triton.next_power_of_2(width)
    rows = max(1, _VALUES // block)
    _gated_rms_norm[(triton.cdiv(num_tokens * num_heads, rows),)](
        x_TND, gate_TND, weight, out_TND, stride_x, x_TND.stride(1), stride_gate, gate_TND.stride(1), num_heads, width,
        num_tokens * num_heads, eps, ROWS=rows, BLOCK=block, num_warps=4 if width <= 2048 else 8,
        **launch_settings(),
    )
    return out_TND


def times_sigmoid(x_TNH: Tensor, gate_TNH: Tensor) -> Tensor:
    """`Ops.times_sigmoid`; the values of a head lie together."""
    num_tokens, num_heads, width = x_TNH.shape
    out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    stride_x, stride_gate = (part.stride(0) if num_tokens > 1 else 0 for part in (x_TNH, gate_TNH))
    block = triton.next_power_of_2(width)
    rows = max(1, _VALUES // block)
    _times_sigmoid[(triton.cdiv(num_tokens * num_heads, rows),)](
        x_TNH, gate_TNH, out_TNH, stride_x, x_TNH.stride(1), stride_gate, gate_TNH.stride(1), num_heads, width,
        num_tokens * num_heads, ROWS=rows, BLOCK=block, num_warps=4, **launch_settings(),
    )
    return out_TNH


@triton.jit(do_not_specialize=_CHANGES)
def _gated_rms_norm(x, gate, weight, out, stride_xt, stride_xn, stride_gt, stride_gn, num_heads, width, num_rows, eps,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """A row is a token's head; a program has ROWS of them."""
    after_earlier_kernels(IS_DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, heads = rows // num_heads, rows % num_heads
    place = x + (tokens * stride_xt + heads * stride_xn)[:, None] + columns[None, :]
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    place = gate + (tokens * stride_gt + heads * stride_gn)[:, None] + columns[None, :]
    z = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < width, other=0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    scaled = (normed.to(scale.dtype) * scale[None, :]).to(tl.float32)
    result = scaled * (z / (1.0 + tl.exp(-z)))
    tl.store(out + rows[:, None] * width + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_CHANGES)
def _times_sigmoid(x, gate, out, stride_xt, stride_xn, stride_gt, stride_gn, num_heads, width, num_rows,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The sigmoid is rounded before the product, as in plain torch."""
    after_earlier_kernels(IS_DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, heads = rows // num_heads, rows % num_heads
    values = tl.load(x + (tokens * stride_xt + heads * stride_xn)[:, None] + columns[None, :], mask=mask, other=0.0)
    z = tl.load(gate + (tokens * stride_gt + heads * stride_gn)[:, None] + columns[None, :], mask=mask, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-z.to(tl.float32)))).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * width + columns[None, :], values * share, mask=mask)
