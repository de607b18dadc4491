"""Products of some rows with a weight of few outputs, such as a router's: what bounds them is a launch and the wait
for the first weights. Knows nothing of models.

M rows, I input features, O output features.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.attention.tiles import Gpu
from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings

_DTYPES = (torch.bfloat16, torch.float16)
# A program has so many outputs of so many rows, and holds all that it multiplies.
_OUTPUTS, _ROWS, _INPUTS = 16, 16, (1024, 2048)
_MOST_OUTPUTS, _MOST_ROWS = 512, 64
_SHARED_BYTES = 160 << 10
_WARPS = 8


def has_product(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `product` computes it, and is quicker than cuBLAS."""
    num_outputs, num_inputs = weight_OI.shape
    return (weight_OI.dtype in _DTYPES and x_MI.dtype == weight_OI.dtype and x_MI.dim() == 2 and x_MI.stride(1) == 1
            and weight_OI.is_contiguous() and num_outputs % _OUTPUTS == 0 and _OUTPUTS <= num_outputs <= _MOST_OUTPUTS
            and num_inputs in _INPUTS and 0 < len(x_MI) <= _MOST_ROWS and _has_room())


@functools.cache
def _has_room() -> bool:
    return Gpu.current().shared_bytes >= _SHARED_BYTES


def product(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of what `has_product` took, (M, O) of x's dtype; sums in float32, rounded once."""
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    _few_outputs[(num_outputs // _OUTPUTS, triton.cdiv(num_rows, _ROWS))](
        x_MI, weight_OI, out_MO, num_rows, num_outputs, x_MI.stride(0), WIDTH=num_inputs, OUTPUTS=_OUTPUTS, ROWS=_ROWS,
        PARTS=_WARPS, num_warps=_WARPS, **launch_settings())
    return out_MO


@triton.jit(do_not_specialize=["num_rows"])
def _few_outputs(x, weight, out, num_rows, num_outputs, stride_x, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
                 ROWS: tl.constexpr, PARTS: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The weight's tile is the left factor, and is read before the kernel waits. Inputs are cut into parts, one for
    each warp: one long chain of sums would take most of the time."""
    DEPTH: tl.constexpr = WIDTH // PARTS
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    parts, depths = tl.arange(0, PARTS), tl.arange(0, DEPTH)
    inputs = parts[:, None, None] * DEPTH + depths[None, None, :]
    weights = tl.load(weight + outputs[None, :, None] * WIDTH + inputs)
    after_earlier_kernels(IS_DEPENDENT)
    inputs = parts[:, None, None] * DEPTH + depths[None, :, None]
    values = tl.load(x + rows.to(tl.int64)[None, None, :] * stride_x + inputs, mask=(rows < num_rows)[None, None, :],
                     other=0.0)
    sums = tl.sum(tl.dot(weights, values), 0)
    tl.store(out + rows[None, :] * num_outputs + outputs[:, None], sums.to(out.dtype.element_ty),
             mask=(rows < num_rows)[None, :])
