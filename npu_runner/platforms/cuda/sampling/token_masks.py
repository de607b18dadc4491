"""Applies masks of allowed tokens, one bit each: reads logits once and writes float32, with -inf where the bit is 0.

Knows no grammars and no slots.

B rows, C of them with a mask of W words of 32 bits, V vocabulary.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_WARPS = 4
# These have any address and size: variants for some values would be compiled while serving.
_CHANGES = ["logits", "rows", "words", "out", "stride", "vocab_size", "num_words"]


def allow_tokens(logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
    """See Ops.allow_tokens; it is one launch."""
    assert logits_BV.stride(1) == 1, "a row's logits lie side by side"
    assert words_CW.is_contiguous(), "masks lie one behind the other"
    vocab_size, (num_masks, num_words) = logits_BV.shape[1], words_CW.shape
    out_CV = torch.empty((num_masks, vocab_size), dtype=torch.float32, device=logits_BV.device)
    _allow_tokens[(num_masks, triton.cdiv(vocab_size, _BLOCK))](
        logits_BV, words_CW if rows_C is None else rows_C, words_CW, out_CV, logits_BV.stride(0), vocab_size, num_words,
        HAS_ROWS=rows_C is not None, BLOCK=_BLOCK, num_warps=_WARPS)
    return out_CV


def compile_all(logits_BV: Tensor, words_CW: Tensor) -> None:
    """Mask the first row in both ways that a step may use: nothing is compiled while serving."""
    first = torch.zeros(1, dtype=torch.int64, device=logits_BV.device)
    for rows_1 in (None, first):
        allow_tokens(logits_BV[:1], rows_1, words_CW[:1])


@triton.jit
def mask_bias(words, tokens, vocab_size):
    """The bias of a mask for the logits of some tokens: 0, or -inf. `words` points to the mask."""
    bits = tl.load(words + tokens // 32, mask=tokens < vocab_size, other=0)
    return tl.where(((bits >> (tokens % 32)) & 1) != 0, 0.0, float("-inf"))


@triton.jit(do_not_specialize=_CHANGES)
def _allow_tokens(logits, rows, words, out, stride, vocab_size, num_words, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    row = place
    if HAS_ROWS:
        row = tl.load(rows + place)
    tokens = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = tokens < vocab_size
    values = tl.load(logits + row * stride + tokens, mask=is_there, other=0.0).to(tl.float32)
    # Added, not chosen between: a NaN without a bit is still seen, and +inf becomes one.
    tl.store(out + place * vocab_size + tokens, values + mask_bias(words + place * num_words, tokens, vocab_size),
             mask=is_there)
