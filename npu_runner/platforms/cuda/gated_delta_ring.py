"""Triton kernel of the gated delta rule's step beside a ring: a state is read by every step and written by few.

A ring holds what h tokens since the last write have changed: token j has added u_j k_j^T, and g_j is its log decay.
With G_j the sum of the log decays behind token j, this step's included, the state S of before is now
    S exp(g_0 + G_0) + sum over j of exp(G_j) u_j k_j^T,
a product of (Dv, h) and (h, Dk), and this step goes on from there as every other. Its own u and k go into the ring.
The step that finds a ring of LENGTH - 1 tokens writes the state instead. Keys are kept as the model has them; u_j holds
their norm.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.gated_delta_kernels import _L2_EPS, _beta, _log_decay

# Matrix units take no fewer.
_LEAST_TOKENS = tl.constexpr(16)


@triton.jit
def delta_step_in_ring(qkv, a, b, neg_exp_A, dt_bias, state, updates, ring_keys, log_decays, starts, out, state_slots,
                       context_lens, stride_qkv, stride_a, stride_b, stride_slot, num_k_heads, num_v_heads, head_k_dim,
                       head_v_dim, SCALE: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr, LENGTH: tl.constexpr,
                       PRODUCT: tl.constexpr, IS_WHOLE: tl.constexpr):
    """One token of a sequence and v head; VALUES rows of its state (Dv, Dk). IS_WHOLE: KEYS and VALUES divide the dims.

    As delta_step, the state is asked for first, and does not stay in the cache.
    """
    TOKENS: tl.constexpr = LENGTH if LENGTH > _LEAST_TOKENS else _LEAST_TOKENS
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
    # In [0, LENGTH) for any numbers: made-up steps have lengths that no prompt led to.
    filled = (tl.load(context_lens + row).to(tl.int32) - 1 - tl.load(starts + slot)) & (LENGTH - 1)
    group = num_v_heads // num_k_heads
    k_head = head // group
    q_place = qkv + row * stride_qkv + k_head * head_k_dim + keys
    q = tl.load(q_place, mask=is_key, other=0.0).to(tl.float32)
    own_key = tl.load(q_place + num_k_heads * head_k_dim, mask=is_key, other=0.0)
    v_place = qkv + row * stride_qkv + 2 * num_k_heads * head_k_dim + head * head_v_dim + values
    v = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)
    beta = _beta(tl.load(b + row * stride_b + head))
    g = _log_decay(tl.load(a + row * stride_a + head), tl.load(neg_exp_A + head), tl.load(dt_bias + head))

    update_place = updates + (slot * LENGTH * num_v_heads + head) * head_v_dim + values
    key_place = ring_keys + (slot * LENGTH * num_k_heads + k_head) * head_k_dim + keys
    decay_place = log_decays + (slot * num_v_heads + head) * LENGTH
    tokens = tl.arange(0, TOKENS)
    is_there = tokens < filled
    decays = tl.load(decay_place + tokens, mask=is_there, other=0.0)
    u = tl.load(update_place[:, None] + tokens[None, :] * (num_v_heads * head_v_dim),
                mask=is_value[:, None] & is_there[None, :], other=0.0)
    u_keys = tl.load(key_place[None, :] + tokens[:, None] * (num_k_heads * head_k_dim),
                     mask=is_there[:, None] & is_key[None, :], other=0.0)
    # Summed from the next token on, as in chunk_products.
    behind = g + tl.sum(tl.where(tokens[:, None] > tokens[None, :], decays[:, None], 0.0), 0)
    s = _plus_product(s * tl.exp(g + tl.sum(decays, 0)), u * tl.exp(behind)[None, :], u_keys, PRODUCT)

    q = q * (tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * SCALE)
    k = own_key.to(tl.float32)
    k_norm = tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
    k = k * k_norm
    change = (v - tl.sum(s * k[None, :], 1)) * beta
    s += change[:, None] * k[None, :]
    result = tl.sum(s * q[None, :], 1).to(out.dtype.element_ty)
    tl.store(out + (row * num_v_heads + head) * head_v_dim + values, result, mask=is_value)
    if filled == LENGTH - 1:
        tl.store(place, s, mask=mask, eviction_policy="evict_first")
    else:
        tl.store(update_place + filled * (num_v_heads * head_v_dim), change * k_norm, mask=is_value)
        if tl.program_id(0) == 0:
            tl.store(decay_place + filled, g)
            if head % group == 0:
                tl.store(key_place + filled * (num_k_heads * head_k_dim), own_key, mask=is_key)


@triton.jit
def _plus_product(s, x, y, PRODUCT: tl.constexpr):
    """s + x y, where x is float32 and y as the model has it."""
    if PRODUCT == "split":
        high = x.to(tl.bfloat16)
        return tl.dot(high, y, tl.dot((x - high.to(tl.float32)).to(tl.bfloat16), y, s))
    else:
        return tl.dot(x, y.to(tl.float32), s, input_precision=PRODUCT)
