"""Kernels that are being tried on a device, and not used by anything else: see bench_cuda_tries.py."""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.attention_kernels import _find_blocks, _masked_step, load_rows, weigh


@triton.jit
def _split_step(q0, q1, highest, total, sums0, sums1, k, v, start, length, stride_k, stride_v, MASKED: tl.constexpr,
                FACTOR: tl.constexpr, HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr,
                COLUMNS: tl.constexpr):
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
    scores = tl.dot(q0, tl.trans(k0))
    scores = tl.dot(q1, tl.trans(k1), scores)
    p, fade, highest, total = weigh(scores, is_seen, highest, total, FACTOR)
    v0 = load_rows(rows_v + d0[None, :], is_there, d0, HEAD_DIM, FIRST)
    v1 = load_rows(rows_v + d1[None, :], is_there, d1, HEAD_DIM, FIRST + REST)
    p = p.to(v0.dtype)
    sums0 = tl.dot(p, v0, sums0 * fade[:, None])
    sums1 = tl.dot(p, v1, sums1 * fade[:, None])
    return highest, total, sums0, sums1


@triton.jit
def split_pictures(q, k, v, out, starts, stride_q, stride_k, stride_v, NUM_HEADS: tl.constexpr, FACTOR: tl.constexpr,
                   HEAD_DIM: tl.constexpr, FIRST: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
                   COLUMNS: tl.constexpr):
    """vision_kernels.pictures with a head dim in two parts."""
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
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        s0 = tl.zeros((ROWS, FIRST), tl.float32)
        s1 = tl.zeros((ROWS, REST), tl.float32)
        whole = length // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            highest, total, s0, s1 = _split_step(q0, q1, highest, total, s0, s1, k, v, start, length, stride_k,
                                                 stride_v, False, FACTOR, HEAD_DIM, FIRST, REST, COLUMNS)
        if whole < length:
            highest, total, s0, s1 = _split_step(q0, q1, highest, total, s0, s1, k, v, whole, length, stride_k,
                                                 stride_v, True, FACTOR, HEAD_DIM, FIRST, REST, COLUMNS)
        tl.store(rows_out + d0[None, :], (s0 / total[:, None]).to(out.dtype.element_ty), mask=is_row[:, None])
        tl.store(rows_out + d1[None, :], (s1 / total[:, None]).to(out.dtype.element_ty),
                 mask=is_row[:, None] & (d1 < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=["stride_table", "num_parts", "least_steps"])
def decode(q, k_cache, v_cache, out, parts, weights, arrivals, block_tables, context_lens, stride_q, stride_table,
           num_parts, least_steps, FACTOR: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
           HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           HEAD: tl.constexpr):
    """attention_kernels.decode without `combine`: the part that comes last puts them together, in their order.

    A part has at least `least_steps` steps; those behind the context's end leave at once.
    """
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    context_len = tl.load(context_lens + sequence)
    num_steps = tl.cdiv(context_len, COLUMNS)
    steps = tl.maximum(tl.cdiv(num_steps, num_parts), least_steps)
    used = tl.cdiv(num_steps, steps)
    if part >= used:
        return
    begin = part * steps * COLUMNS
    end = tl.minimum(begin + steps * COLUMNS, context_len)
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD)
    is_member = members < GROUP
    heads = kv_head * GROUP + members
    queries = load_rows(q + sequence * stride_q + (heads * HEAD_DIM)[:, None] + dims[None, :], is_member, dims,
                        HEAD_DIM, HEAD)
    table = block_tables + sequence * stride_table
    keys = k_cache + kv_head * HEAD_DIM
    values = v_cache + kv_head * HEAD_DIM
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, HEAD), tl.float32)
    blocks = _find_blocks(table, begin, 0, end, 0, BLOCK_SIZE, COLUMNS)
    for start in range(begin, end, COLUMNS):
        next_blocks = _find_blocks(table, start + COLUMNS, 0, end, 0, BLOCK_SIZE, COLUMNS)
        highest, total, sums = _masked_step(queries, highest, total, sums, keys, values, blocks, start, 0, end, None,
                                            dims, 0, ROW, FACTOR, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)
        blocks = next_blocks
    row = sequence * (NUM_KV_HEADS * GROUP) + heads
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    place = out + row[:, None] * HEAD_DIM + dims[None, :]
    if used == 1:
        tl.store(place, (sums / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        at = row * num_parts + part
        tl.store(parts + at[:, None] * HEAD_DIM + dims[None, :], sums, mask=mask)
        tl.store(weights + at * 2, highest * FACTOR, mask=is_member)
        tl.store(weights + at * 2 + 1, total, mask=is_member)
        tl.debug_barrier()
        arrival = arrivals + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(arrival, 1, sem="acq_rel") == used - 1:
            tl.debug_barrier()
            top = tl.full((ROWS,), float("-inf"), tl.float32)
            whole = tl.zeros((ROWS,), tl.float32)
            result = tl.zeros((ROWS, HEAD), tl.float32)
            for index in range(used):
                at = row * num_parts + index
                largest = tl.load(weights + at * 2, mask=is_member, other=0.0)
                weight = tl.load(weights + at * 2 + 1, mask=is_member, other=1.0)
                partial = tl.load(parts + at[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
                new_top = tl.maximum(top, largest)
                fade = tl.exp2(top - new_top)
                factor = tl.exp2(largest - new_top)
                result = result * fade[:, None] + partial * factor[:, None]
                whole = whole * fade + weight * factor
                top = new_top
            tl.store(place, (result / whole[:, None]).to(out.dtype.element_ty), mask=mask)
            tl.store(arrival, 0)
