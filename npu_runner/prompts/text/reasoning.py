"""Which tokens a checkpoint thinks between, and where a prompt leaves it. Knows token ids, no templates by name.

Checkpoints that think have two tokens of their own for it. A chat template may write the first one at the end of the
prompt (the answer then begins inside the reasoning), both (it is not to think), or neither (the model writes them).
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from npu_runner.request.prompt_inputs import ReasoningTokens, Thinking

PAIRS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""The tags that are in use, as families write them."""


def find_reasoning_tokens(tokenizer: Tokenizer) -> ReasoningTokens | None:
    """Of the pairs that are in use, the one that the tokenizer has as single tokens; None: it has none."""
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
