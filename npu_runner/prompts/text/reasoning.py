"""Finds the tokens around a checkpoint's reasoning, and splits answers there. Knows token ids, no templates by name.

Checkpoints that think have two tokens of their own for it. A chat template may end the prompt with the first one (the
answer then begins inside the reasoning), or with both (no thinking). Otherwise the model writes them.

Token ids mark the reasoning, never the text: a tag quoted in ordinary characters ends nothing. The text is cut where
the tokens in front of the cut end, so nothing is decoded apart from its neighbours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Tokenizer

from npu_runner.request.prompt_inputs import ReasoningTokens, Thinking

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""The tags of all families."""


def find_reasoning_tokens(tokenizer: Tokenizer) -> ReasoningTokens | None:
    """The pair of PAIRS that the tokenizer has as single tokens; None: it has none."""
    ids = {token.content: token_id for token_id, token in tokenizer.get_added_tokens_decoder().items()}
    for start, end in PAIRS:
        if start in ids and end in ids:
            return ReasoningTokens(start=start, end=end, start_id=ids[start], end_id=ids[end])
    return None


def thinking_after(token_ids: Sequence[int], tokens: ReasoningTokens, tokenizer: Tokenizer) -> Thinking:
    """Where a prompt ends. A tag further up, with more than white space behind it, belongs to an earlier turn."""
    for token_id in reversed(token_ids):
        if token_id == tokens.start_id:
            return "open"
        if token_id == tokens.end_id:
            return "closed"
        if not is_blank(token_id, tokenizer):
            break
    return "unsaid"


def is_blank(token_id: int, tokenizer: Tokenizer) -> bool:
    """Whether a token is white space alone."""
    return not tokenizer.decode([token_id], skip_special_tokens=False).strip()


class SplitAnswer(NamedTuple):
    """`reasoning`: None where the model did not think. The tags are in neither text and are not counted."""

    reasoning: str | None
    content: str
    num_reasoning_tokens: int


def split_answer(text: str, token_ids: Sequence[int], *, thinking: Thinking | None, tokens: ReasoningTokens | None,
                 tokenizer: Tokenizer, skip_special_tokens: bool = True) -> SplitAnswer:
    """`text`: what `token_ids` decode to, with or without special tokens, or as much of it as precedes a stop string.

    `thinking`: where the prompt ends; with None, or no `tokens`, all is content. An answer that never ends its
    reasoning is reasoning as a whole.
    """
    span = None
    if thinking is not None and tokens is not None:
        span = _reasoning_span(token_ids, thinking, tokens, tokenizer)
    if span is None:
        return SplitAnswer(None, text, 0)
    start, end = span

    def num_chars(num_tokens: int) -> int:
        if num_tokens >= len(token_ids):
            return len(text)
        return _length_within(text, tokenizer.decode(list(token_ids[:num_tokens]), skip_special_tokens))

    return SplitAnswer(text[num_chars(start): num_chars(end)], text[num_chars(end + 1):], end - start)


def _reasoning_span(token_ids: Sequence[int], thinking: Thinking, tokens: ReasoningTokens,
                    tokenizer: Tokenizer) -> tuple[int, int] | None:
    """The tokens [start, end) between the tags; token `end`, if there is one, is the closing tag."""
    num_blank = next((n for n, token in enumerate(token_ids) if not is_blank(token, tokenizer)), len(token_ids))
    has_start = num_blank < len(token_ids) and token_ids[num_blank] == tokens.start_id
    start = num_blank + 1 if has_start else 0
    end = next((n for n in range(start, len(token_ids)) if token_ids[n] == tokens.end_id), None)
    if not has_start and thinking != "open" and (thinking == "closed" or end is None):
        return None
    return start, len(token_ids) if end is None else end


def _length_within(text: str, beginning: str) -> int:
    """Characters of `text` that `beginning` makes; a decoder that looks ahead may have changed its last ones."""
    if text.startswith(beginning):
        return len(beginning)
    pairs = enumerate(zip(text, beginning, strict=False))
    return next((at for at, (ours, theirs) in pairs if ours != theirs), min(len(text), len(beginning)))
