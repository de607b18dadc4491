"""Products of a few rows with a weight: what bounds them is reading the weight. Knows nothing of models.

M rows, I input features, O output features.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import launch_settings, wait_for_earlier_kernels
from npu_runner.platforms.cuda.matmul.hopper_fp8 import is_hopper

MOST_ROWS = 16
# Smaller weights are read in the time of a launch, whoever reads them; float32 products stay IEEE's in cuBLAS.
_LEAST_FEATURES = 1024
# Weights with more outputs are those of heads.
_MANY_OUTPUTS = 65_536
_DTYPES = (torch.bfloat16, torch.float16)
_TENSOR_CORE_ROWS = 16
# Elements of each row of the weight that a kernel asks for before it waits; a line of the L2 cache has 64 of two bytes.
_AHEAD = 256
_LINE = tl.constexpr(64)
# Elements that rows of a weight must be multiples of, for whole tiles of it to be copied at once.
_TILE_ALIGNMENT = 8
# Rows and bytes of weights with at least twice as many inputs as outputs for which cuBLASLt was faster (H100).
_LONG_ROWS, _LONG_BYTES = range(64, 129), 16 << 20
# A step's number of rows is no constant of a kernel.
_CHANGES = ["num_rows"]


class Tile(NamedTuple):
    """Output and input features of one loop step, and how it is launched."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int


def has_product(x_MI: Tensor, weight_OI: Tensor) -> bool:
    """Whether `few_rows` computes products with this weight."""
    return (weight_OI.dtype in _DTYPES and x_MI.dim() == 2 and x_MI.stride(1) == 1 and weight_OI.is_contiguous()
            and min(weight_OI.shape) >= _LEAST_FEATURES)


def most_rows(weight_OI: Tensor) -> int:
    """Up to how many rows `few_rows` takes: as many as it was quicker with than cuBLAS on an H200."""
    has_tiles = weight_OI.shape[1] % _TILE_ALIGNMENT == 0 and weight_OI.data_ptr() % 16 == 0
    return MOST_ROWS if has_tiles else 1


def of_the_library(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """`F.linear`. With a bias torch asks cuBLASLt, which knows faster kernels for long sums: then it gets one of 0."""
    num_outputs, num_inputs = weight_OI.shape
    is_long = num_inputs >= 2 * num_outputs and weight_OI.numel() * weight_OI.itemsize >= _LONG_BYTES
    if bias_O is None and is_long and len(x_MI) in _LONG_ROWS and is_hopper():
        bias_O = _zeros(num_outputs, weight_OI.dtype, weight_OI.device)
    return F.linear(x_MI, weight_OI, bias_O)


@functools.cache
def _zeros(num_outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(num_outputs, dtype=dtype, device=device)


def tile_of(num_rows: int, num_outputs: int) -> Tile:
    """Few outputs want small tiles, so that every multiprocessor has one; each was the quickest of those tried."""
    if num_rows == 1:
        if num_outputs > _MANY_OUTPUTS:
            return Tile(16, 256, 4, 4)
        return Tile(4, 1024, 4, 1) if num_outputs > 4096 else Tile(8, 512, 4, 3)
    return Tile(128, 128, 4, 3) if num_outputs > 8192 else Tile(64, 128, 4, 6)


def few_rows(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, tile: Tile | None = None) -> Tensor:
    """x W^T + b for up to MOST_ROWS rows, (M, O) of x's dtype; sums and bias in float32, rounded once."""
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    assert num_rows <= MOST_ROWS, f"{num_rows} rows are more than {MOST_ROWS}"
    tile = tile or tile_of(num_rows, num_outputs)
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    is_even = num_outputs % tile.outputs == 0 and num_inputs % tile.inputs == 0
    arguments = (x_MI, weight_OI, weight_OI if bias_O is None else bias_O, out_MO)
    settings = {"HAS_BIAS": bias_O is not None, "IS_EVEN": is_even, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs,
                "STAGES": tile.num_stages, "num_warps": tile.num_warps}
    grid = (triton.cdiv(num_outputs, tile.outputs),)
    if num_rows == 1:
        _one_row[grid](*arguments, num_outputs, num_inputs, **settings, **launch_settings())
    else:
        tiles = TensorDescriptor.from_tensor(weight_OI, [tile.outputs, tile.inputs])
        _few_rows[grid](tiles, *arguments, num_rows, num_outputs, num_inputs, x_MI.stride(0), ROWS=_TENSOR_CORE_ROWS,
                        AHEAD=_AHEAD, **settings, **launch_settings())
    return out_MO


@triton.jit
def _one_row(x, weight, bias, out, num_outputs, num_inputs, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
             OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """Element by element, with one sum over the inputs at the end; the first weights come before the kernel waits."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_output = outputs < num_outputs
    places = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    begin = 0
    if IS_DEPENDENT and IS_EVEN:
        begin = INPUTS
        weights = tl.load(places, eviction_policy="evict_first")
        wait_for_earlier_kernels(IS_DEPENDENT)
        sums = weights.to(tl.float32) * tl.load(x + inputs).to(tl.float32)[None, :]
    else:
        wait_for_earlier_kernels(IS_DEPENDENT)
    for start in tl.range(begin, num_inputs, INPUTS, num_stages=STAGES):
        if IS_EVEN:
            weights = tl.load(places + start, eviction_policy="evict_first")
            values = tl.load(x + start + inputs)
        else:
            is_input = start + inputs < num_inputs
            weights = tl.load(places + start, mask=is_output[:, None] & is_input[None, :], other=0.0)
            values = tl.load(x + start + inputs, mask=is_input, other=0.0)
        sums += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(sums, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit(do_not_specialize=_CHANGES)
def _few_rows(tiles, x, weight, bias, out, num_rows, num_outputs, num_inputs, stride_x, HAS_BIAS: tl.constexpr,
              IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
              ROWS: tl.constexpr, AHEAD: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """On tensor cores, the weight's tile as the left factor: it has the rows that these want. `tiles` describes
    `weight`; what a tile has beyond its edges is 0. The first weights are asked for before the kernel waits."""
    first = tl.program_id(0) * OUTPUTS
    outputs = first + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    inputs = tl.arange(0, INPUTS)
    is_row = rows < num_rows
    if IS_DEPENDENT:
        lines = tl.arange(0, AHEAD // _LINE) * _LINE
        _fetch(weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None] * num_inputs + lines[None, :])
    wait_for_earlier_kernels(IS_DEPENDENT)
    sources = x + rows[None, :] * stride_x + inputs[:, None]
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for start in tl.range(0, num_inputs, INPUTS, num_stages=STAGES):
        is_there = is_row[None, :]
        if not IS_EVEN:
            is_there = is_there & (start + inputs < num_inputs)[:, None]
        sums = tl.dot(tiles.load([first, start]), tl.load(sources + start, mask=is_there, other=0.0), sums)
    is_output = outputs < num_outputs
    if HAS_BIAS:
        sums += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    tl.store(out + rows[None, :] * num_outputs + outputs[:, None], sums.to(out.dtype.element_ty),
             mask=is_row[None, :] & is_output[:, None])


@triton.jit
def _fetch(places):
    """Asks for what lies there to come into the L2 cache, and waits for nothing."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32,
                              is_pure=False, pack=1)
