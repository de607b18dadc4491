"""Triton kernels of paged attention: online softmax (arXiv 2205.14135), split contexts for decode (flash-decoding).

A cache row is one token's K * H values; the row of context token `t` is block_table[t // S] * S + t % S, for any block
size S. Products are exact in float32 inputs (no TF32), sums are float32 always. SCALE is a constant, because a float
argument is float64 to inductor and would make the sums so. WINDOW is how many tokens one sees, itself included, 0: all;
what lies before is not read, since its blocks may be anybody's.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

# What differs from step to step: a kernel of its own for values like 1 and 16 would be compiled while serving.
_CHANGES = ["stride_table", "num_parts"]


@triton.jit
def write_kv(k, v, k_cache, v_cache, slots, stride_k, stride_v, width, BLOCK: tl.constexpr):
    """One token per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    slot = tl.load(slots + token).to(tl.int64)
    tl.store(k_cache + slot * width + columns, tl.load(k + token * stride_k + columns, mask=mask), mask=mask)
    tl.store(v_cache + slot * width + columns, tl.load(v + token * stride_v + columns, mask=mask), mask=mask)


@triton.jit(do_not_specialize=_CHANGES)
def prefill(q, k_cache, v_cache, out, tiles, block_tables, stride_q, stride_table, num_heads, num_kv_heads, head_dim,
            block_size, SCALE: tl.constexpr, WINDOW: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            HEAD: tl.constexpr):
    """ROWS query tokens of one head over everything before and at them, or their windows of it."""
    tile = tl.program_id(0)
    head = tl.program_id(1)
    sequence = tl.load(tiles + tile * 4)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    num_rows = tl.load(tiles + tile * 4 + 2)
    first_place = tl.load(tiles + tile * 4 + 3)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD)
    q_mask = (rows < num_rows)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(q + (first_row + rows)[:, None] * stride_q + head * head_dim + dims[None, :], mask=q_mask,
                      other=0.0)
    places = first_place + rows
    end = first_place + tl.minimum(num_rows, ROWS)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_place - WINDOW + 1, 0)
    kv_head = head // (num_heads // num_kv_heads)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, HEAD), tl.float32)
    for start in range(begin, end, COLUMNS):
        context = start + tl.arange(0, COLUMNS)
        is_there = context < end
        block = tl.load(block_tables + sequence * stride_table + context // block_size, mask=is_there, other=0)
        row = block.to(tl.int64) * block_size + context % block_size
        place = row[:, None] * (num_kv_heads * head_dim) + kv_head * head_dim + dims[None, :]
        kv_mask = is_there[:, None] & (dims < head_dim)[None, :]
        keys = tl.load(k_cache + place, mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
        is_seen = (context[None, :] <= places[:, None]) & is_there[None, :]
        if WINDOW:
            is_seen = is_seen & (context[None, :] > places[:, None] - WINDOW)
        scores = tl.where(is_seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = new_highest
        if WINDOW:  # the last rows may see nothing of the first columns
            base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        probabilities = tl.exp(scores - base[:, None])
        fade = tl.exp(highest - base)
        total = total * fade + tl.sum(probabilities, 1)
        values = tl.load(v_cache + place, mask=kv_mask, other=0.0)
        sums = sums * fade[:, None] + tl.dot(probabilities.to(values.dtype), values, input_precision="ieee")
        highest = new_highest
    result = (sums / total[:, None]).to(out.dtype.element_ty)
    place = (first_row + rows)[:, None] * (num_heads * head_dim) + head * head_dim + dims[None, :]
    tl.store(out + place, result, mask=q_mask)


@triton.jit(do_not_specialize=_CHANGES)
def decode(q, k_cache, v_cache, parts, weights, block_tables, context_lens, stride_q, stride_table, num_heads,
           num_kv_heads, group, head_dim, block_size, num_parts, SCALE: tl.constexpr, WINDOW: tl.constexpr,
           GROUP: tl.constexpr, COLUMNS: tl.constexpr, HEAD: tl.constexpr):
    """All query heads of one kv head, one sequence, one part of its context: unscaled sum, its weight and maximum."""
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    context_len = tl.load(context_lens + sequence)
    first = 0
    if WINDOW:
        first = tl.maximum(context_len - WINDOW, 0)
    steps = tl.cdiv(tl.cdiv(context_len - first, COLUMNS), num_parts)
    begin = first + part * steps * COLUMNS
    end = tl.minimum(begin + steps * COLUMNS, context_len)
    members = tl.arange(0, GROUP)
    dims = tl.arange(0, HEAD)
    heads = kv_head * group + members
    q_mask = (members < group)[:, None] & (dims < head_dim)[None, :]
    queries = tl.load(q + sequence * stride_q + heads[:, None] * head_dim + dims[None, :], mask=q_mask, other=0.0)
    highest = tl.full((GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP,), tl.float32)
    sums = tl.zeros((GROUP, HEAD), tl.float32)
    for start in range(begin, end, COLUMNS):
        context = start + tl.arange(0, COLUMNS)
        is_there = context < end
        block = tl.load(block_tables + sequence * stride_table + context // block_size, mask=is_there, other=0)
        row = block.to(tl.int64) * block_size + context % block_size
        place = row[:, None] * (num_kv_heads * head_dim) + kv_head * head_dim + dims[None, :]
        kv_mask = is_there[:, None] & (dims < head_dim)[None, :]
        keys = tl.load(k_cache + place, mask=kv_mask, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * SCALE
        scores = tl.where(is_there[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        probabilities = tl.exp(scores - new_highest[:, None])
        fade = tl.exp(highest - new_highest)
        total = total * fade + tl.sum(probabilities, 1)
        values = tl.load(v_cache + place, mask=kv_mask, other=0.0)
        sums = sums * fade[:, None] + tl.dot(probabilities.to(values.dtype), values, input_precision="ieee")
        highest = new_highest
    row = (sequence * num_heads + heads) * num_parts + part
    tl.store(parts + row[:, None] * head_dim + dims[None, :], sums, mask=q_mask)
    tl.store(weights + row * 2, highest, mask=members < group)
    tl.store(weights + row * 2 + 1, total, mask=members < group)


@triton.jit
def combine(parts, weights, out, num_heads, head_dim, PARTS: tl.constexpr, HEAD: tl.constexpr):
    """The parts of one head, weighted by their share of the softmax. An empty part has maximum -inf and weight 0."""
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, HEAD)
    mask = dims < head_dim
    highest = tl.load(weights + (row * PARTS + part) * 2)
    totals = tl.load(weights + (row * PARTS + part) * 2 + 1)
    factors = tl.exp(highest - tl.max(highest, 0))
    values = tl.load(parts + (row * PARTS + part)[:, None] * head_dim + dims[None, :], mask=mask[None, :], other=0.0)
    result = tl.sum(values * factors[:, None], 0) / tl.sum(totals * factors, 0)
    tl.store(out + row * head_dim + dims, result.to(out.dtype.element_ty), mask=mask)
