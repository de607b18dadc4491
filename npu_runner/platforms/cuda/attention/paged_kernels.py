"""Triton kernels of paged attention: online softmax (arXiv 2205.14135), split contexts for decode (flash-decoding).

A cache row is one token's K * H values; the row of context token `t` is block_table[t // S] * S + t % S, for any block
size S. A step of a loop takes COLUMNS tokens from a multiple of COLUMNS on. If COLUMNS divides the block size, they lie
in one block, whose number is read once. Float32 inputs are multiplied without TF32; accumulators are always float32.

An e4m3 cache is multiplied in float16 where queries are bfloat16: float16 holds e4m3 exactly, and Hopper converts to it
in one instruction, but to bfloat16 only by way of float32. IS_SCALED: the cache holds keys and values divided by
`scales` (float32, of keys and of values), by which scores and accumulators are multiplied.

Softmax is in base 2: FACTOR is the scale times log2(e), above 0. It is a constant, because a float argument is float64
to inductor and would make the accumulators float64. Sizes of the model are constants for the compiler. WINDOW is the
number of tokens that a token sees, itself included, 0: all. Earlier tokens are not read: their blocks may be reused.

K kv heads, GROUP query heads of each, H (HEAD_DIM) head dim; HEAD is a power of 2 that holds it.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, prefetch

# These differ between steps: variants for values like 1 and 16 would be compiled while serving.
_CHANGES = ["stride_table", "num_parts", "table_width", "num_blocks"]
# Words of 32 bits that a program of `copy_blocks` copies in each cache.
COPIED_WORDS = 2048


@triton.jit
def write_kv(k, v, k_cache, v_cache, slots, scales, stride_k, stride_v, width, BLOCK: tl.constexpr,
             IS_SCALED: tl.constexpr):
    """One token per program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    slot = tl.load(slots + token).to(tl.int64)
    keys = tl.load(k + token * stride_k + columns, mask=mask)
    values = tl.load(v + token * stride_v + columns, mask=mask)
    kind: tl.constexpr = k_cache.dtype.element_ty
    tl.store(k_cache + slot * width + columns, to_cache_dtype(keys, kind, scales, IS_SCALED), mask=mask)
    tl.store(v_cache + slot * width + columns, to_cache_dtype(values, kind, scales + 1, IS_SCALED), mask=mask)


@triton.jit(do_not_specialize=_CHANGES)
def copy_blocks(k_cache, v_cache, pairs, num_blocks, num_words, BLOCK: tl.constexpr):
    """A part of one block of one layer per program, keys and values. `num_words`: words of 32 bits of a block."""
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    source = (layer * num_blocks + tl.load(pairs + 2 * pair)) * num_words
    target = (layer * num_blocks + tl.load(pairs + 2 * pair + 1)) * num_words
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_words
    keys = tl.load(k_cache + source + columns, mask=mask)
    values = tl.load(v_cache + source + columns, mask=mask)
    tl.store(k_cache + target + columns, keys, mask=mask)
    tl.store(v_cache + target + columns, values, mask=mask)


@triton.jit
def to_cache_dtype(values, kind: tl.constexpr, scale, IS_SCALED: tl.constexpr):
    """Values in the cache's dtype. e4m3 is rounded from float32 and saturates; NaN stays. If IS_SCALED, values are
    divided by the number at `scale` first."""
    if kind != values.dtype:
        values = values.to(tl.float32)
        if IS_SCALED:
            values = tl.div_rn(values, tl.load(scale) + tl.zeros_like(values))
        values = values.to(kind)
    return values


@triton.jit
def from_cache_dtype(tile, kind: tl.constexpr):
    """A tile of the cache in dtype `kind`; e4m3 is read as bytes."""
    if tile.dtype == tl.uint8:
        tile = tile.to(tl.float8e4nv, bitcast=True).to(kind)
    return tile


@triton.jit
def softmax_step(scores, is_seen, row_max, total, factor):
    """One step of the online softmax: probabilities, the factor of earlier accumulators, the new maximum and total.

    `is_seen` None: all are seen. `factor`: FACTOR, or a float32 number, above 0. It is part of one multiply-add per
    score; the maximum does not include it.
    """
    if is_seen is not None:
        scores = tl.where(is_seen, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    base = new_max * factor
    if is_seen is not None:  # a row may have seen nothing yet
        base = tl.where(new_max == float("-inf"), 0.0, base)
    probabilities = tl.exp2(scores * factor - base[:, None])
    rescale = tl.exp2(row_max * factor - base)
    return probabilities, rescale, new_max, total * rescale + tl.sum(probabilities, 1)


@triton.jit
def _factor(scales, FACTOR: tl.constexpr, IS_SCALED: tl.constexpr):
    """The factor of scores: FACTOR times the scale of keys."""
    factor = FACTOR
    if IS_SCALED:
        factor = FACTOR * tl.load(scales)
    return factor


@triton.jit
def _in_float16(queries, factor):
    """`queries` over a power of 2, the largest between 1 and 2, in float16, and `factor` times that power."""
    most = tl.max(tl.max(tl.abs(queries.to(tl.float32)), 1), 0)
    unit = tl.where((most > 0.0) & (most < float("inf")), tl.exp2(tl.floor(tl.log2(most))), 1.0)
    return (queries.to(tl.float32) / unit).to(tl.float16), factor * unit


@triton.jit
def load_rows(rows, is_there, dims, HEAD_DIM: tl.constexpr, LAST: tl.constexpr):
    """Loads `dims` of rows, which go up to LAST. `is_there` None: all rows. Elements that are not loaded are 0."""
    if is_there is None and HEAD_DIM >= LAST:
        tile = tl.load(rows)
    elif is_there is None:
        tile = tl.load(rows, mask=(dims < HEAD_DIM)[None, :], other=0)
    elif HEAD_DIM >= LAST:
        tile = tl.load(rows, mask=is_there[:, None], other=0)
    else:
        tile = tl.load(rows, mask=is_there[:, None] & (dims < HEAD_DIM)[None, :], other=0)
    return tile


@triton.jit
def _find_blocks(table, start, begin, end, WINDOW: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr):
    """The block number of COLUMNS context tokens from `start` on, or the number of each token's block."""
    if BLOCK_SIZE % COLUMNS == 0:
        context = start
        is_there = start < end
    else:
        context = start + tl.arange(0, COLUMNS)
        is_there = context < end
        if WINDOW:
            is_there = is_there & (context >= begin)
    return tl.load(table + context // BLOCK_SIZE, mask=is_there, other=0)


@triton.jit
def _paged_step(queries, row_max, total, acc, k_cache, v_cache, blocks, start, is_there, is_seen, dims,
                ROW: tl.constexpr, factor, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
                HEAD: tl.constexpr):
    """One step over COLUMNS context tokens in `blocks`, from `start` on; `is_there` masks loads, None: none is
    masked."""
    columns = tl.arange(0, COLUMNS)
    if BLOCK_SIZE % COLUMNS == 0:
        first = blocks.to(tl.int64) * BLOCK_SIZE + start % BLOCK_SIZE
        place = first * ROW + (columns[:, None] * ROW + dims[None, :])
    else:
        row = blocks.to(tl.int64) * BLOCK_SIZE + (start + columns) % BLOCK_SIZE
        place = row[:, None] * ROW + dims[None, :]
    keys = from_cache_dtype(load_rows(k_cache + place, is_there, dims, HEAD_DIM, HEAD), queries.dtype)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
    probabilities, rescale, row_max, total = softmax_step(scores, is_seen, row_max, total, factor)
    values = from_cache_dtype(load_rows(v_cache + place, is_there, dims, HEAD_DIM, HEAD), queries.dtype)
    acc = tl.dot(probabilities.to(values.dtype), values, acc * rescale[:, None], input_precision="ieee")
    return row_max, total, acc


@triton.jit
def _masked_step(queries, row_max, total, acc, k_cache, v_cache, blocks, start, begin, end, places, dims,
                 WINDOW: tl.constexpr, ROW: tl.constexpr, factor, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
                 COLUMNS: tl.constexpr, HEAD: tl.constexpr):
    """One masked step over tokens from `begin` to `end`. A query sees no token after its place or before its window.

    `places` None: each query sees all of them.
    """
    context = start + tl.arange(0, COLUMNS)
    is_there = context < end
    if WINDOW:
        is_there = is_there & (context >= begin)
    is_seen = is_there[None, :]
    if places is not None:
        is_seen = is_seen & (context[None, :] <= places[:, None])
        if WINDOW:
            is_seen = is_seen & (context[None, :] > places[:, None] - WINDOW)
    return _paged_step(queries, row_max, total, acc, k_cache, v_cache, blocks, start, is_there, is_seen, dims, ROW,
                       factor, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)


@triton.jit(do_not_specialize=_CHANGES)
def prefill(q, k_cache, v_cache, out, tiles, block_tables, scales, stride_q, stride_table, FACTOR: tl.constexpr,
            IS_SCALED: tl.constexpr, WINDOW: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            HEAD: tl.constexpr):
    """All query heads of one kv head, of ROWS // GROUP tokens, over the tokens up to them, or their windows.

    Only columns at the diagonal, and where a window begins, are masked. Columns after the diagonal are never visited.
    """
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles + tile * 4).to(tl.int64)
    first_row = tl.load(tiles + tile * 4 + 1).to(tl.int64)
    num_tokens = tl.minimum(tl.load(tiles + tile * 4 + 2), ROWS // GROUP)
    first_place = tl.load(tiles + tile * 4 + 3)
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD)
    tokens = rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = tokens < num_tokens
    queries = load_rows(q + (first_row + tokens)[:, None] * stride_q + (heads * HEAD_DIM)[:, None] + dims[None, :],
                        is_row, dims, HEAD_DIM, HEAD)
    table = block_tables + sequence * stride_table
    keys = k_cache + kv_head * HEAD_DIM
    values = v_cache + kv_head * HEAD_DIM
    places = first_place + tokens
    end = first_place + num_tokens
    begin = 0
    if WINDOW:
        begin = tl.maximum(first_place - WINDOW + 1, 0)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD), tl.float32)
    factor = _factor(scales, FACTOR, IS_SCALED)
    if k_cache.dtype.element_ty == tl.uint8 and queries.dtype == tl.bfloat16:
        queries, factor = _in_float16(queries, factor)
    # All rows see the columns from `whole` on and before `diagonal`. Blocks are found one step ahead: see `decode`.
    first = begin // COLUMNS * COLUMNS
    diagonal = (first_place + 1) // COLUMNS * COLUMNS
    whole = first
    blocks = _find_blocks(table, first, begin, end, WINDOW, BLOCK_SIZE, COLUMNS)
    if WINDOW:
        whole = tl.minimum(tl.cdiv(tl.maximum(end - WINDOW, 0), COLUMNS) * COLUMNS, diagonal)
        for start in range(first, whole, COLUMNS):
            next_blocks = _find_blocks(table, start + COLUMNS, begin, end, WINDOW, BLOCK_SIZE, COLUMNS)
            row_max, total, acc = _masked_step(queries, row_max, total, acc, keys, values, blocks, start, begin, end,
                                               places, dims, WINDOW, ROW, factor, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)
            blocks = next_blocks
    for start in range(whole, diagonal, COLUMNS):
        next_blocks = _find_blocks(table, start + COLUMNS, begin, end, WINDOW, BLOCK_SIZE, COLUMNS)
        row_max, total, acc = _paged_step(queries, row_max, total, acc, keys, values, blocks, start, None, None, dims,
                                          ROW, factor, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)
        blocks = next_blocks
    for start in range(diagonal, end, COLUMNS):
        next_blocks = _find_blocks(table, start + COLUMNS, begin, end, WINDOW, BLOCK_SIZE, COLUMNS)
        row_max, total, acc = _masked_step(queries, row_max, total, acc, keys, values, blocks, start, begin, end,
                                           places, dims, WINDOW, ROW, factor, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)
        blocks = next_blocks
    if IS_SCALED:
        acc *= tl.load(scales + 1)
    place = ((first_row + tokens) * (NUM_KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(out + place, (acc / total[:, None]).to(out.dtype.element_ty),
             mask=is_row[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit(do_not_specialize=_CHANGES)
def decode(q, k_cache, v_cache, out, parts, weights, block_tables, context_lens, scales, stride_q, stride_table,
           table_width, num_blocks, num_parts, FACTOR: tl.constexpr, IS_SCALED: tl.constexpr, WINDOW: tl.constexpr,
           NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
           ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEAD: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """All query heads of one kv head, one sequence, one part of its context; kv heads of a sequence are neighbours.

    With one part the result is stored in `out`. With more, the part's accumulators are stored in `parts`, its maximum
    (times FACTOR) and total in `weights`, for `combine`. An empty part stores no accumulators. ROWS is at least GROUP,
    and the least rows of an MMA.
    """
    ROW: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    kv_head = tl.program_id(0)
    part = tl.program_id(1)
    sequence = tl.program_id(2).to(tl.int64)
    table = block_tables + sequence * stride_table
    if IS_DEPENDENT:
        _prefetch_first_step(table, table_width, num_blocks, context_lens + sequence, part, num_parts,
                             k_cache + kv_head * HEAD_DIM, v_cache + kv_head * HEAD_DIM, WINDOW, ROW, BLOCK_SIZE,
                             COLUMNS, HEAD)
    after_earlier_kernels(IS_DEPENDENT)
    first, begin, end = _range_of(tl.load(context_lens + sequence), part, num_parts, WINDOW, COLUMNS)
    members = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD)
    is_member = members < GROUP
    heads = kv_head * GROUP + members
    queries = load_rows(q + sequence * stride_q + (heads * HEAD_DIM)[:, None] + dims[None, :], is_member, dims,
                        HEAD_DIM, HEAD)
    keys = k_cache + kv_head * HEAD_DIM
    values = v_cache + kv_head * HEAD_DIM
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, HEAD), tl.float32)
    factor = _factor(scales, FACTOR, IS_SCALED)
    if k_cache.dtype.element_ty == tl.uint8 and queries.dtype == tl.bfloat16:
        queries, factor = _in_float16(queries, factor)
    # All steps are masked: a separate step for the rest of a context would wait for memory once more. Blocks are found
    # one step ahead: otherwise the compiler could not prefetch keys and values.
    blocks = _find_blocks(table, begin, first, end, WINDOW, BLOCK_SIZE, COLUMNS)
    for start in range(begin, end, COLUMNS):
        next_blocks = _find_blocks(table, start + COLUMNS, first, end, WINDOW, BLOCK_SIZE, COLUMNS)
        row_max, total, acc = _masked_step(queries, row_max, total, acc, keys, values, blocks, start, first, end,
                                           None, dims, WINDOW, ROW, factor, HEAD_DIM, BLOCK_SIZE, COLUMNS, HEAD)
        blocks = next_blocks
    if IS_SCALED:
        acc *= tl.load(scales + 1)
    row = sequence * (NUM_KV_HEADS * GROUP) + heads
    mask = is_member[:, None] & (dims < HEAD_DIM)[None, :]
    if num_parts == 1:
        tl.store(out + row[:, None] * HEAD_DIM + dims[None, :], (acc / total[:, None]).to(out.dtype.element_ty),
                 mask=mask)
    else:
        row = row * num_parts + part
        tl.store(parts + row[:, None] * HEAD_DIM + dims[None, :], acc, mask=mask & (begin < end))
        tl.store(weights + row * 2, row_max * factor, mask=is_member)
        tl.store(weights + row * 2 + 1, total, mask=is_member)


@triton.jit
def _range_of(context_len, part, num_parts, WINDOW: tl.constexpr, COLUMNS: tl.constexpr):
    """The first context token that a sequence reads, and the range of a part."""
    first = 0
    if WINDOW:
        first = tl.maximum(context_len - WINDOW, 0)
    aligned = first // COLUMNS * COLUMNS
    steps = tl.cdiv(tl.cdiv(context_len - aligned, COLUMNS), num_parts)
    begin = aligned + part * steps * COLUMNS
    return first, begin, tl.minimum(begin + steps * COLUMNS, context_len)


@triton.jit
def _prefetch_first_step(table, table_width, num_blocks, context_len, part, num_parts, k_cache, v_cache,
                         WINDOW: tl.constexpr, ROW: tl.constexpr, BLOCK_SIZE: tl.constexpr, COLUMNS: tl.constexpr,
                         HEAD: tl.constexpr):
    """Prefetches keys and values of a part's first step. An earlier kernel may still write what this reads: lengths and
    block numbers may be anything then, and all of it is read again."""
    first, begin, end = _range_of(tl.load(context_len, cache_modifier=".cg"), part, num_parts, WINDOW, COLUMNS)
    end = tl.minimum(end, table_width * BLOCK_SIZE)
    if (begin >= 0) & (begin < end):
        LINE: tl.constexpr = 128 // (k_cache.dtype.element_ty.primitive_bitwidth // 8)
        LINES: tl.constexpr = HEAD // LINE if HEAD > LINE else 1
        tokens = tl.minimum(tl.maximum(begin + tl.arange(0, COLUMNS), first), end - 1)
        blocks = tl.load(table + tokens // BLOCK_SIZE, cache_modifier=".cg")
        blocks = tl.minimum(tl.maximum(blocks, 0), num_blocks - 1).to(tl.int64)
        places = (blocks * BLOCK_SIZE + tokens % BLOCK_SIZE) * ROW
        lines = places[:, None] + tl.arange(0, LINES)[None, :] * LINE
        prefetch(k_cache + lines)
        prefetch(v_cache + lines)


@triton.jit
def combine(parts, weights, out, num_heads, head_dim, PARTS: tl.constexpr, HEAD: tl.constexpr,
            IS_DEPENDENT: tl.constexpr):
    """Adds the parts of one head, weighted by their share of the softmax. An empty part has maximum -inf and weight
    0."""
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * num_heads + tl.program_id(1)
    part = tl.arange(0, PARTS)
    dims = tl.arange(0, HEAD)
    mask = dims < head_dim
    row_max = tl.load(weights + (row * PARTS + part) * 2)
    totals = tl.load(weights + (row * PARTS + part) * 2 + 1)
    factors = tl.exp2(row_max - tl.max(row_max, 0))
    values = tl.load(parts + (row * PARTS + part)[:, None] * head_dim + dims[None, :],
                     mask=mask[None, :] & (totals > 0)[:, None], other=0.0)
    result = tl.sum(values * factors[:, None], 0) / tl.sum(totals * factors, 0)
    tl.store(out + row * head_dim + dims, result.to(out.dtype.element_ty), mask=mask)
