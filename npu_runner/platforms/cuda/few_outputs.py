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

from npu_runner.platforms.cuda.attention_tiles import Gpu
from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, fetch, launch_settings

_DTYPES = (torch.bfloat16, torch.float16)
# A program has so many outputs of so many rows, and takes so many inputs at a time.
_OUTPUTS, _ROWS, _INPUTS = 16, 16, 256
_MOST_OUTPUTS, _MOST_ROWS = 512, 64
# A program holds all that it multiplies in shared memory, and asks for it at once.
_LEAST_INPUTS, _MOST_INPUTS = 1024, 2048
_SHARED_BYTES = 160 << 10
_LINE = tl.constexpr(64)


def has_product(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `product` computes it, and is quicker than cuBLAS."""
    num_outputs, num_inputs = weight_OI.shape
    return (weight_OI.dtype in _DTYPES and x_MI.dtype == weight_OI.dtype and x_MI.dim() == 2 and x_MI.stride(1) == 1
            and weight_OI.is_contiguous() and num_outputs % _OUTPUTS == 0 and _OUTPUTS <= num_outputs <= _MOST_OUTPUTS
            and num_inputs % _INPUTS == 0 and _LEAST_INPUTS <= num_inputs <= _MOST_INPUTS
            and 0 < len(x_MI) <= _MOST_ROWS and _has_room())


@functools.cache
def _has_room() -> bool:
    return Gpu.current().shared_bytes >= _SHARED_BYTES


def product(x_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """x W^T of what `has_product` took, (M, O) of x's dtype; sums in float32, rounded once."""
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    _few_outputs[(num_outputs // _OUTPUTS, triton.cdiv(num_rows, _ROWS))](
        x_MI, weight_OI, out_MO, num_rows, num_outputs, x_MI.stride(0), WIDTH=num_inputs, OUTPUTS=_OUTPUTS, ROWS=_ROWS,
        INPUTS=_INPUTS, num_warps=4, **launch_settings())
    return out_MO


@triton.jit(do_not_specialize=["num_rows"])
def _few_outputs(x, weight, out, num_rows, num_outputs, stride_x, WIDTH: tl.constexpr, OUTPUTS: tl.constexpr,
                 ROWS: tl.constexpr, INPUTS: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The weight's tile is the left factor. All of it is asked for before the kernel waits."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    if IS_DEPENDENT:
        lines = tl.arange(0, INPUTS // _LINE) * _LINE
        for start in tl.static_range(0, WIDTH, INPUTS):
            fetch(weight + outputs[:, None] * WIDTH + (start + lines)[None, :])
    after_earlier_kernels(IS_DEPENDENT)
    is_row = rows < num_rows
    weights = weight + outputs[:, None] * WIDTH + inputs[None, :]
    sources = x + rows.to(tl.int64)[None, :] * stride_x + inputs[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, WIDTH, INPUTS, num_stages=WIDTH // INPUTS + 1):
        sums = tl.dot(tl.load(weights + start), tl.load(sources + start, mask=is_row[None, :], other=0.0), sums)
    tl.store(out + rows[None, :] * num_outputs + outputs[:, None], sums.to(out.dtype.element_ty),
             mask=is_row[None, :])
