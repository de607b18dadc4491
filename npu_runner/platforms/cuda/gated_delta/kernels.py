"""Triton kernels of Gated DeltaNet (arXiv 2412.06464): the gated delta rule of one step, and in chunks of 64 tokens.

Chunk form: with g summed within the chunk, D_ij = exp(sum of g over j < l <= i), A_ij = beta_i k_i k_j D_ij below the
diagonal, P_ij = q_i k_j D_ij up to it, and E_i = exp(sum of g up to i), a state S (Dk, Dv) gives
    N = (1 + A)^-1 beta (v - E k S)        o = E q S + P N        S' = S exp(sum of g) + (D_last k)^T N.
Every matmul keeps about 16 bits, also in 16-bit models: similar keys make (1 + A)^-1 large, and a state carries an
error on. q and k are not normalised before their matmuls, which are exact; their norms are multiplied in afterwards in
float32. The float32 operands (S, N, (1 + A)^-1, P) of a matmul have the PRECISION "split" in bfloat16 models (the sum
of two bfloat16 values), "tf32x3" in float16 models (three TF32 MMAs), and "ieee" in float32 models. The inverse is
computed in float32 from 16 x 16 blocks solved row by row.

The causal depthwise convolution at the end has states by slot, in float32: a state (COLUMNS, C) holds the W - 1 or more
inputs before the row's tokens, that of position p in column p modulo COLUMNS.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.dependent_launch import let_next_kernel_start, wait_for_earlier_kernels

# The tokens of a chunk, and of a diagonal block, which is inverted row by row.
CHUNK = tl.constexpr(64)
BLOCK = tl.constexpr(16)
# int32 columns of the tables that a prefill is planned in. A chunk's tokens begin at `base`, which may lie before the
# row's first token, because chunks begin at positions that are multiples of 64. `shift` is a token's position minus its
# index in the step.
ROW_FIELDS = tl.constexpr(12)  # row, first token, end, base, first chunk, chunks, is fresh, first save, saves, shift
CHUNK_FIELDS = tl.constexpr(8)  # row, first token of the row, its end, base, is fresh, slot to save into or -1, shift
SAVE_FIELDS = tl.constexpr(2)  # end, slot
COEFFICIENTS = tl.constexpr(5)  # rows of CHUNK values: E |k|^-1, E |q|^-1 scale, D_last |k|^-1, beta, exp(sum of g)
_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def delta_step(qkv, a, b, neg_exp_A, dt_bias, state, out, state_slots, stride_qkv, stride_a, stride_b, stride_slot,
               num_k_heads, num_v_heads, head_k_dim, head_v_dim, SCALE: tl.constexpr, VALUES: tl.constexpr,
               KEYS: tl.constexpr, IS_WHOLE: tl.constexpr):
    """One token of a sequence and v head; VALUES rows of its state (Dv, Dk). IS_WHOLE: KEYS and VALUES divide the dims.

    The state is nearly all that is read and written. It is loaded first, and is not kept in the cache.
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
    k_head = head // (num_v_heads // num_k_heads)
    q_place = qkv + row * stride_qkv + k_head * head_k_dim + keys
    q = tl.load(q_place, mask=is_key, other=0.0).to(tl.float32)
    k = tl.load(q_place + num_k_heads * head_k_dim, mask=is_key, other=0.0).to(tl.float32)
    v_place = qkv + row * stride_qkv + 2 * num_k_heads * head_k_dim + head * head_v_dim + values
    v = tl.load(v_place, mask=is_value, other=0.0).to(tl.float32)
    q = q * (tl.rsqrt(tl.sum(q * q, 0) + _L2_EPS) * SCALE)
    k = k * tl.rsqrt(tl.sum(k * k, 0) + _L2_EPS)
    beta = _beta(tl.load(b + row * stride_b + head))
    g = _log_decay(tl.load(a + row * stride_a + head), tl.load(neg_exp_A + head), tl.load(dt_bias + head))
    s = s * tl.exp(g)
    change = (v - tl.sum(s * k[None, :], 1)) * beta
    s += change[:, None] * k[None, :]
    if IS_WHOLE:
        tl.store(place, s, eviction_policy="evict_first")
    else:
        tl.store(place, s, mask=mask, eviction_policy="evict_first")
    result = tl.sum(s * q[None, :], 1).to(out.dtype.element_ty)
    tl.store(out + (row * num_v_heads + head) * head_v_dim + values, result, mask=is_value)


@triton.jit
def chunk_matrices(qkv, a, b, neg_exp_A, dt_bias, chunks, system, scores, coefficients, stride_qkv, stride_a, stride_b,
                   num_k_heads, num_v_heads, head_k_dim, SCALE: tl.constexpr, KEYS: tl.constexpr,
                   PRECISION: tl.constexpr):
    """A, P and the coefficients of one chunk and v head."""
    PARTS: tl.constexpr = 2 if PRECISION == "split" else 1
    chunk = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    fields = chunks + chunk * CHUNK_FIELDS
    tokens = tl.load(fields + 3) + tl.arange(0, CHUNK)
    is_token = (tokens >= tl.load(fields + 1)) & (tokens < tl.load(fields + 2))
    tokens = tokens.to(tl.int64)
    keys = tl.arange(0, KEYS)
    mask = is_token[:, None] & (keys < head_k_dim)[None, :]
    k_head = head // (num_v_heads // num_k_heads)
    q_place = qkv + tokens[:, None] * stride_qkv + (k_head * head_k_dim + keys)[None, :]
    q = tl.load(q_place, mask=mask, other=0.0)
    k = tl.load(q_place + num_k_heads * head_k_dim, mask=mask, other=0.0)
    q_norm = tl.rsqrt(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + _L2_EPS) * SCALE
    k_norm = tl.rsqrt(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + _L2_EPS)
    beta = tl.where(is_token, _beta(tl.load(b + tokens * stride_b + head, mask=is_token, other=0.0)), 0.0)
    inputs = tl.load(a + tokens * stride_a + head, mask=is_token, other=0.0)
    g = tl.where(is_token, _log_decay(inputs, tl.load(neg_exp_A + head), tl.load(dt_bias + head)), 0.0)
    rows = tl.arange(0, CHUNK)[:, None]
    columns = tl.arange(0, CHUNK)[None, :]
    # Summed from j + 1 on: a difference of two running sums would lose its digits behind a gate of -1e4.
    between = tl.where(rows > columns, g[:, None], 0.0)
    decay = tl.exp(tl.cumsum(between, 0))
    kk = tl.dot(k, tl.trans(k), input_precision="ieee") * (k_norm[:, None] * k_norm[None, :]) * decay
    qk = tl.dot(q, tl.trans(k), input_precision="ieee") * (q_norm[:, None] * k_norm[None, :]) * decay
    place = chunk * num_v_heads + head
    square = rows * CHUNK + columns
    tl.store(system + place * CHUNK * CHUNK + square, tl.where(rows > columns, kk * beta[:, None], 0.0))
    _store_parts(scores + place * PARTS * CHUNK * CHUNK + square, tl.where(rows >= columns, qk, 0.0), CHUNK * CHUNK,
                 PRECISION)
    until = tl.exp(tl.cumsum(g, 0))
    row = coefficients + place * COEFFICIENTS * CHUNK + tl.arange(0, CHUNK)
    tl.store(row, until * k_norm)
    tl.store(row + CHUNK, until * q_norm)
    tl.store(row + 2 * CHUNK, tl.exp(tl.sum(between, 0)) * k_norm)
    tl.store(row + 3 * CHUNK, beta)
    tl.store(row + 4 * CHUNK, tl.zeros((CHUNK,), tl.float32) + tl.exp(tl.sum(g, 0)))


@triton.jit
def invert_system(system, inverse, PRECISION: tl.constexpr):
    """(1 + A)^-1 of one chunk and v head: four blocks row by row, the others from these, all in float32."""
    PARTS: tl.constexpr = 2 if PRECISION == "split" else 1
    program = tl.program_id(0).to(tl.int64)
    a = system + program * CHUNK * CHUNK
    rows = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, BLOCK)
    identity = tl.where(rows == columns[None, :], 1.0, 0.0)
    t00, t11, t22, t33 = identity, identity, identity, identity
    for row in range(1, BLOCK):
        line = a + row * CHUNK + columns
        t00 = _next_row(t00, line, row, rows)
        t11 = _next_row(t11, line + (BLOCK * CHUNK + BLOCK), row, rows)
        t22 = _next_row(t22, line + 2 * (BLOCK * CHUNK + BLOCK), row, rows)
        t33 = _next_row(t33, line + 3 * (BLOCK * CHUNK + BLOCK), row, rows)
    a10, a20, a21 = _block(a, 1, 0), _block(a, 2, 0), _block(a, 2, 1)
    a30, a31, a32 = _block(a, 3, 0), _block(a, 3, 1), _block(a, 3, 2)
    t10 = -_times(t11, _times(a10, t00))
    t21 = -_times(t22, _times(a21, t11))
    t32 = -_times(t33, _times(a32, t22))
    t20 = -_times(t22, _times(a20, t00) + _times(a21, t10))
    t31 = -_times(t33, _times(a31, t11) + _times(a32, t21))
    t30 = -_times(t33, _times(a30, t00) + _times(a31, t10) + _times(a32, t20))
    out = inverse + program * PARTS * CHUNK * CHUNK
    tl.debug_barrier()  # `inverse` is the memory of `system`: all of this square is read by now
    zeros = tl.zeros((BLOCK, BLOCK), tl.float32)
    _store_line(out, 0, t00, zeros, zeros, zeros, PRECISION)
    _store_line(out, 1, t10, t11, zeros, zeros, PRECISION)
    _store_line(out, 2, t20, t21, t22, zeros, PRECISION)
    _store_line(out, 3, t30, t31, t32, t33, PRECISION)


@triton.jit
def chunk_scan(qkv, inverse, scores, coefficients, rows, chunks, state, out, state_slots, stride_qkv, stride_slot,
               num_k_heads, num_v_heads, head_k_dim, head_v_dim, VALUES: tl.constexpr, KEYS: tl.constexpr,
               PRECISION: tl.constexpr):
    """All chunks of one row and v head, one after the other; VALUES columns of the state, held as (Dk, Dv)."""
    PARTS: tl.constexpr = 2 if PRECISION == "split" else 1
    fields = rows + tl.program_id(2) * ROW_FIELDS
    head = tl.program_id(1)
    first, end, base = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    first_chunk, num_chunks = tl.load(fields + 4).to(tl.int64), tl.load(fields + 5)
    slot = tl.load(state_slots + tl.load(fields)).to(tl.int64)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    is_key, is_value = keys < head_k_dim, values < head_v_dim
    part = (head * head_v_dim + values)[:, None] * head_k_dim + keys[None, :]
    part_mask = is_value[:, None] & is_key[None, :]
    known_keys = head_k_dim * (1 - tl.load(fields + 6))  # none in a row that begins its sequence
    s = tl.trans(tl.load(state + slot * stride_slot + part, mask=part_mask & (keys < known_keys)[None, :], other=0.0))
    square = tl.arange(0, CHUNK)[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    k_place = (head // (num_v_heads // num_k_heads)) * head_k_dim + keys
    v_place = 2 * num_k_heads * head_k_dim + head * head_v_dim + values
    for index in range(num_chunks):
        tokens = base + index * CHUNK + tl.arange(0, CHUNK)
        is_token = (tokens >= first) & (tokens < end)
        lines = tokens.to(tl.int64)[:, None] * stride_qkv
        k_mask = is_token[:, None] & is_key[None, :]
        v_mask = is_token[:, None] & is_value[None, :]
        q = tl.load(qkv + lines + k_place[None, :], mask=k_mask, other=0.0)
        k = tl.load(qkv + lines + num_k_heads * head_k_dim + k_place[None, :], mask=k_mask, other=0.0)
        v = tl.load(qkv + lines + v_place[None, :], mask=v_mask, other=0.0).to(tl.float32)
        place = (first_chunk + index) * num_v_heads + head
        row = coefficients + place * COEFFICIENTS * CHUNK + tl.arange(0, CHUNK)
        k_factor, q_factor, left, beta = (tl.load(row), tl.load(row + CHUNK), tl.load(row + 2 * CHUNK),
                                          tl.load(row + 3 * CHUNK))
        missing = (v - _exact_times_float(k, s, PRECISION) * k_factor[:, None]) * beta[:, None]
        new = _parts_times_float(inverse + place * PARTS * CHUNK * CHUNK + square, missing, PRECISION)
        result = _exact_times_float(q, s, PRECISION) * q_factor[:, None]
        result += _parts_times_float(scores + place * PARTS * CHUNK * CHUNK + square, new, PRECISION)
        out_place = (tokens.to(tl.int64)[:, None] * num_v_heads + head) * head_v_dim + values[None, :]
        tl.store(out + out_place, result.to(out.dtype.element_ty), mask=v_mask)
        whole_decay = tl.load(coefficients + (place * COEFFICIENTS + 4) * CHUNK)
        s = s * whole_decay + _exact_times_float(tl.trans(k), new * left[:, None], PRECISION)
        save = tl.load(chunks + (first_chunk + index) * CHUNK_FIELDS + 5).to(tl.int64)
        if save >= 0:
            tl.store(state + save * stride_slot + part, tl.trans(s), mask=part_mask)
    tl.store(state + slot * stride_slot + part, tl.trans(s), mask=part_mask)


@triton.jit
def _beta(b):
    """sigmoid(b) in b's dtype."""
    return (1.0 / (1.0 + tl.exp(-b.to(tl.float32)))).to(b.dtype).to(tl.float32)


@triton.jit
def _log_decay(a, neg_exp_A, dt_bias):
    """neg_exp_A softplus(a + dt_bias). Small values use the series of log(1 + e): 1 + e would lose their digits."""
    x = a.to(tl.float32) + dt_bias
    e = tl.exp(tl.minimum(x, 20.0))
    series = e * (1 - e * (1 / 2 - e * (1 / 3 - e * (1 / 4 - e * (1 / 5 - e * (1 / 6 - e / 7))))))
    return neg_exp_A * tl.where(x > 20.0, x, tl.where(e < 0.1, series, tl.log(1.0 + e)))


@triton.jit
def _exact_times_float(x, y, PRECISION: tl.constexpr):
    """x y, where x has the model's dtype and y is float32."""
    if PRECISION == "split":
        high = y.to(tl.bfloat16)
        return tl.dot(x, (y - high.to(tl.float32)).to(tl.bfloat16), tl.dot(x, high))
    else:
        return tl.dot(x.to(tl.float32), y, input_precision=PRECISION)


@triton.jit
def _parts_times_float(place, y, PRECISION: tl.constexpr):
    """x y, where _store_parts stored x at `place`, and y is float32."""
    first = tl.load(place)
    if PRECISION == "split":
        rest = tl.load(place + CHUNK * CHUNK)
        high = y.to(tl.bfloat16)
        low = (y - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(first, high, tl.dot(first, low, tl.dot(rest, high)))
    else:
        return tl.dot(first, y, input_precision=PRECISION)


@triton.jit
def _store_parts(place, x, distance, PRECISION: tl.constexpr):
    """Stores float32, or, where PRECISION is "split", the sum of two bfloat16 values `distance` apart."""
    if PRECISION == "split":
        high = x.to(tl.bfloat16)
        tl.store(place, high)
        tl.store(place + distance, (x - high.to(tl.float32)).to(tl.bfloat16))
    else:
        tl.store(place, x)


@triton.jit
def _block(a, row, column):
    lines = (tl.arange(0, BLOCK) + row * BLOCK)[:, None] * CHUNK
    return tl.load(a + lines + (tl.arange(0, BLOCK) + column * BLOCK)[None, :])


@triton.jit
def _times(x, y):
    return tl.dot(x, y, input_precision="ieee")


@triton.jit
def _next_row(t, line, row, rows):
    """Row `row` of (1 + A)^-1 from the rows above it; `line` points to row `row` of A, 0 from the diagonal on."""
    factors = tl.load(line)
    return tl.where(rows == row, t - tl.sum(factors[:, None] * t, 0)[None, :], t)


@triton.jit
def _store_line(out, row, x0, x1, x2, x3, PRECISION: tl.constexpr):
    place = out + (tl.arange(0, BLOCK) + row * BLOCK)[:, None] * CHUNK + tl.arange(0, BLOCK)[None, :]
    _store_parts(place, x0, CHUNK * CHUNK, PRECISION)
    _store_parts(place + BLOCK, x1, CHUNK * CHUNK, PRECISION)
    _store_parts(place + 2 * BLOCK, x2, CHUNK * CHUNK, PRECISION)
    _store_parts(place + 3 * BLOCK, x3, CHUNK * CHUNK, PRECISION)


@triton.jit
def _modulo(x, M: tl.constexpr):
    """In [0, M) for any x."""
    return ((x % M) + M) % M


@triton.jit
def convolve_step(x, weight, conv_state, out, state_slots, context_lens, runs, stride_x, stride_slot, num_channels,
                  CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HAS_RUNS: tl.constexpr,
                  IS_DEPENDENT: tl.constexpr):
    """One token, CHANNELS channels. HAS_RUNS: tokens of a sequence follow one another, and read each other's inputs
    from `x`; `runs` has minus the index of a token among them. None of them reads the columns that they write."""
    wait_for_earlier_kernels(IS_DEPENDENT)
    let_next_kernel_start(IS_DEPENDENT)
    token = tl.program_id(1).to(tl.int64)
    num_before = tl.maximum(-tl.load(runs + token), 0) if HAS_RUNS else 0
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    old = conv_state + tl.load(state_slots + token - num_before).to(tl.int64) * stride_slot + channels
    position = tl.load(context_lens + token).to(tl.int32) - 1
    newest = tl.load(x + token * stride_x + channels, mask=mask, other=0.0)
    weights = weight + channels * WIDTH
    total = newest.to(tl.float32) * tl.load(weights + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        column = _modulo(position + tap - (WIDTH - 1), COLUMNS)
        if HAS_RUNS:
            is_new = num_before + tap >= WIDTH - 1
            value = tl.load(old + column * num_channels, mask=mask & (is_new == 0), other=0.0)
            value += tl.load(x + (token + tap - (WIDTH - 1)) * stride_x + channels, mask=mask & is_new, other=0.0)
        else:
            value = tl.load(old + column * num_channels, mask=mask, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + tap, mask=mask, other=0.0).to(tl.float32)
    tl.store(old + _modulo(position, COLUMNS) * num_channels, newest, mask=mask)
    tl.store(out + token * num_channels + channels, _silu(total, out.dtype.element_ty), mask=mask)


@triton.jit
def convolve_chunks(x, weight, conv_state, out, chunks, state_slots, stride_x, stride_slot, num_channels,
                    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The tokens of one chunk, CHANNELS channels. The state is not changed."""
    fields = chunks + tl.program_id(0).to(tl.int64) * CHUNK_FIELDS
    first, end, base = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    slot = tl.load(state_slots + tl.load(fields)).to(tl.int64)
    is_continued, shift = tl.load(fields + 4) == 0, tl.load(fields + 6)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = channels < num_channels
    tokens = base + tl.arange(0, CHUNK)
    is_token = (tokens >= first) & (tokens < end)
    mask = is_token[:, None] & is_channel[None, :]
    total = tl.zeros((CHUNK, CHANNELS), tl.float32)
    for tap in tl.static_range(WIDTH):
        place = tokens - (WIDTH - 1) + tap
        values = tl.load(x + place.to(tl.int64)[:, None] * stride_x + channels[None, :],
                         mask=mask & (place >= first)[:, None], other=0.0).to(tl.float32)
        if (base < first + WIDTH - 1) & is_continued:
            old = conv_state + slot * stride_slot + _modulo(place + shift, COLUMNS)[:, None] * num_channels
            values += tl.load(old + channels[None, :], mask=mask & (place < first)[:, None], other=0.0).to(tl.float32)
        weights = tl.load(weight + channels * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += values * weights[None, :]
    place = out + tokens.to(tl.int64)[:, None] * num_channels + channels[None, :]
    tl.store(place, _silu(total, out.dtype.element_ty), mask=mask)


@triton.jit
def store_inputs(x, conv_state, rows, saves, state_slots, stride_x, stride_slot, num_channels, CHANNELS: tl.constexpr,
                 WIDTH: tl.constexpr, TAIL: tl.constexpr, COLUMNS: tl.constexpr):
    """Stores the last inputs of one row in its slot, and those before each of its saves in that save's slot."""
    fields = rows + tl.program_id(0) * ROW_FIELDS
    first, end = tl.load(fields + 1), tl.load(fields + 2)
    num_known = (WIDTH - 1) * (1 - tl.load(fields + 6))  # inputs before the row: none where it begins its sequence
    first_save, num_saves, shift = tl.load(fields + 7), tl.load(fields + 8), tl.load(fields + 9)
    slot = tl.load(state_slots + tl.load(fields)).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    tail = tl.arange(0, TAIL) - (WIDTH - 1)  # places before an end
    mask = (tail < 0)[:, None] & (channels < num_channels)[None, :]
    old = conv_state + slot * stride_slot
    for save in range(first_save, first_save + num_saves):
        places = tl.load(saves + save * SAVE_FIELDS) + tail
        columns = _modulo(places + shift, COLUMNS)[:, None] * num_channels + channels[None, :]
        values = _inputs_at(places, columns, first, x, old, stride_x, channels, mask, num_known)
        save_slot = tl.load(saves + save * SAVE_FIELDS + 1).to(tl.int64)
        tl.store(conv_state + save_slot * stride_slot + columns, values, mask=mask)
    places = end + tail
    columns = _modulo(places + shift, COLUMNS)[:, None] * num_channels + channels[None, :]
    values = _inputs_at(places, columns, first, x, old, stride_x, channels, mask, num_known)
    tl.debug_barrier()  # with as few columns as taps a new input overwrites an old one, which is read by now
    tl.store(old + columns, values, mask=mask)


@triton.jit
def _inputs_at(places, columns, first, x, old, stride_x, channels, mask, num_known):
    """Inputs of a row that begins at `first`: its own, or, before it, those in its slot's columns."""
    new = tl.load(x + places.to(tl.int64)[:, None] * stride_x + channels[None, :],
                  mask=mask & (places >= first)[:, None], other=0.0)
    old_inputs = tl.load(old + columns, mask=mask & (places < first)[:, None] & (places >= first - num_known)[:, None],
                         other=0.0)
    return tl.where((places >= first)[:, None], new, old_inputs)


@triton.jit
def _silu(x, dtype: tl.constexpr):
    return (x / (1.0 + tl.exp(-x))).to(dtype)
