"""Triton kernels of the gated delta rule's steps with a ring: every step reads a state, and few steps write it.

A ring holds what h tokens since the last write have changed: token j has added u_j k_j^T, and g_j is its log decay.
With G_j the sum of the log decays behind token j, the state S of that write is now
    S exp(g_0 + G_0) + sum over j of exp(G_j) u_j k_j^T,
a matmul of (Dv, h) and (h, Dk), which an MMA of 16 tokens computes at once: a loop over the tokens would wait for the
load of each. A step's tokens continue from there, one after the other, and their own u and k go into the ring. Keys
have the model's dtype; u_j holds their norm.

The token at position p is in cell p modulo PLACES. A step of one token that finds LENGTH - 1 tokens in the ring writes
the state instead. A step with drafts does not know which of its tokens will be accepted. Where the ring has no room for
all of them, it writes the state before its tokens, which then start the ring anew. No program writes to a cell that
another one may still read.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels
from npu_runner.platforms.cuda.gated_delta.kernels import _L2_EPS, _beta, _log_decay, _modulo

# The least K of an MMA.
_LEAST_TOKENS = 16


def tokens_in_mma(length: int) -> int:
    """The tokens of a ring of this length, padded for MMAs."""
    return max(_LEAST_TOKENS, triton.next_power_of_2(length))


@triton.jit
def delta_step_in_ring(qkv, a, b, neg_exp_A, dt_bias, state, updates, ring_keys, log_decays, starts, out, state_slots,
                       context_lens, stride_qkv, stride_a, stride_b, stride_slot, num_k_heads, num_v_heads, head_k_dim,
                       head_v_dim, SCALE: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr, LENGTH: tl.constexpr,
                       PLACES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr, IS_WHOLE: tl.constexpr,
                       IS_DEPENDENT: tl.constexpr):
    """One token of a sequence and v head; VALUES rows of its state (Dv, Dk). IS_WHOLE: KEYS and VALUES divide the dims.

    As in delta_step, the state is loaded first, and is not kept in the cache. This kernel waits before it reads `qkv`:
    `convolve_step`, which writes it, lets this kernel start when all kernels before are complete. So a step must follow
    its convolution directly.
    """
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(state_slots + row).to(tl.int64)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < head_k_dim, values < head_v_dim
    place = state + slot * stride_slot + (head * head_v_dim + values)[:, None] * head_k_dim + keys[None, :]
    mask = is_value[:, None] & is_key[None, :]
    if IS_WHOLE:
        s = tl.load(place, eviction_policy="evict_first")
    else:
        s = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
    position = tl.load(context_lens + row).to(tl.int32) - 1
    # In [0, LENGTH) for any numbers: dummy steps have lengths that no prompt led to.
    filled = _modulo(position - tl.load(starts + slot), LENGTH)
    group = num_v_heads // num_k_heads
    k_head = head // group
    beta = _beta(tl.load(b + row * stride_b + head))
    g = _log_decay(tl.load(a + row * stride_a + head), tl.load(neg_exp_A + head), tl.load(dt_bias + head))
    wait_for_earlier_kernels(IS_DEPENDENT)
    q_place = qkv + row * stride_qkv + k_head * head_k_dim + keys
    q = tl.load(q_place, mask=is_key, other=0.0).to(tl.float32)
    own_key = tl.load(q_place + num_k_heads * head_k_dim, mask=is_key, other=0.0)
    v_place = qkv + row * stride_qkv + 2 * num_k_heads * head_k_dim + head * head_v_dim + values
    v = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)

    update_place = updates + (slot * PLACES * num_v_heads + head) * head_v_dim + values
    key_place = ring_keys + (slot * PLACES * num_k_heads + k_head) * head_k_dim + keys
    decay_place = log_decays + (slot * num_v_heads + head) * PLACES
    s = _with_ring(s, g, update_place, key_place, decay_place, position, filled, is_key, is_value, num_k_heads,
                   num_v_heads, head_k_dim, head_v_dim, PLACES, TOKENS, PRECISION)

    q = q * (tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * SCALE)
    k = own_key.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
    k = k * k_norm
    change = (v - tl.sum(s * k[None, :], 1)) * beta
    s += change[:, None] * k[None, :]
    result = tl.sum(s * q[None, :], 1).to(out.dtype.element_ty)
    let_next_kernel_start(IS_DEPENDENT)
    tl.store(out + (row * num_v_heads + head) * head_v_dim + values, result, mask=is_value)
    if filled == LENGTH - 1:
        tl.store(place, s, mask=mask, eviction_policy="evict_first")
    else:
        own = _modulo(position, PLACES)
        tl.store(update_place + own * (num_v_heads * head_v_dim), change * k_norm, mask=is_value)
        if tl.program_id(0) == 0:
            tl.store(decay_place + own, g)
            if head % group == 0:
                tl.store(key_place + own * (num_k_heads * head_k_dim), own_key, mask=is_key)


@triton.jit
def delta_run_in_ring(qkv, a, b, neg_exp_A, dt_bias, state, updates, ring_keys, log_decays, out, state_slots,
                      context_lens, runs, fillings, stride_qkv, stride_a, stride_b, stride_slot, num_k_heads,
                      num_v_heads, head_k_dim, head_v_dim, SCALE: tl.constexpr, VALUES: tl.constexpr,
                      KEYS: tl.constexpr, PLACES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr,
                      IS_WHOLE: tl.constexpr):
    """All tokens of a sequence in a step with drafts: the state and its ring are read once.

    `runs` has the number of a sequence's tokens at its first one, and minus its index at each other one
    (StepInputs.runs). Programs of these others end at once, so that the grid depends only on the number of tokens.
    `fillings` has the result of `plan_runs` at a sequence's first token.
    """
    first = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    num_tokens = tl.load(runs + first)
    if num_tokens > 0:
        slot = tl.load(state_slots + first).to(tl.int64)
        keys = tl.arange(0, KEYS)
        values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
        is_key, is_value = keys < head_k_dim, values < head_v_dim
        place = state + slot * stride_slot + (head * head_v_dim + values)[:, None] * head_k_dim + keys[None, :]
        mask = is_value[:, None] & is_key[None, :]
        if IS_WHOLE:
            s = tl.load(place, eviction_policy="evict_first")
        else:
            s = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
        position = tl.load(context_lens + first).to(tl.int32) - 1
        filling = tl.load(fillings + first)
        is_written = filling < 0
        filled = tl.where(is_written, -1 - filling, filling)
        group = num_v_heads // num_k_heads
        k_head = head // group
        update_place = updates + (slot * PLACES * num_v_heads + head) * head_v_dim + values
        key_place = ring_keys + (slot * PLACES * num_k_heads + k_head) * head_k_dim + keys
        decay_place = log_decays + (slot * num_v_heads + head) * PLACES
        s = _with_ring(s, 0.0, update_place, key_place, decay_place, position, filled, is_key, is_value, num_k_heads,
                       num_v_heads, head_k_dim, head_v_dim, PLACES, TOKENS, PRECISION)
        if is_written:
            tl.store(place, s, mask=mask, eviction_policy="evict_first")
        for index in range(num_tokens):
            token = first + index
            q_place = qkv + token * stride_qkv + k_head * head_k_dim + keys
            q = tl.load(q_place, mask=is_key, other=0.0).to(tl.float32)
            own_key = tl.load(q_place + num_k_heads * head_k_dim, mask=is_key, other=0.0)
            v_place = qkv + token * stride_qkv + 2 * num_k_heads * head_k_dim + head * head_v_dim + values
            v = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)
            beta = _beta(tl.load(b + token * stride_b + head))
            g = _log_decay(tl.load(a + token * stride_a + head), tl.load(neg_exp_A + head), tl.load(dt_bias + head))
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * SCALE)
            k = own_key.to(tl.float32)
            k_norm = tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
            k = k * k_norm
            s = s * tl.exp(g)
            change = (v - tl.sum(s * k[None, :], 1)) * beta
            s += change[:, None] * k[None, :]
            result = tl.sum(s * q[None, :], 1).to(out.dtype.element_ty)
            tl.store(out + (token * num_v_heads + head) * head_v_dim + values, result, mask=is_value)
            own = _modulo(position + index, PLACES)
            tl.store(update_place + own * (num_v_heads * head_v_dim), change * k_norm, mask=is_value)
            if tl.program_id(0) == 0:
                tl.store(decay_place + own, g)
                if head % group == 0:
                    tl.store(key_place + own * (num_k_heads * head_k_dim), own_key, mask=is_key)


@triton.jit
def plan_runs(runs, state_slots, context_lens, starts, fillings, num_tokens, LENGTH: tl.constexpr, SIZE: tl.constexpr):
    """The number h of tokens in the ring of each sequence; -1 - h where it has no room for the sequence's tokens and
    one more. Then this step writes the state, and the ring starts anew."""
    tokens = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    is_token = tokens < num_tokens
    run = tl.load(runs + tokens, mask=is_token, other=0)
    is_first = run > 0
    start_place = starts + tl.load(state_slots + tokens, mask=is_first, other=0)
    position = tl.load(context_lens + tokens, mask=is_first, other=1).to(tl.int32) - 1
    filled = _modulo(position - tl.load(start_place, mask=is_first, other=0), LENGTH)
    is_written = is_first & (filled + run >= LENGTH)
    tl.store(fillings + tokens, tl.where(is_written, -1 - filled, filled), mask=is_first)
    tl.store(start_place, position, mask=is_written)


@triton.jit
def _with_ring(s, g, update_place, key_place, decay_place, position, filled, is_key, is_value, num_k_heads, num_v_heads,
               head_k_dim, head_v_dim, PLACES: tl.constexpr, TOKENS: tl.constexpr, PRECISION: tl.constexpr):
    """The state before the token at `position`, with the `filled` tokens before it, all decayed by `g` once more."""
    tokens = tl.arange(0, TOKENS)
    is_there = tokens < filled
    places = _modulo(position - filled, PLACES) + tokens
    places = tl.where(places < PLACES, places, places - PLACES)
    decays = tl.load(decay_place + places, mask=is_there, other=0.0)
    u = tl.load(update_place[:, None] + places[None, :] * (num_v_heads * head_v_dim),
                mask=is_value[:, None] & is_there[None, :], other=0.0)
    u_keys = tl.load(key_place[None, :] + places[:, None] * (num_k_heads * head_k_dim),
                     mask=is_there[:, None] & is_key[None, :], other=0.0)
    # Summed from the next token on, as in chunk_matrices.
    behind = g + tl.sum(tl.where(tokens[:, None] > tokens[None, :], decays[:, None], 0.0), 0)
    return _plus_matmul(s * tl.exp(g + tl.sum(decays, 0)), u * tl.exp(behind)[None, :], u_keys, PRECISION)


@triton.jit
def _plus_matmul(s, x, y, PRECISION: tl.constexpr):
    """s + x y, where x is float32 and y has the model's dtype."""
    if PRECISION == "split":
        high = x.to(tl.bfloat16)
        return tl.dot(high, y, tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), y, s))
    else:
        return tl.dot(x, y.to(tl.float32), s, input_precision=PRECISION)
