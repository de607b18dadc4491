"""Builds matchers beside the sampler: one thread for each of a few at a time, kept by the grammar's text.

A matcher knows which tokens may come next. They do not pickle, so they are made where tokens are sampled: on rank 0.
Knows nothing of slots, steps or devices.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
from tokenizers import Tokenizer

from npu_runner.errors import RequestError

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

_MOST_KEPT = 256
_NUM_THREADS = 2  # what compiles lets go of the interpreter's lock


class Matchers:
    """For one tokenizer and model. `num_words`: of 32 bits, what one row's mask takes."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]):
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._threads: ThreadPoolExecutor | None = None
        self._tokens: Future[LLTokenizer] | None = None
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()

    def begin(self) -> None:
        """Begin to build what all matchers share, a table of the model's tokens. Does not wait.

        Better while nobody waits for an answer: llguidance holds the interpreter's lock while it does so, a second or
        more where there are 150,000 tokens. Grammars themselves are built beside everything else.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammars")
        if self._tokens is None:
            self._tokens = self._threads.submit(self._make_tokens)

    def prepare(self, grammar: str) -> Future[LLMatcher]:
        """Begin to build the matcher of `grammar`; whoever follows it takes a copy. Does not wait."""
        self.begin()
        assert self._threads is not None, "begin has made them"
        assert self._tokens is not None, "begin has made them"
        if grammar not in self._kept:
            self._kept[grammar] = self._threads.submit(self._build, self._tokens, grammar)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(grammar)
        return self._kept[grammar]

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], masks_CW: np.ndarray) -> None:
        """Write the mask of each (matcher, row): a bit per token, the lowest bit first, 1 for what may come next.

        masks_CW: int32 (C, num_words). Whether a matcher failed meanwhile is for it to say.
        """
        from llguidance import LLExecutor

        if self._executor is None:
            self._executor = LLExecutor()
        assert masks_CW.dtype == np.int32, f"{masks_CW.dtype} is no mask"
        assert masks_CW.flags["C_CONTIGUOUS"], "masks lie one behind the other"
        num_rows, num_words = masks_CW.shape
        self._executor.unsafe_compute_mask_ptr(list(matchers), masks_CW.ctypes.data, 4 * num_words, num_rows)

    def close(self) -> None:
        """End the threads, with what they have not begun. May be called twice; nothing is prepared any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _make_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise RequestError("structured_outputs: the model has no end token, so no answer could end",
                               "unsupported_parameter", "structured_outputs")
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    @staticmethod
    def _build(tokens: Future[LLTokenizer], grammar: str) -> LLMatcher:
        from llguidance import LLMatcher

        return LLMatcher(tokens.result(), grammar, log_level=0)
