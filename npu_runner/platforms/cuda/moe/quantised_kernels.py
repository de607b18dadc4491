"""Triton kernels of experts in 8 bits: the GEMMs of kernels.py, with inputs and weights in int8 or FP8.

int8 has a scale for each row of inputs and for each output; int32 accumulators are exact. FP8 has one for each row and
128 inputs, and for each 128 x 128 block of a weight; partial accumulators of a block are added in float32.

Blocks, pairs and the letters are those of kernels.py; G groups of 128 inputs.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.moe.kernels import _expert_of, _load, _pairs_of, _wait

_CHANGES = ["stride_s"]


@triton.jit(do_not_specialize=_CHANGES)
def gate_up(x, x_scales, weights, scales, order, block_experts, block_rows, first_expert, num_experts, hidden, stride_x,
            stride_s, top_k, K, width, IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr,
            IS_INT8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
            IS_DEPENDENT: tl.constexpr):
    """silu(x gate^T) * (x up^T) of one block's pairs and BLOCK_N of I, in 16 bits. weights (E, 2I, D), hidden (P, I),
    scales (E, 2I) or (E, 2I / 128, G). x_scales (T,), or those of group g start at g * `stride_s`."""
    _wait(IS_SORTED, IS_DEPENDENT)
    num_tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_tiles
    expert, num_rows = _expert_of(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, BLOCK_M)
    first_n = (tl.program_id(0) % num_tiles) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    tokens = (pairs // top_k).to(tl.int64)
    rows = x + tokens[:, None] * stride_x + offs_k[None, :]
    # Columns behind the last one read other weights, and are not stored.
    first = weights + expert * (2 * width) * K + (offs_n % width)[None, :] * K + offs_k[:, None]
    second = first + width * K
    if IS_INT8:
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, K, BLOCK_K):
            inputs = _load(rows + start, (offs_k < K - start)[None, :], IS_EVEN)
            gate = tl.dot(inputs, _load(first + start, (offs_k < K - start)[:, None], IS_EVEN), gate,
                          out_dtype=tl.int32)
            up = tl.dot(inputs, _load(second + start, (offs_k < K - start)[:, None], IS_EVEN), up,
                        out_dtype=tl.int32)
        by_row = tl.load(x_scales + tokens)[:, None]
        by_column = scales + expert * (2 * width) + offs_n % width
        gate = gate.to(tl.float32) * by_row * tl.load(by_column)[None, :]
        up = up.to(tl.float32) * by_row * tl.load(by_column + width)[None, :]
    else:
        of_gate = scales + (expert * (2 * width // 128) + first_n // 128) * (K // 128)
        of_up = of_gate + (width // 128) * (K // 128)
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            inputs = tl.load(rows + start)
            by_row = tl.load(x_scales + tokens + (start // 128).to(tl.int64) * stride_s)
            partial = tl.dot(inputs, tl.load(first + start))
            gate += partial * (by_row * tl.load(of_gate + start // 128))[:, None]
            partial = tl.dot(inputs, tl.load(second + start))
            up += partial * (by_row * tl.load(of_up + start // 128))[:, None]
    dtype = hidden.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up.to(dtype)
    place = hidden + pairs.to(tl.int64)[:, None] * width + offs_n[None, :]
    tl.store(place, result, mask=is_row[:, None] & (offs_n < width)[None, :])


@triton.jit(do_not_specialize=_CHANGES)
def down(hidden, hidden_scales, weights, scales, order, block_experts, block_rows, first_expert, num_experts, out,
         stride_s, K, width, IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr,
         IS_INT8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
         IS_DEPENDENT: tl.constexpr):
    """hidden down^T of one block's pairs and BLOCK_N of D = `width`. weights (E, D, I), out (P, D), scales (E, D) or
    (E, D / 128, G). hidden_scales (P,), or those of group g start at g * `stride_s`."""
    _wait(IS_SORTED, IS_DEPENDENT)
    num_tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_tiles
    expert, num_rows = _expert_of(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, BLOCK_M)
    first_n = (tl.program_id(0) % num_tiles) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    places = pairs.to(tl.int64)
    rows = hidden + places[:, None] * K + offs_k[None, :]
    matrix = weights + expert * width * K + (offs_n % width)[None, :] * K + offs_k[:, None]
    if IS_INT8:
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.int32)
        for start in range(0, K, BLOCK_K):
            inputs = _load(rows + start, (offs_k < K - start)[None, :], IS_EVEN)
            acc = tl.dot(inputs, _load(matrix + start, (offs_k < K - start)[:, None], IS_EVEN), acc,
                         out_dtype=tl.int32)
        by_column = tl.load(scales + expert * width + offs_n % width)
        total = acc.to(tl.float32) * tl.load(hidden_scales + places)[:, None] * by_column[None, :]
    else:
        of_block = scales + (expert * (width // 128) + first_n // 128) * (K // 128)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            by_row = tl.load(hidden_scales + places + (start // 128).to(tl.int64) * stride_s)
            partial = tl.dot(tl.load(rows + start), tl.load(matrix + start))
            total += partial * (by_row * tl.load(of_block + start // 128))[:, None]
    place = out + places[:, None] * width + offs_n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & (offs_n < width)[None, :])
