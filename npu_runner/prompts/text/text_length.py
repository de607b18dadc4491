"""Refuses text that cannot fit into the model's context before all of it is tokenized. Knows nothing of chats."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tokenizers import Tokenizer

from npu_runner.errors import RequestError

_PIECE_CHARS = 1 << 16
# A text that has this many characters for each token of the context is looked at more closely: few languages have more.
_USUAL_CHARS = 4
# Cutting a text into pieces adds a few tokens at each cut: so much more than the limit is no accident of cutting.
_CLEARLY_MORE = 1.25


class TextLength:
    """Whether prompts are shorter than `max_model_len` tokens."""

    def __init__(self, tokenizer: Tokenizer, max_model_len: int):
        self._tokenizer = tokenizer
        self.max_model_len = max_model_len

    def check(self, texts: Sequence[str], *, is_cut: bool = False) -> None:
        """Raises RequestError for texts that have more tokens than the context whatever their tokens are.

        No token stands for more characters than the longest one has. Of a text that is shorter than that, but longer
        than text usually is, the pieces are counted until they are clearly too many. `is_cut`: the end will be kept
        alone, so that only text too long to tokenize is refused.
        """
        num_chars = sum(map(len, texts))
        if num_chars <= self.max_model_len * _USUAL_CHARS:
            return
        limit = self.max_model_len * self.longest_token
        if num_chars > limit:
            raise RequestError(
                f"the text has {num_chars} characters; at most {limit} can fit into {self.max_model_len} tokens "
                f"(max_model_len) of {self.longest_token} characters; shorten it",
                code="prompt_too_long",
            )
        if not is_cut:
            self._check_pieces(texts)

    def check_tokens(self, num_tokens: int) -> None:
        """Raises RequestError for a prompt that leaves no room for an answer."""
        if num_tokens >= self.max_model_len:
            raise RequestError(
                f"the prompt has {num_tokens} tokens, the model takes {self.max_model_len} with at least one "
                f"generated; shorten it, send smaller images or raise max_model_len",
                code="prompt_too_long",
            )

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token; where tokens are bytes, one character of theirs is a byte."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)))

    def _check_pieces(self, texts: Sequence[str]) -> None:
        num_tokens, most = 0, int(self.max_model_len * _CLEARLY_MORE)
        for text in texts:
            for start in range(0, len(text), _PIECE_CHARS):
                piece = text[start : start + _PIECE_CHARS]
                num_tokens += len(self._tokenizer.encode(piece, add_special_tokens=False).ids)
                if num_tokens > most:
                    raise RequestError(
                        f"the text has more than {self.max_model_len} tokens (max_model_len); shorten it",
                        code="prompt_too_long",
                    )
