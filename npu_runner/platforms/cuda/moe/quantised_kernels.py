"""Triton kernels of experts in 8 bits: the products of `expert_kernels`, with inputs and weights in int8 or FP8.

int8 has a scale for each row of inputs and for each output; sums of integers are exact. FP8 has one for each row and
128 inputs, and for each block of 128 x 128 of a weight; sums of a block are added in float32.

Blocks, pairs and the letters are those of `expert_kernels`; G groups of 128 inputs.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.moe.kernels import _begin, _load, _pairs_of, _whose

_CHANGES = ["stride_s"]


@triton.jit(do_not_specialize=_CHANGES)
def gate_up(x, x_scales, weights, scales, order, block_experts, block_rows, first_expert, num_experts, hidden, stride_x,
            stride_s, top_k, depth, width, IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr,
            IS_INT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
            IS_DEPENDENT: tl.constexpr):
    """silu(x gate^T) * (x up^T) of one block's pairs, some of the I columns, in 16 bits. weights (E, 2I, D), hidden (P,
    I), scales (E, 2I) or (E, 2I / 128, G); x_scales (T,), or of group g from g * `stride_s` on."""
    _begin(IS_SORTED, IS_DEPENDENT)
    tiles = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // tiles
    expert, num_rows = _whose(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, ROWS)
    begin = (tl.program_id(0) % tiles) * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    tokens = (pairs // top_k).to(tl.int64)
    rows = x + tokens[:, None] * stride_x + depths[None, :]
    # Columns behind the last read another's weights, and are not stored.
    first = weights + expert * (2 * width) * depth + (columns % width)[None, :] * depth + depths[:, None]
    second = first + width * depth
    if IS_INT8:
        gate = tl.zeros((ROWS, COLUMNS), tl.int32)
        up = tl.zeros((ROWS, COLUMNS), tl.int32)
        for start in range(0, depth, DEPTH):
            inputs = _load(rows + start, (depths < depth - start)[None, :], IS_EVEN)
            gate = tl.dot(inputs, _load(first + start, (depths < depth - start)[:, None], IS_EVEN), gate,
                          out_dtype=tl.int32)
            up = tl.dot(inputs, _load(second + start, (depths < depth - start)[:, None], IS_EVEN), up,
                        out_dtype=tl.int32)
        by_row = tl.load(x_scales + tokens)[:, None]
        by_column = scales + expert * (2 * width) + columns % width
        gate = gate.to(tl.float32) * by_row * tl.load(by_column)[None, :]
        up = up.to(tl.float32) * by_row * tl.load(by_column + width)[None, :]
    else:
        of_gate = scales + (expert * (2 * width // 128) + begin // 128) * (depth // 128)
        of_up = of_gate + (width // 128) * (depth // 128)
        gate = tl.zeros((ROWS, COLUMNS), tl.float32)
        up = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            inputs = tl.load(rows + start)
            by_row = tl.load(x_scales + tokens + (start // 128).to(tl.int64) * stride_s)
            products = tl.dot(inputs, tl.load(first + start))
            gate += products * (by_row * tl.load(of_gate + start // 128))[:, None]
            products = tl.dot(inputs, tl.load(second + start))
            up += products * (by_row * tl.load(of_up + start // 128))[:, None]
    dtype = hidden.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up.to(dtype)
    place = hidden + pairs.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(place, result, mask=is_row[:, None] & (columns < width)[None, :])


@triton.jit(do_not_specialize=_CHANGES)
def down(hidden, hidden_scales, weights, scales, order, block_experts, block_rows, first_expert, num_experts, out,
         stride_s, depth, width, IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr,
         IS_INT8: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
         IS_DEPENDENT: tl.constexpr):
    """hidden down^T of one block's pairs, some of the D = `width` columns. weights (E, D, I), out (P, D), scales (E, D)
    or (E, D / 128, G); hidden_scales (P,), or of group g from g * `stride_s` on."""
    _begin(IS_SORTED, IS_DEPENDENT)
    tiles = tl.cdiv(width, COLUMNS)
    block = tl.program_id(0) // tiles
    expert, num_rows = _whose(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, ROWS)
    begin = (tl.program_id(0) % tiles) * COLUMNS
    columns = begin + tl.arange(0, COLUMNS)
    depths = tl.arange(0, DEPTH)
    places = pairs.to(tl.int64)
    rows = hidden + places[:, None] * depth + depths[None, :]
    matrix = weights + expert * width * depth + (columns % width)[None, :] * depth + depths[:, None]
    if IS_INT8:
        sums = tl.zeros((ROWS, COLUMNS), tl.int32)
        for start in range(0, depth, DEPTH):
            inputs = _load(rows + start, (depths < depth - start)[None, :], IS_EVEN)
            sums = tl.dot(inputs, _load(matrix + start, (depths < depth - start)[:, None], IS_EVEN), sums,
                          out_dtype=tl.int32)
        by_column = tl.load(scales + expert * width + columns % width)
        total = sums.to(tl.float32) * tl.load(hidden_scales + places)[:, None] * by_column[None, :]
    else:
        of_block = scales + (expert * (width // 128) + begin // 128) * (depth // 128)
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, depth, DEPTH):
            by_row = tl.load(hidden_scales + places + (start // 128).to(tl.int64) * stride_s)
            products = tl.dot(tl.load(rows + start), tl.load(matrix + start))
            total += products * (by_row * tl.load(of_block + start // 128))[:, None]
    place = out + places[:, None] * width + columns[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & (columns < width)[None, :])
