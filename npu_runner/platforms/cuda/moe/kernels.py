"""Triton kernels of a mixture of experts: routing, sorting pairs by expert, and the experts' GEMMs.

A pair is one token and one of its K experts, numbered token * K + place. Pairs of one expert lie together in blocks of
`block_size` (BLOCK_M), the last of them shorter. A block belongs to one expert, so its GEMM reads one expert's weights.
The host never waits: everything depends on tensors alone. There are as many programs as the worst routing needs, and
those without rows end at once. A rank may hold some experts only, `num_experts` of them from `first_expert` on. Pairs
routed to other ranks get no tile and are skipped in the sum. HOLDS_ALL: this rank holds all experts.

T tokens, K experts a token, E experts, D hidden size, I width of an expert, P pairs.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, wait_for_earlier_kernels

# These differ between steps: variants for values like 1 and 16 would be compiled while serving.
_CHANGES = ["num_pairs", "most_blocks", "block_size"]


@triton.jit
def route(logits, weights, experts, stride, num_experts, RENORMALISE: tl.constexpr, TOP_K: tl.constexpr,
          EXPERTS: tl.constexpr, PLACES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One token: the TOP_K largest of a float32 softmax; of equal ones the first."""
    after_earlier_kernels(IS_DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, EXPERTS)
    places = tl.arange(0, PLACES)
    x = tl.load(logits + token * stride + columns, mask=columns < num_experts, other=float("-inf")).to(tl.float32)
    exponentials = tl.exp(x - tl.max(x, 0))
    total = tl.sum(exponentials, 0)
    left = tl.where(columns < num_experts, exponentials / total, -1.0)
    chosen_weights = tl.zeros((PLACES,), tl.float32)
    chosen = tl.zeros((PLACES,), tl.int32)
    for place in range(TOP_K):
        largest = tl.max(left, 0)
        # NaN equals nothing: then it is the last expert, and never one that does not exist.
        best = tl.minimum(tl.min(tl.where(left == largest, columns, EXPERTS), 0), num_experts - 1)
        chosen_weights = tl.where(places == place, largest, chosen_weights)
        chosen = tl.where(places == place, best, chosen)
        left = tl.where(columns == best, -1.0, left)
    if RENORMALISE:
        chosen_weights = chosen_weights / tl.sum(chosen_weights, 0)
    chosen_weights = tl.where(total == total, chosen_weights, float("nan"))  # maxima ignore NaN
    row = token * TOP_K + places
    tl.store(weights + row, chosen_weights.to(weights.dtype.element_ty), mask=places < TOP_K)
    tl.store(experts + row, chosen, mask=places < TOP_K)


@triton.jit(do_not_specialize=_CHANGES)
def sort_few(experts, counts, starts, ranks, order, block_experts, block_rows, num_pairs, num_experts, most_blocks,
             block_size, first_expert, EXPERTS: tl.constexpr, PAIRS: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """count_pairs, lay_out_blocks and place_pairs in one program, which is one launch for a decode step."""
    after_earlier_kernels(IS_DEPENDENT)
    ids = tl.arange(0, EXPERTS)
    tl.store(counts + ids, tl.zeros((EXPERTS,), tl.int32), mask=ids < num_experts)
    tl.debug_barrier()
    for first in range(0, num_pairs, PAIRS):
        _count(experts, counts, ranks, first, num_pairs, first_expert, num_experts, PAIRS)
    tl.debug_barrier()
    _lay_out(counts, starts, block_experts, block_rows, num_experts, most_blocks, block_size, EXPERTS)
    tl.debug_barrier()
    for first in range(0, num_pairs, PAIRS):
        _place(experts, starts, ranks, order, first, num_pairs, block_size, first_expert, num_experts, PAIRS)


@triton.jit(do_not_specialize=_CHANGES)
def count_pairs(experts, counts, ranks, num_pairs, first_expert, num_experts, PAIRS: tl.constexpr):
    """`counts` starts at 0."""
    _count(experts, counts, ranks, tl.program_id(0) * PAIRS, num_pairs, first_expert, num_experts, PAIRS)


@triton.jit(do_not_specialize=_CHANGES)
def lay_out_blocks(counts, starts, block_experts, block_rows, num_experts, most_blocks, block_size,
                   EXPERTS: tl.constexpr):
    """Runs as one program."""
    _lay_out(counts, starts, block_experts, block_rows, num_experts, most_blocks, block_size, EXPERTS)


@triton.jit(do_not_specialize=_CHANGES)
def place_pairs(experts, starts, ranks, order, num_pairs, block_size, first_expert, num_experts, PAIRS: tl.constexpr):
    _place(experts, starts, ranks, order, tl.program_id(0) * PAIRS, num_pairs, block_size, first_expert, num_experts,
           PAIRS)


@triton.jit
def gate_up(x, weights, order, block_experts, block_rows, first_expert, num_experts, hidden, stride_x, top_k, K, width,
            IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
            BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """silu(x gate^T) * (x up^T) of one block's pairs and BLOCK_N of I. weights (E, 2I, D), hidden (P, I)."""
    _wait(IS_SORTED, IS_DEPENDENT)
    num_tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_tiles
    expert, num_rows = _expert_of(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, BLOCK_M)
    offs_n = (tl.program_id(0) % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = x + (pairs // top_k).to(tl.int64)[:, None] * stride_x + offs_k[None, :]
    # Columns behind the last one read other weights, and are not stored.
    first = weights + expert * (2 * width) * K + (offs_n % width)[None, :] * K + offs_k[:, None]
    second = first + width * K
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = _load(rows + start, (offs_k < K - start)[None, :], IS_EVEN)
        gate = tl.dot(inputs, _load(first + start, (offs_k < K - start)[:, None], IS_EVEN), gate,
                      input_precision="ieee")
        up = tl.dot(inputs, _load(second + start, (offs_k < K - start)[:, None], IS_EVEN), up,
                    input_precision="ieee")
    dtype = hidden.dtype.element_ty
    gate = gate.to(dtype).to(tl.float32)
    result = (gate / (1.0 + tl.exp(-gate))).to(dtype) * up.to(dtype)
    place = hidden + pairs.to(tl.int64)[:, None] * width + offs_n[None, :]
    tl.store(place, result, mask=is_row[:, None] & (offs_n < width)[None, :])


@triton.jit
def down(hidden, weights, order, block_experts, block_rows, first_expert, num_experts, out, K, width,
         IS_SORTED: tl.constexpr, HOLDS_ALL: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_M: tl.constexpr,
         BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """hidden down^T of one block's pairs and BLOCK_N of D = `width`. weights (E, D, I), out (P, D)."""
    _wait(IS_SORTED, IS_DEPENDENT)
    num_tiles = tl.cdiv(width, BLOCK_N)
    block = tl.program_id(0) // num_tiles
    expert, num_rows = _expert_of(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED, HOLDS_ALL)
    if num_rows == 0:
        return
    pairs, is_row = _pairs_of(block, order, num_rows, IS_SORTED, BLOCK_M)
    offs_n = (tl.program_id(0) % num_tiles) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    rows = hidden + pairs.to(tl.int64)[:, None] * K + offs_k[None, :]
    place = weights + expert * width * K + (offs_n % width)[None, :] * K + offs_k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        inputs = _load(rows + start, (offs_k < K - start)[None, :], IS_EVEN)
        total = tl.dot(inputs, _load(place + start, (offs_k < K - start)[:, None], IS_EVEN), total,
                       input_precision="ieee")
    place = out + pairs.to(tl.int64)[:, None] * width + offs_n[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=is_row[:, None] & (offs_n < width)[None, :])


@triton.jit
def combine(pair_outputs, weights, experts, out, first_expert, num_experts, width, TOP_K: tl.constexpr,
            HOLDS_ALL: tl.constexpr, BLOCK_N: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One token: the sum of its experts' outputs by weight, in float32."""
    after_earlier_kernels(IS_DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_N,), tl.float32)
    for place in tl.static_range(TOP_K):
        pair = token * TOP_K + place
        mask = offs_n < width
        if not HOLDS_ALL:  # nothing was written for the others
            mask = mask & _is_here(tl.load(experts + pair) - first_expert, num_experts)
        values = tl.load(pair_outputs + pair * width + offs_n, mask=mask, other=0.0).to(tl.float32)
        total += values * tl.load(weights + pair).to(tl.float32)
    tl.store(out + token * width + offs_n, total.to(out.dtype.element_ty), mask=offs_n < width)


@triton.jit
def _wait(IS_SORTED: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The programs of sorted pairs may be more than run at once: see `wait_for_earlier_kernels`."""
    if IS_SORTED:
        wait_for_earlier_kernels(IS_DEPENDENT)
    else:
        after_earlier_kernels(IS_DEPENDENT)


@triton.jit
def _is_here(expert, num_experts):
    """`expert` counts from this rank's first expert."""
    return (expert >= 0) & (expert < num_experts)


@triton.jit
def _count(experts, counts, ranks, first, num_pairs, first_expert, num_experts, PAIRS: tl.constexpr):
    """Numbers each expert's pairs. The order varies, and no result depends on it."""
    pairs = first + tl.arange(0, PAIRS)
    mask = pairs < num_pairs
    expert = tl.load(experts + pairs, mask=mask, other=0) - first_expert
    mask = mask & _is_here(expert, num_experts)
    tl.store(ranks + pairs, tl.atomic_add(counts + expert, 1, mask=mask), mask=mask)


@triton.jit
def _lay_out(counts, starts, block_experts, block_rows, num_experts, most_blocks, block_size, EXPERTS: tl.constexpr):
    """The first block of each expert, and each block's expert and number of rows, which is 0 for unused blocks."""
    ids = tl.arange(0, EXPERTS)
    count = tl.load(counts + ids, mask=ids < num_experts, other=0)
    num_blocks = tl.cdiv(count, block_size)
    start = tl.cumsum(num_blocks, 0) - num_blocks
    tl.store(starts + ids, start, mask=ids < num_experts)
    for index in range(tl.max(num_blocks, 0)):
        mask = index < num_blocks
        tl.store(block_experts + start + index, ids, mask=mask)
        tl.store(block_rows + start + index, tl.minimum(count - index * block_size, block_size), mask=mask)
    for first in range(tl.sum(num_blocks, 0), most_blocks, EXPERTS):
        tl.store(block_rows + first + ids, tl.zeros((EXPERTS,), tl.int32), mask=first + ids < most_blocks)


@triton.jit
def _place(experts, starts, ranks, order, first, num_pairs, block_size, first_expert, num_experts, PAIRS: tl.constexpr):
    pairs = first + tl.arange(0, PAIRS)
    mask = pairs < num_pairs
    expert = tl.load(experts + pairs, mask=mask, other=0) - first_expert
    mask = mask & _is_here(expert, num_experts)
    start = tl.load(starts + expert, mask=mask, other=0)
    tl.store(order + start * block_size + tl.load(ranks + pairs, mask=mask, other=0), pairs, mask=mask)


@triton.jit
def _expert_of(block, block_experts, block_rows, first_expert, num_experts, IS_SORTED: tl.constexpr,
               HOLDS_ALL: tl.constexpr):
    """A block's expert, counted from this rank's first one, and its number of rows. Each unsorted pair is a block of
    its own, without rows if this rank does not hold its expert."""
    expert = tl.load(block_experts + block).to(tl.int64)
    if IS_SORTED:
        num_rows = tl.load(block_rows + block)
    elif HOLDS_ALL:
        num_rows = 1
    else:
        expert -= first_expert
        num_rows = _is_here(expert, num_experts).to(tl.int32)
    return expert, num_rows


@triton.jit
def _pairs_of(block, order, num_rows, IS_SORTED: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pairs of a block, and which of them are real; the others repeat pair 0."""
    members = tl.arange(0, BLOCK_M)
    is_row = members < num_rows
    if IS_SORTED:
        return tl.load(order + block * BLOCK_M + members, mask=is_row, other=0), is_row
    else:
        return members * 0 + block, is_row


@triton.jit
def _load(place, mask, IS_EVEN: tl.constexpr):
    if IS_EVEN:
        return tl.load(place)
    else:
        return tl.load(place, mask=mask, other=0.0)
