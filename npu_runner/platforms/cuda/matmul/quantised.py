"""Products of rows with a weight in FP8 or int8, rows in the same dtype. Of a few rows by kernels of our own, which
read the weight once; of more by the vendor's library.

y = (q_x W^T) s_x s_w + b. Inputs have one scale a row and weights one an output; or, FP8 only, inputs one for each row
and 128 columns, weights one for each block of 128 x 128. Sums of a block, or of 128 columns, are added in float32.
Knows nothing of models.

M rows, I input features, O output features, G groups of 128 columns.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import (
    after_earlier_kernels,
    fetch,
    launch_settings,
    wait_for_earlier_kernels,
)
from npu_runner.platforms.cuda.matmul import hopper_fp8 as hopper_products
from npu_runner.platforms.cuda.matmul import hopper_small_m as hopper_few_rows
from npu_runner.platforms.cuda.matmul.quantised_inputs import quantise_rows
from npu_runner.platforms.cuda.split_k import counters, finish

MOST_ROWS = 64
"""That `few_rows` takes, which is quicker than the library there (docs/benchmarks.md)."""
_COMPILED_ROWS = (1, 2, 32, MOST_ROWS)
# Of int8 the library takes no fewer rows; zeros are put below them.
_LEAST_INT_MM_ROWS, _INT_MM_ALIGNMENT = 17, 8
_ALIGNMENT = 16
_CHANGES = ["num_rows", "group_stride"]


class Tile(NamedTuple):
    """Output and input features of one loop step, how it is launched, and into how many parts the inputs are cut."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int
    splits: int = 1


def tile_of(num_rows: int, num_outputs: int, *, in_blocks: bool = False) -> Tile:
    """Up to 16 rows each was the quickest of those tried on an H100, or within 5 % of it (10 % for a row of int8)."""
    if num_rows == 1:
        return Tile(8, 1024, 4, 1) if in_blocks else Tile(4, 2048, 4, 1)
    if num_outputs <= 8192:
        return Tile(64, 128, 4, 4, 4)
    if in_blocks or num_rows > 16:
        return Tile(128, 128, 8 if in_blocks and num_rows > 16 else 4, 4)
    return Tile(128, 256, 8, 3)


def product(x_MI: Tensor, x_scale: Tensor, weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None,
            dtype: torch.dtype) -> Tensor:
    """(M, O) of `dtype` for any number of rows; arguments as of `few_rows`."""
    num_rows, num_inputs = x_MI.shape
    if num_rows == 0:
        return torch.empty((0, len(weight_OI)), dtype=dtype, device=x_MI.device)
    if bias_O is None or bias_O.dtype == dtype:
        in_blocks = scale.dim() == 2
        if hopper_few_rows.takes(x_MI, weight_OI, dtype, in_blocks=in_blocks):
            return hopper_few_rows.multiply(x_MI, x_scale, weight_OI, scale, bias_O, dtype)
        tile = hopper_products.taken(x_MI, weight_OI, dtype, in_blocks=in_blocks)
        if tile is not None:
            return hopper_products.multiply(x_MI, x_scale, weight_OI, scale, bias_O, tile)
    is_own = weight_OI.data_ptr() % _ALIGNMENT == 0 and num_inputs % _ALIGNMENT == 0
    if num_rows <= MOST_ROWS and is_own:
        return few_rows(x_MI, x_scale, weight_OI, scale, bias_O, dtype)
    if x_MI.dtype == torch.int8:
        return _int8_of_the_library(x_MI, x_scale, weight_OI, scale, bias_O, dtype)
    return fp8_of_the_library(x_MI, x_scale, weight_OI, scale, bias_O, dtype)


def compile_all(weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> None:
    """The variants that `product` takes for few rows of this weight."""
    hopper_products.prepare(weight_OI, in_blocks=scale.dim() == 2)
    hopper_few_rows.prepare(weight_OI, dtype, in_blocks=scale.dim() == 2)
    num_inputs = weight_OI.shape[1]
    for num_rows in _COMPILED_ROWS:
        x_MI = torch.zeros((num_rows, num_inputs), dtype=dtype, device=weight_OI.device)
        rows = quantise_rows(x_MI, weight_OI.dtype, in_groups=scale.dim() == 2)
        product(*rows, weight_OI, scale, bias_O, dtype)


def fp8_of_the_library(x_MI: Tensor, x_scale: Tensor, weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None,
                       dtype: torch.dtype) -> Tensor:
    """`product` of FP8. Scales of groups lie as `quantised_inputs` lays them, with room for rows in sixteens."""
    if x_scale.dim() == 1:
        return torch._scaled_mm(x_MI, weight_OI.t(), x_scale[:, None], scale[None], bias_O, out_dtype=dtype)
    num_rows, num_inputs = x_MI.shape
    room = x_scale.stride(1)  # the library takes no rows less than that
    rows_RI = x_MI.as_strided((room, num_inputs), x_MI.stride(), x_MI.storage_offset())
    scales_RG = x_scale.as_strided((room, x_scale.shape[1]), x_scale.stride(), x_scale.storage_offset())
    out_MO = torch._scaled_mm(rows_RI, weight_OI.t(), scales_RG, scale.t(), out_dtype=dtype)[:num_rows]
    return out_MO if bias_O is None else out_MO + bias_O


def _int8_of_the_library(x_MI: Tensor, x_scale_M: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None,
                         dtype: torch.dtype) -> Tensor:
    """`product` of int8: exact sums, then `scale_sums`. Sizes that the library does not take are summed in float64."""
    num_rows = len(x_MI)
    if any(size % _INT_MM_ALIGNMENT for size in weight_OI.shape):
        return scale_sums(x_MI.double() @ weight_OI.double().t(), x_scale_M, scale_O, bias_O, dtype)
    if num_rows < _LEAST_INT_MM_ROWS:
        x_MI = torch.nn.functional.pad(x_MI, (0, 0, 0, 32 - num_rows))
    return scale_sums(torch._int_mm(x_MI, weight_OI.t()), x_scale_M, scale_O, bias_O, dtype)


def scale_sums(sums: Tensor, x_scale_M: Tensor, scale_O: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
    """sums * s_x * s_w + b of the first M rows of sums (int32 or float64), (M, O) of `dtype`."""
    num_rows, num_outputs = len(x_scale_M), sums.shape[1]
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=sums.device)
    block = 1024
    if num_rows:
        _scale_sums[(num_rows, triton.cdiv(num_outputs, block))](
            sums, x_scale_M, scale_O, scale_O if bias_O is None else bias_O, out_MO, num_outputs,
            HAS_BIAS=bias_O is not None, BLOCK=block, num_warps=4, **launch_settings())
    return out_MO


def few_rows(x_MI: Tensor, x_scale: Tensor, weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None,
             dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    """(M, O) of `dtype` for 1 to MOST_ROWS rows that `quantised_inputs` made. I is a multiple of 16.

    x_scale is (M,) and scale (O,) or (1,); in blocks x_scale is (M, G) with stride 1 along M, and scale (O / 128, G),
    rounded up, contiguous. All scales are float32.
    """
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    assert 1 <= num_rows <= MOST_ROWS, f"{num_rows} rows are not 1 to {MOST_ROWS}"
    in_blocks = x_scale.dim() == 2
    tile = tile or tile_of(num_rows, num_outputs, in_blocks=in_blocks)
    assert not in_blocks or tile.outputs <= 128 >= tile.inputs or num_rows == 1, f"{tile} is more than a block"
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_MI.device)
    arguments = (x_MI, x_scale, weight_OI, scale, weight_OI if bias_O is None else bias_O, out_MO)
    scale_stride = scale.stride(0) if scale.numel() > 1 else 0
    group_stride = x_scale.stride(1) if in_blocks else 0
    settings = {"HAS_BIAS": bias_O is not None, "IN_BLOCKS": in_blocks, "OUTPUTS": tile.outputs, "INPUTS": tile.inputs,
                "STAGES": tile.num_stages, "num_warps": tile.num_warps}
    num_tiles = triton.cdiv(num_outputs, tile.outputs)
    if tile.outputs < 16:
        assert num_rows == 1, f"a tile of {tile.outputs} outputs takes one row, not {num_rows}"
        is_even = num_outputs % tile.outputs == 0 and num_inputs % tile.inputs == 0
        _one_row[(num_tiles,)](*arguments, num_outputs, num_inputs, scale_stride, group_stride, IS_EVEN=is_even,
                               **settings, **launch_settings())
        return out_MO
    parts = out_MO if tile.splits == 1 else torch.empty((tile.splits, num_rows, num_outputs), dtype=torch.float32,
                                                        device=x_MI.device)
    depth = triton.cdiv(triton.cdiv(num_inputs, tile.inputs), tile.splits) * tile.inputs
    rows = max(16, triton.next_power_of_2(num_rows))
    _few_rows[(num_tiles, tile.splits)](
        TensorDescriptor.from_tensor(x_MI, [rows, tile.inputs]),
        TensorDescriptor.from_tensor(weight_OI, [tile.outputs, tile.inputs]), *arguments[1:], parts,
        counters(x_MI.device, num_tiles), num_rows, num_outputs, num_inputs, depth, scale_stride,
        group_stride, SPLITS=tile.splits, IS_INT8=x_MI.dtype == torch.int8, ROWS=rows,
        AHEAD=tile.inputs, **settings, **launch_settings())
    return out_MO


@triton.jit
def _scale_sums(sums, x_scale, scale, bias, out, num_outputs, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
                IS_DEPENDENT: tl.constexpr):
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = outputs < num_outputs
    result = tl.load(sums + row * num_outputs + outputs, mask=mask, other=0).to(tl.float32)
    result = result * tl.load(x_scale + row) * tl.load(scale + outputs, mask=mask, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _one_row(x, x_scale, weight, scale, bias, out, num_outputs, num_inputs, scale_stride, group_stride,
             HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr, OUTPUTS: tl.constexpr,
             INPUTS: tl.constexpr, STAGES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """Element by element, with one sum over the inputs at the end; the first weights come before the kernel waits."""
    first = tl.program_id(0) * OUTPUTS
    outputs = first + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    is_output = outputs < num_outputs
    places = weight + outputs.to(tl.int64)[:, None] * num_inputs + inputs[None, :]
    block_scales = scale + first // 128 * scale_stride
    sums = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    begin = 0
    if IS_DEPENDENT and IS_EVEN:
        begin = INPUTS
        weights = tl.load(places, eviction_policy="evict_first")
        wait_for_earlier_kernels(IS_DEPENDENT)
        values = _values(x, x_scale, group_stride, block_scales, 0, num_inputs, IN_BLOCKS, True, INPUTS)
        sums = weights.to(tl.float32) * values[None, :]
    else:
        wait_for_earlier_kernels(IS_DEPENDENT)
    for start in tl.range(begin, num_inputs, INPUTS, num_stages=STAGES):
        if IS_EVEN:
            weights = tl.load(places + start, eviction_policy="evict_first")
        else:
            is_there = is_output[:, None] & (start + inputs < num_inputs)[None, :]
            weights = tl.load(places + start, mask=is_there, other=0.0)
        values = _values(x, x_scale, group_stride, block_scales, start, num_inputs, IN_BLOCKS, IS_EVEN, INPUTS)
        sums += weights.to(tl.float32) * values[None, :]
    result = tl.sum(sums, 1)
    if not IN_BLOCKS:
        result *= tl.load(x_scale) * tl.load(scale + outputs * scale_stride, mask=is_output, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _values(x, x_scale, group_stride, block_scales, start, num_inputs, IN_BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr,
            INPUTS: tl.constexpr):
    """One row's inputs from `start` on, by the scales of their blocks."""
    inputs = start + tl.arange(0, INPUTS)
    if IS_EVEN:
        values = tl.load(x + inputs).to(tl.float32)
    else:
        values = tl.load(x + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
    if IN_BLOCKS:
        groups = inputs // 128
        is_group = inputs < num_inputs
        scales = tl.load(x_scale + groups * group_stride, mask=is_group, other=0.0)
        values *= scales * tl.load(block_scales + groups, mask=is_group, other=0.0)
    return values


@triton.jit(do_not_specialize=_CHANGES)
def _few_rows(x_tiles, tiles, x_scale, weight, scale, bias, out, parts, counts, num_rows, num_outputs, num_inputs,
              depth, scale_stride, group_stride, HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr,
              IS_INT8: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr,
              SPLITS: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """On tensor cores, the weight's tile as the left factor. `tiles` describes `weight`; beyond its edges it is 0. The
    first weights are asked for before the kernel waits. A program takes `depth` inputs; see `split_sums` for the rest.
    `group_stride`: of x's scales from group to group."""
    first = tl.program_id(0) * OUTPUTS
    begin = tl.program_id(1) * depth
    end = tl.minimum(begin + depth, num_inputs)
    outputs = first + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_row = rows < num_rows
    if IS_DEPENDENT:
        lines = tl.arange(0, AHEAD // 128) * 128
        fetch(weight + tl.minimum(outputs, num_outputs - 1).to(tl.int64)[:, None] * num_inputs
              + tl.minimum(begin + lines, num_inputs - 1)[None, :])
    wait_for_earlier_kernels(IS_DEPENDENT)
    sums = tl.zeros((OUTPUTS, ROWS), tl.int32 if IS_INT8 else tl.float32)
    for start in tl.range(begin, end, INPUTS, num_stages=STAGES):
        columns = x_tiles.load([0, start]).T
        if IN_BLOCKS:
            products = tl.dot(tiles.load([first, start]), columns)
            row_scale = tl.load(x_scale + start // INPUTS * group_stride + rows, mask=is_row, other=0.0)
            row_scale *= tl.load(scale + first // 128 * scale_stride + start // INPUTS)
            sums += products * row_scale[None, :]
        elif IS_INT8:
            sums = tl.dot(tiles.load([first, start]), columns, sums, out_dtype=tl.int32)
        else:
            sums = tl.dot(tiles.load([first, start]), columns, sums, max_num_imprecise_acc=128)
    is_output = outputs < num_outputs
    results = sums.to(tl.float32)
    if not IN_BLOCKS:
        row_scale = tl.load(x_scale + rows, mask=is_row, other=0.0)
        results *= row_scale[None, :] * tl.load(scale + outputs * scale_stride, mask=is_output, other=0.0)[:, None]
    finish(results, bias, out, parts, counts, num_rows, num_outputs, outputs, rows, HAS_BIAS, SPLITS)
