"""Samples from the whole vocabulary, or takes the most probable token, in two kernels that read the logits once.

The first computes the largest logit and the sum of weights of each block of a row. The second finds the block in which
the running sum passes the row's uniform, and reads that block again. Greedy rows use the same kernels. Tokens are those
of the plain operators with the same uniform, unless it lies within float32's rounding of an edge. Parameters of other
rows change nothing. Knows no slots and no parameters.

B rows, V vocabulary, N blocks of a row; a 1 is a kept dim.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.sampling.token_masks import mask_bias

_BLOCK = 4096
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WARPS = 4
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOT_FOUND = tl.constexpr(2**31 - 1)
# These have any address, and rows of a part of the vocabulary any stride: variants for some values would be compiled
# while serving. IS_ALIGNED is what vectorised loads of the logits need to know.
_CHANGES = ["logits", "temperatures", "uniforms", "highest", "totals", "stride", "words", "masks", "num_words"]
_ALIGNED_BYTES = tl.constexpr(16)


def sample_from_softmax(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor) -> Tensor:
    """See Ops.softmax_sampler; temperature 0 is the most probable token. Sums are float32.

    A weight below 2^-126 of the largest counts as 0.
    """
    return _sample(logits_BV, temperature_B1, uniform_B1, None, None)


def sample_allowed(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor, words_CW: Tensor,
                   masks_B: Tensor) -> Tensor:
    """See Ops.masked_sampler. A row's token is the same as from a copy of its logits with -inf."""
    assert words_CW.is_contiguous(), "masks lie one behind the other"
    return _sample(logits_BV, temperature_B1, uniform_B1, words_CW, masks_B)


def _sample(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor, words_CW: Tensor | None,
            masks_B: Tensor | None) -> Tensor:
    assert logits_BV.stride(1) == 1, "a row's logits lie side by side"
    batch_size, vocab_size = logits_BV.shape
    num_blocks = triton.cdiv(vocab_size, _BLOCK)
    highest_BN, totals_BN = torch.empty((2, batch_size, num_blocks), dtype=torch.float32, device=logits_BV.device)
    tokens_B1 = torch.empty((batch_size, 1), dtype=torch.int32, device=logits_BV.device)
    sizes = (logits_BV.stride(0), vocab_size, num_blocks)
    # Without masks the kernels read none of these.
    masked = (tokens_B1, tokens_B1, 0) if words_CW is None else (words_CW, masks_B, words_CW.shape[1])
    constants = {"IS_ALIGNED": _is_aligned(logits_BV), "IS_MASKED": words_CW is not None, "BLOCK": _BLOCK}
    _sum_blocks[(batch_size, num_blocks)](
        logits_BV, temperature_B1, highest_BN, totals_BN, *sizes, *masked, **constants, num_warps=_WARPS)
    _sample_rows[(batch_size,)](
        logits_BV, temperature_B1, uniform_B1, highest_BN, totals_BN, tokens_B1, *sizes, *masked, **constants,
        BLOCKS=triton.next_power_of_2(num_blocks), num_warps=_WARPS)
    return tokens_B1


def compile_all(vocab_size: int, device: torch.device) -> None:
    """Sample once from logits of each dtype and alignment that a step may have: nothing is compiled while serving."""
    ones_B1 = torch.ones((1, 1), dtype=torch.float32, device=device)
    for dtype in DTYPES:
        logits_1V = torch.zeros((1, vocab_size + 1), dtype=dtype, device=device)
        for first in (0, 1):
            sample_from_softmax(logits_1V[:, first : first + vocab_size], ones_B1, ones_B1 / 2)


def compile_masked(logits_BV: Tensor, words_CW: Tensor) -> None:
    """Sample once with masks, from logits of this dtype and of each alignment."""
    vocab_size, device = logits_BV.shape[1], logits_BV.device
    ones_B1 = torch.ones((1, 1), dtype=torch.float32, device=device)
    logits_1V = torch.zeros((1, vocab_size + 1), dtype=logits_BV.dtype, device=device)
    none_B = torch.zeros(1, dtype=torch.int32, device=device)
    for first in (0, 1):
        sample_allowed(logits_1V[:, first : first + vocab_size], ones_B1, ones_B1 / 2, words_CW[:1], none_B)


def _is_aligned(logits_BV: Tensor) -> bool:
    row_bytes = logits_BV.stride(0) * logits_BV.itemsize if len(logits_BV) > 1 else 0
    return logits_BV.data_ptr() % _ALIGNED_BYTES.value == row_bytes % _ALIGNED_BYTES.value == 0


@triton.jit
def _load(row, tokens, vocab_size, IS_ALIGNED: tl.constexpr):
    indices = row + tokens
    if IS_ALIGNED:
        indices = tl.multiple_of(indices, _ALIGNED_BYTES)
    return tl.load(indices, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)


@triton.jit
def _allowed(values, words, mask, num_words, tokens, vocab_size):
    """The logits with a row's mask added, if it has one."""
    if mask >= 0:
        values += mask_bias(words + mask.to(tl.int64) * num_words, tokens, vocab_size)
    return values


@triton.jit
def _scale(temperature):
    """The factor of a difference of logits in the base-2 exponent of its weight; greedy rows use any."""
    return _LOG2_E / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit(do_not_specialize=_CHANGES)
def _sum_blocks(logits, temperatures, highest, totals, stride, vocab_size, num_blocks, words, masks, num_words,
                IS_ALIGNED: tl.constexpr, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = _load(logits + row * stride, tokens, vocab_size, IS_ALIGNED)
    if IS_MASKED:
        values = _allowed(values, words, tl.load(masks + row), num_words, tokens, vocab_size)
    largest = tl.max(values, 0)
    # A block of impossible tokens has the weight 0. NaN and +inf make the sum NaN.
    base = tl.where(largest == float("-inf"), 0.0, largest)
    weights = tl.exp2((values - base) * _scale(tl.load(temperatures + row)))
    tl.store(highest + row * num_blocks + block, largest)
    tl.store(totals + row * num_blocks + block, tl.sum(weights, 0))


@triton.jit(do_not_specialize=_CHANGES)
def _sample_rows(logits, temperatures, uniforms, highest, totals, out, stride, vocab_size, num_blocks, words, masks,
                 num_words, IS_ALIGNED: tl.constexpr, IS_MASKED: tl.constexpr, BLOCK: tl.constexpr,
                 BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row)
    is_greedy = temperature == 0.0
    scale = _scale(temperature)
    blocks = tl.arange(0, BLOCKS)
    is_there = blocks < num_blocks
    largest = tl.load(highest + row * num_blocks + blocks, mask=is_there, other=float("-inf"))
    top = tl.max(largest, 0)
    totals_of_blocks = tl.load(totals + row * num_blocks + blocks, mask=is_there, other=0.0)
    masses = totals_of_blocks * tl.exp2((largest - top) * scale)
    whole = tl.sum(masses, 0)
    target = tl.load(uniforms + row) * whole
    block = _first_beyond(tl.cumsum(masses, 0), masses, target, blocks)
    block = tl.where(is_greedy, _first(largest == top, blocks), block)
    block = tl.minimum(tl.maximum(block, 0), num_blocks - 1)  # a row of NaN has none
    before = tl.sum(tl.where(blocks < block, masses, 0.0), 0)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    values = _load(logits + row * stride, tokens, vocab_size, IS_ALIGNED)
    failure = -1
    if IS_MASKED:
        mask = tl.load(masks + row)
        values = _allowed(values, words, mask, num_words, tokens, vocab_size)
        # NaN makes its block's total NaN; where no token is allowed all totals are 0.
        total = tl.sum(totals_of_blocks, 0)
        failure = tl.where((mask >= 0) & (total == total), -2, -1)
    weights = tl.exp2((values - top) * scale)
    token = _first_beyond(before + tl.cumsum(weights, 0), weights, target, tokens)
    token = tl.where(is_greedy, _first(values == top, tokens), token)
    tl.store(out + row, tl.where(whole == whole, token, failure))


@triton.jit
def _first_beyond(running, weights, target, indices):
    """The first index with a weight above 0 whose running sum passes the target. By rounding there may be none: then
    it is the last one with a weight above 0."""
    index = _first((weights > 0.0) & (running > target), indices)
    return tl.where(index == _NOT_FOUND, tl.max(tl.where(weights > 0.0, indices, -1), 0), index)


@triton.jit
def _first(is_one, indices):
    return tl.min(tl.where(is_one, indices, _NOT_FOUND), 0)
