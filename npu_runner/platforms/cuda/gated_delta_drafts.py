"""Triton kernels of Gated DeltaNet for decode steps with drafts: the tokens of a sequence one after the other.

Each token leaves its state in its own slot; that of a sequence's first token is where the sequence goes on from.
`runs` has the number of a sequence's tokens at its first one, and at each other one minus its place among them
(StepInputs.runs). Programs of these others end at once, so that a grid depends on the number of tokens alone.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.gated_delta_kernels import _L2_EPS, _beta, _log_decay, _silu


@triton.jit
def delta_run(qkv, a, b, neg_exp_A, dt_bias, state, out, state_slots, runs, stride_qkv, stride_a, stride_b, stride_slot,
              num_k_heads, num_v_heads, head_k_dim, head_v_dim, SCALE: tl.constexpr, VALUES: tl.constexpr,
              KEYS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """`delta_step` (gated_delta_kernels) for all tokens of a sequence: the state is read once, and written for each."""
    first = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    num_tokens = tl.load(runs + first)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < head_k_dim, values < head_v_dim
    part = (head * head_v_dim + values)[:, None] * head_k_dim + keys[None, :]
    mask = is_value[:, None] & is_key[None, :]
    k_head = head // (num_v_heads // num_k_heads)
    if num_tokens > 0:
        place = state + tl.load(state_slots + first).to(tl.int64) * stride_slot + part
        if IS_WHOLE:
            s = tl.load(place, eviction_policy="evict_first")
        else:
            s = tl.load(place, mask=mask, other=0.0, eviction_policy="evict_first")
        for token in range(first, first + num_tokens):
            q_place = qkv + token * stride_qkv + k_head * head_k_dim + keys
            q = tl.load(q_place, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(q_place + num_k_heads * head_k_dim, mask=is_key, other=0.0).to(tl.float32)
            v_place = qkv + token * stride_qkv + 2 * num_k_heads * head_k_dim + head * head_v_dim + values
            v = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)
            q = q * (tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * SCALE)
            k = k * tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
            beta = _beta(tl.load(b + token * stride_b + head))
            g = _log_decay(tl.load(a + token * stride_a + head), tl.load(neg_exp_A + head), tl.load(dt_bias + head))
            s = s * tl.exp(g)
            change = (v - tl.sum(s * k[None, :], 1)) * beta
            s += change[:, None] * k[None, :]
            own = state + tl.load(state_slots + token).to(tl.int64) * stride_slot + part
            if IS_WHOLE:
                tl.store(own, s, eviction_policy="evict_first")
            else:
                tl.store(own, s, mask=mask, eviction_policy="evict_first")
            result = tl.sum(s * q[None, :], 1).to(out.dtype.element_ty)
            tl.store(out + (token * num_v_heads + head) * head_v_dim + values, result, mask=is_value)


@triton.jit
def convolve_run(x, weight, conv_state, out, state_slots, runs, stride_x, stride_slot, num_channels,
                 CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """All tokens of a sequence, some channels, the last one first: what lies in the first one's slot is read by those
    behind it before that one writes there."""
    first = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(runs + first)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    if num_tokens > 0:
        old = conv_state + tl.load(state_slots + first).to(tl.int64) * stride_slot + channels
        for index in range(num_tokens):
            place = num_tokens - 1 - index
            token = first + place
            own = conv_state + tl.load(state_slots + token).to(tl.int64) * stride_slot + channels
            total = tl.zeros((CHANNELS,), tl.float32)
            for tap in tl.static_range(WIDTH):
                source = place + tap - (WIDTH - 1)  # its place in the step; below 0: an input before it
                value = tl.load(x + (first + source) * stride_x + channels, mask=mask & (source >= 0), other=0.0)
                value += tl.load(old + (place + tap) * num_channels, mask=mask & (source < 0), other=0.0)
                weights = tl.load(weight + channels * WIDTH + tap, mask=mask, other=0.0).to(tl.float32)
                total += value.to(tl.float32) * weights
                if tap > 0:
                    tl.store(own + (tap - 1) * num_channels, value, mask=mask)
            tl.store(out + token * num_channels + channels, _silu(total, out.dtype.element_ty), mask=mask)
