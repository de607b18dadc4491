"""Norm of each head, rotary embedding and the write into the cache in one kernel, between the qkv GEMM and attention.

Knows nothing of models.

T tokens, N query heads, K kv heads, H head dim, R rotary dims, NB blocks, S block size.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.attention.paged_kernels import to_cache_dtype
from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.ops import HeadNorms

# Elements of one program: several heads, of several tokens where a token has few.
_ELEMENTS = 2048
_WARPS = 4
# These differ between steps, or have any address among a step's inputs: no variants for some values.
_CHANGES = ["num_tokens", "slots"]


def norm_rotary_store(q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None, cos_TR: Tensor,
                      sin_TR: Tensor, *, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor,
                      kv_scales: Tensor | None = None) -> Tensor:
    """See AttentionBackend.norm_rotary_store. It rounds where the separate operators round, and returns a contiguous q.
    `kv_scales`: float32, the divisors of keys and of values for a cache in e4m3, or None."""
    (num_tokens, num_heads, head_dim), num_kv_heads = q_TNH.shape, k_TKH.shape[1]
    out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
    num_rows = max(1, _ELEMENTS // triton.next_power_of_2(head_dim))
    half = cos_TR.shape[1] // 2
    num_programs = triton.cdiv(num_tokens * num_heads, num_rows) + 2 * triton.cdiv(num_tokens * num_kv_heads, num_rows)
    _norm_rotary_store[(num_programs,)](
        q_TNH, k_TKH, v_TKH, out_TNH, q_TNH if norms is None else norms.q_weight_H,
        k_TKH if norms is None else norms.k_weight_H, cos_TR, sin_TR, k_cache, v_cache, slot_mapping_T,
        q_TNH if kv_scales is None else kv_scales, num_tokens,
        q_TNH.stride(0), q_TNH.stride(1), k_TKH.stride(0), k_TKH.stride(1), v_TKH.stride(0), v_TKH.stride(1),
        cos_TR.stride(0), HEADS=num_heads, KV_HEADS=num_kv_heads, HALF=half, REST=head_dim - 2 * half,
        EPS=-1.0 if norms is None else norms.eps, ROWS=num_rows, BLOCK=triton.next_power_of_2(half),
        REST_BLOCK=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        HEAD_BLOCK=triton.next_power_of_2(head_dim), IS_SCALED=kv_scales is not None, num_warps=_WARPS,
        **launch_settings(),
    )
    return out_TNH


@triton.jit(do_not_specialize=_CHANGES)
def _norm_rotary_store(q, k, v, out, q_weight, k_weight, cos, sin, k_cache, v_cache, slots, scales, num_tokens,
                       stride_qt, stride_qn, stride_kt, stride_kn, stride_vt, stride_vn, stride_c, HEADS: tl.constexpr,
                       KV_HEADS: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr, EPS: tl.constexpr,
                       ROWS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, HEAD_BLOCK: tl.constexpr,
                       IS_SCALED: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """A row is a head of a token. Programs of q come first, then of k, then of v. EPS below 0: no norm."""
    HEAD: tl.constexpr = 2 * HALF + REST
    after_earlier_kernels(IS_DEPENDENT)
    program = tl.program_id(0)
    num_q_programs = tl.cdiv(num_tokens * HEADS, ROWS)
    num_kv_programs = tl.cdiv(num_tokens * KV_HEADS, ROWS)
    if program < num_q_programs:
        rows = program * ROWS + tl.arange(0, ROWS)
        tokens, heads = (rows // HEADS).to(tl.int64), rows % HEADS
        _turn(q + tokens * stride_qt + heads * stride_qn, out + rows.to(tl.int64) * HEAD, tokens * stride_c,
              rows < num_tokens * HEADS, q_weight, cos, sin, scales, HALF, REST, EPS, BLOCK, REST_BLOCK, False)
    else:
        program -= num_q_programs
        is_key = program < num_kv_programs
        program = tl.where(is_key, program, program - num_kv_programs)
        rows = program * ROWS + tl.arange(0, ROWS)
        is_row = rows < num_tokens * KV_HEADS
        tokens, heads = (rows // KV_HEADS).to(tl.int64), rows % KV_HEADS
        places = (tl.load(slots + tokens, mask=is_row, other=0).to(tl.int64) * KV_HEADS + heads) * HEAD
        if is_key:
            _turn(k + tokens * stride_kt + heads * stride_kn, k_cache + places, tokens * stride_c, is_row, k_weight,
                  cos, sin, scales, HALF, REST, EPS, BLOCK, REST_BLOCK, IS_SCALED)
        else:
            dims = tl.arange(0, HEAD_BLOCK)
            mask = is_row[:, None] & (dims < HEAD)[None, :]
            values = tl.load((v + tokens * stride_vt + heads * stride_vn)[:, None] + dims[None, :], mask=mask)
            tl.store((v_cache + places)[:, None] + dims[None, :],
                     to_cache_dtype(values, v_cache.dtype.element_ty, scales + 1, IS_SCALED), mask=mask)


@triton.jit
def _turn(sources, targets, turns, is_row, weight, cos, sin, divisor, HALF: tl.constexpr, REST: tl.constexpr,
          EPS: tl.constexpr, BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, IS_SCALED: tl.constexpr):
    """Norm and rotary embedding of the rows that begin at `sources`; their cos and sin begin at `turns`. `divisor` is
    the scale of `to_cache_dtype`."""
    halves = tl.arange(0, BLOCK)
    is_dim = halves < HALF
    mask = is_row[:, None] & is_dim[None, :]
    from_first, to_first = sources[:, None] + halves[None, :], targets[:, None] + halves[None, :]
    kind = sources.dtype.element_ty
    stored = targets.dtype.element_ty
    first = tl.load(from_first, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(from_first + HALF, mask=mask, other=0.0).to(tl.float32)
    if EPS >= 0.0:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST > 0:
        rests = 2 * HALF + tl.arange(0, REST_BLOCK)
        is_rest = rests < 2 * HALF + REST
        rest_mask = is_row[:, None] & is_rest[None, :]
        rest = tl.load(sources[:, None] + rests[None, :], mask=rest_mask, other=0.0).to(tl.float32)
        if EPS >= 0.0:
            squares += tl.sum(rest * rest, 1)
    if EPS >= 0.0:
        scale = tl.rsqrt(squares / (2 * HALF + REST) + EPS)[:, None]
        first = _scaled(first, scale, weight + halves, is_dim, kind)
        second = _scaled(second, scale, weight + HALF + halves, is_dim, kind)
        if REST > 0:
            rest = _scaled(rest, scale, weight + rests, is_rest, kind)
    places = turns[:, None] + halves[None, :]
    c = tl.load(cos + places, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + places, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_first, to_cache_dtype((first * c - second * s).to(kind), stored, divisor, IS_SCALED), mask=mask)
    tl.store(to_first + HALF, to_cache_dtype((second * c + first * s).to(kind), stored, divisor, IS_SCALED), mask=mask)
    if REST > 0:
        tl.store(targets[:, None] + rests[None, :], to_cache_dtype(rest.to(kind), stored, divisor, IS_SCALED),
                 mask=rest_mask)


@triton.jit
def _scaled(values, scale, weights, is_dim, kind: tl.constexpr):
    """Rounds as RMS norms do: before the weight to the weight's dtype, then to the dtype of the values."""
    weight = tl.load(weights, mask=is_dim, other=0.0)
    return ((values * scale).to(weight.dtype) * weight[None, :]).to(kind).to(tl.float32)
