"""Triton kernels of a vision tower's attention: online softmax (arXiv 2205.14135) within images. Knows no cache.

Softmax is in base 2: FACTOR is the scale times log2(e), above 0. Float32 inputs are multiplied without TF32;
accumulators are always float32. `images` pads a head dim H (HEAD_DIM) to HEAD dims, a power of 2, with zeros.

`split_images` is for an H slightly above a power of 2, as FIRST dims and up to REST others: 72 and 80 dims need five
eighths of the MMAs of 128. It is for 16 bits only, and each compiled kernel must be checked. ptxas 12.8 (of triton 3.6)
adds to 64-bit descriptors of MMA operands in shared memory. In some tiles it uses the upper half of another address.
The MMA then reads elsewhere: wrong numbers, or an illegal access. So vision.py compares each compiled kernel once
before use. The machine code of the tiles in use showed no such case.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.attention.paged_kernels import load_rows, softmax_step


@triton.jit
def _step(queries, row_max, total, acc, k, v, start, length, stride_k, stride_v, MASKED: tl.constexpr,
          FACTOR: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr):
    """One step over COLUMNS tokens of an image from its token `start` on; MASKED: some are beyond its `length`."""
    columns = start + tl.arange(0, COLUMNS)
    dims = tl.arange(0, HEAD)
    is_there = None
    is_seen = None
    if MASKED:
        is_there = columns < length
        is_seen = is_there[None, :]
    rows_k = k + columns[:, None] * stride_k
    rows_v = v + columns[:, None] * stride_v
    keys = load_rows(rows_k + dims[None, :], is_there, dims, HEAD_DIM, HEAD)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    probabilities, rescale, row_max, total = softmax_step(scores, is_seen, row_max, total, FACTOR)
    values = load_rows(rows_v + dims[None, :], is_there, dims, HEAD_DIM, HEAD)
    probabilities = probabilities.to(values.dtype)
    acc = tl.dot(probabilities, values, acc * rescale[:, None], input_precision="ieee")
    return row_max, total, acc


@triton.jit
def images(q, k, v, out, starts, stride_q, stride_k, stride_v, NUM_HEADS: tl.constexpr, FACTOR: tl.constexpr,
           HEAD_DIM: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """ROWS tokens of one head over all of their image; only its last columns are masked."""
    head = tl.program_id(1)
    begin = tl.load(starts + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts + tl.program_id(2) + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * ROWS
    if first < length:
        q += begin * stride_q + head * HEAD_DIM
        k += begin * stride_k + head * HEAD_DIM
        v += begin * stride_v + head * HEAD_DIM
        out += (begin * NUM_HEADS + head) * HEAD_DIM
        rows = first + tl.arange(0, ROWS)
        is_row = rows < length
        dims = tl.arange(0, HEAD)
        rows_q = q + rows[:, None] * stride_q
        rows_out = out + rows[:, None] * (NUM_HEADS * HEAD_DIM)
        queries = load_rows(rows_q + dims[None, :], is_row, dims, HEAD_DIM, HEAD)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        acc = tl.zeros((ROWS, HEAD), tl.float32)
        whole = length // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            row_max, total, acc = _step(queries, row_max, total, acc, k, v, start, length, stride_k, stride_v, False,
                                        FACTOR, HEAD_DIM, HEAD, COLUMNS)
        if whole < length:
            row_max, total, acc = _step(queries, row_max, total, acc, k, v, whole, length, stride_k, stride_v, True,
                                        FACTOR, HEAD_DIM, HEAD, COLUMNS)
        tl.store(rows_out + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
                 mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _split_step(q0, q1, row_max, total, acc0, acc1, k, v, start, length, stride_k, stride_v, MASKED: tl.constexpr,
                FACTOR: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
                COLUMNS: tl.constexpr):
    """One step over COLUMNS tokens of an image from its token `start` on; MASKED: some are beyond its `length`."""
    columns = start + tl.arange(0, COLUMNS)
    d0 = tl.arange(0, FIRST)
    d1 = FIRST + tl.arange(0, REST)
    is_there = None
    is_seen = None
    if MASKED:
        is_there = columns < length
        is_seen = is_there[None, :]
    rows_k = k + columns[:, None] * stride_k
    rows_v = v + columns[:, None] * stride_v
    k0 = load_rows(rows_k + d0[None, :], is_there, d0, HEAD_DIM, FIRST)
    k1 = load_rows(rows_k + d1[None, :], is_there, d1, HEAD_DIM, FIRST + REST)
    scores = tl.dot(q0, tl.trans(k0), input_precision="ieee")
    scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
    p, rescale, row_max, total = softmax_step(scores, is_seen, row_max, total, FACTOR)
    v0 = load_rows(rows_v + d0[None, :], is_there, d0, HEAD_DIM, FIRST)
    v1 = load_rows(rows_v + d1[None, :], is_there, d1, HEAD_DIM, FIRST + REST)
    p = p.to(v0.dtype)
    acc0 = tl.dot(p, v0, acc0 * rescale[:, None], input_precision="ieee")
    acc1 = tl.dot(p, v1, acc1 * rescale[:, None], input_precision="ieee")
    return row_max, total, acc0, acc1


@triton.jit
def split_images(q, k, v, out, starts, stride_q, stride_k, stride_v, NUM_HEADS: tl.constexpr, FACTOR: tl.constexpr,
                 HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
                 COLUMNS: tl.constexpr):
    """ROWS tokens of one head over all of their image; only its last columns are masked."""
    head = tl.program_id(1)
    begin = tl.load(starts + tl.program_id(2)).to(tl.int64)
    length = (tl.load(starts + tl.program_id(2) + 1) - begin).to(tl.int32)
    first = tl.program_id(0) * ROWS
    if first < length:
        q += begin * stride_q + head * HEAD_DIM
        k += begin * stride_k + head * HEAD_DIM
        v += begin * stride_v + head * HEAD_DIM
        out += (begin * NUM_HEADS + head) * HEAD_DIM
        rows = first + tl.arange(0, ROWS)
        is_row = rows < length
        d0 = tl.arange(0, FIRST)
        d1 = FIRST + tl.arange(0, REST)
        rows_q = q + rows[:, None] * stride_q
        rows_out = out + rows[:, None] * (NUM_HEADS * HEAD_DIM)
        q0 = load_rows(rows_q + d0[None, :], is_row, d0, HEAD_DIM, FIRST)
        q1 = load_rows(rows_q + d1[None, :], is_row, d1, HEAD_DIM, FIRST + REST)
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        s0 = tl.zeros((ROWS, FIRST), tl.float32)
        s1 = tl.zeros((ROWS, REST), tl.float32)
        whole = length // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            row_max, total, s0, s1 = _split_step(q0, q1, row_max, total, s0, s1, k, v, start, length, stride_k,
                                                 stride_v, False, FACTOR, HEAD_DIM, FIRST, REST, COLUMNS)
        if whole < length:
            row_max, total, s0, s1 = _split_step(q0, q1, row_max, total, s0, s1, k, v, whole, length, stride_k,
                                                 stride_v, True, FACTOR, HEAD_DIM, FIRST, REST, COLUMNS)
        tl.store(rows_out + d0[None, :], (s0 / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
        tl.store(rows_out + d1[None, :], (s1 / total[:, None]).to(out.dtype.element_ty),
                 mask=is_row[:, None] & (d1 < HEAD_DIM)[None, :])
