"""Triton kernels of Gated DeltaNet's causal depthwise convolution over states by slot: prompts, and one token a row.

A state (W - 1, C) holds the inputs before the row's tokens. All is computed in float32. The tables of a
prefill are those of gated_delta_kernels.
"""
# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from npu_runner.platforms.cuda.gated_delta_kernels import CHUNK, CHUNK_FIELDS, ROW_FIELDS, SAVE_FIELDS


@triton.jit
def convolve_step(x, weight, conv_state, out, state_slots, stride_x, stride_slot, num_channels, CHANNELS: tl.constexpr,
                  WIDTH: tl.constexpr):
    """One token of a sequence, some channels; the state moves on by it."""
    row = tl.program_id(1).to(tl.int64)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    mask = channels < num_channels
    old = conv_state + tl.load(state_slots + row).to(tl.int64) * stride_slot + channels
    newest = tl.load(x + row * stride_x + channels, mask=mask, other=0.0)
    weights = weight + channels * WIDTH
    total = newest.to(tl.float32) * tl.load(weights + WIDTH - 1, mask=mask, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH - 1):
        value = tl.load(old + tap * num_channels, mask=mask, other=0.0)
        total += value.to(tl.float32) * tl.load(weights + tap, mask=mask, other=0.0).to(tl.float32)
        if tap > 0:
            tl.store(old + (tap - 1) * num_channels, value, mask=mask)
    tl.store(old + (WIDTH - 2) * num_channels, newest, mask=mask)
    tl.store(out + row * num_channels + channels, _silu(total, out.dtype.element_ty), mask=mask)


@triton.jit
def convolve_chunks(x, weight, conv_state, out, chunks, state_slots, stride_x, stride_slot, num_channels,
                    CHANNELS: tl.constexpr, WIDTH: tl.constexpr):
    """The tokens of one chunk, some channels. Leaves the state as it is."""
    fields = chunks + tl.program_id(0).to(tl.int64) * CHUNK_FIELDS
    first, end, base = tl.load(fields + 1), tl.load(fields + 2), tl.load(fields + 3)
    slot = tl.load(state_slots + tl.load(fields)).to(tl.int64)
    is_continued = tl.load(fields + 4) == 0
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
            old = conv_state + slot * stride_slot + (place - first + WIDTH - 1)[:, None] * num_channels
            values += tl.load(old + channels[None, :], mask=mask & (place < first)[:, None], other=0.0).to(tl.float32)
        weights = tl.load(weight + channels * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
        total += values * weights[None, :]
    place = out + tokens.to(tl.int64)[:, None] * num_channels + channels[None, :]
    tl.store(place, _silu(total, out.dtype.element_ty), mask=mask)


@triton.jit
def keep_inputs(x, conv_state, rows, saves, state_slots, stride_x, stride_slot, num_channels, CHANNELS: tl.constexpr,
                WIDTH: tl.constexpr, TAIL: tl.constexpr):
    """The last inputs of one row into its slot, and those before each of its saves into theirs."""
    fields = rows + tl.program_id(0) * ROW_FIELDS
    first, end = tl.load(fields + 1), tl.load(fields + 2)
    num_known = (WIDTH - 1) * (1 - tl.load(fields + 6))  # inputs before the row: none where it begins its sequence
    first_save, num_saves = tl.load(fields + 7), tl.load(fields + 8)
    slot = tl.load(state_slots + tl.load(fields)).to(tl.int64)
    channels = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    taps = tl.arange(0, TAIL)
    place = taps[:, None] * num_channels + channels[None, :]
    mask = (taps < WIDTH - 1)[:, None] & (channels < num_channels)[None, :]
    old = conv_state + slot * stride_slot
    for save in range(first_save, first_save + num_saves):
        save_end = tl.load(saves + save * SAVE_FIELDS)
        values = _inputs_before(save_end, first, x, old, stride_x, num_channels, channels, taps, mask, num_known, WIDTH)
        save_slot = tl.load(saves + save * SAVE_FIELDS + 1).to(tl.int64)
        tl.store(conv_state + save_slot * stride_slot + place, values, mask=mask)
    values = _inputs_before(end, first, x, old, stride_x, num_channels, channels, taps, mask, num_known, WIDTH)
    tl.debug_barrier()  # a short row moves what is in its slot: all of it is read by now
    tl.store(old + place, values, mask=mask)


@triton.jit
def _inputs_before(end, first, x, old, stride_x, num_channels, channels, taps, mask, num_known, WIDTH: tl.constexpr):
    """The WIDTH - 1 inputs before token `end` of a row that begins at `first`: its own, or of its slot."""
    place = end - (WIDTH - 1) + taps
    new = tl.load(x + place.to(tl.int64)[:, None] * stride_x + channels[None, :],
                  mask=mask & (place >= first)[:, None], other=0.0)
    kept = tl.load(old + (place - first + WIDTH - 1)[:, None] * num_channels + channels[None, :],
                   mask=mask & (place < first)[:, None] & (place >= first - num_known)[:, None], other=0.0)
    return tl.where((place >= first)[:, None], new, kept)


@triton.jit
def _silu(x, dtype: tl.constexpr):
    return (x / (1.0 + tl.exp(-x))).to(dtype)
