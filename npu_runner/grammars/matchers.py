"""Builds matchers beside the sampler: one thread for each of a few at a time, kept by the grammar's text and by bytes.

A matcher knows which tokens may come next. They do not pickle, so they are made where tokens are sampled: on rank 0.
The library reports no sizes. A matcher counts as the growth of resident memory while it was built and while its copies,
which share its automaton, computed masks. The minimum is an estimate from its grammar's length. Knows nothing of slots,
steps or devices.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from npu_runner.errors import RequestError
from npu_runner.grammars.stack import GRAMMAR_STACK_BYTES, NUM_THREADS, parser_limits, thread_stacks
from npu_runner.request.limits import LIMITS

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

# Measured: 14 to 140 bytes a character, whatever the kind of rule, and less than 0.2 MB where there are few.
_LEAST_BYTES, _BYTES_A_CHARACTER = 256 << 10, 160
_CODE = "invalid_structured_outputs"
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Rule = tuple[int, str]
"""A number to speak of it, and the grammar."""


def expected_bytes(grammar: str) -> int:
    """The memory that a matcher is expected to take at most before its first use."""
    return _LEAST_BYTES + _BYTES_A_CHARACTER * len(grammar)


def unfollowed(reason: str) -> RequestError:
    """The error of a row whose rule the library gives up."""
    return RequestError(f"structured_outputs: the rule cannot be followed with this model's tokens ({reason}); make it "
                        "smaller or simpler", _CODE, "structured_outputs")


class _Built(NamedTuple):
    matcher: LLMatcher
    num_bytes: int


class PreparedMatcher:
    """One grammar's, built or being built. `num_bytes`: what it takes, as far as that is known; `num_users`: sequences
    that follow it now."""

    def __init__(self, future: Future[_Built], num_bytes: int):
        self.future = future
        self.num_bytes = num_bytes
        self.num_users = 0
        self.is_kept = True

    def failure(self) -> RequestError | None:
        """Why there is none; waits until it is built."""
        error = self.future.exception()
        return error if error is None or isinstance(error, RequestError) else unfollowed(_in_short(error))

    def copy(self) -> LLMatcher:
        """For one sequence, from the grammar's start; there is no failure."""
        return self.future.result().matcher.deep_copy()


class Matchers:
    """For one tokenizer and model. `num_words`: of 32 bits, what one row's mask takes. `max_bytes`: of cached matchers;
    those in use are not evicted."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int],
                 max_bytes: int = LIMITS.max_matcher_bytes):
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._max_bytes = max_bytes
        self._threads: ThreadPoolExecutor | None = None
        self._tokens: Future[LLTokenizer] | None = None
        self._executor: LLExecutor | None = None
        self._kept: OrderedDict[str, PreparedMatcher] = OrderedDict()
        self.kept_bytes = 0
        self._not_counted: list[PreparedMatcher] = []
        """Their memory has not been measured yet."""
        self.asked: dict[int, PreparedMatcher] = {}
        """By number: those that `answers` has not told of."""

    def start(self) -> None:
        """Begin to build what all matchers share, a table of the model's tokens. Does not wait.

        Better while no request waits: llguidance holds the GIL meanwhile, a second or more for 150,000 tokens. Grammars
        themselves are built beside everything else.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        if self._tokens is None:
            with thread_stacks(GRAMMAR_STACK_BYTES):  # a thread is started by what it is given to do
                self._tokens = self._threads.submit(self._make_tokens)

    def prepare(self, grammar: str) -> PreparedMatcher:
        """Begin to build the matcher of `grammar`; each user copies it. Does not wait."""
        self.start()
        assert self._threads is not None, "begin has made them"
        assert self._tokens is not None, "begin has made them"
        if grammar not in self._kept:
            with thread_stacks(GRAMMAR_STACK_BYTES):
                future = self._threads.submit(self._build, self._tokens, grammar)
            self._kept[grammar] = PreparedMatcher(future, 0)
            self._count(self._kept[grammar], expected_bytes(grammar))
            self._not_counted.append(self._kept[grammar])
        self._kept.move_to_end(grammar)
        prepared = self._kept[grammar]
        self._put_out_what_is_too_much()
        return prepared

    def ask(self, rules: Sequence[Rule]) -> None:
        """Begin to build them. `answers` reports each once per request."""
        for number, grammar in rules:
            self.asked[number] = self.prepare(grammar)

    def answers(self, patience: float = 0.0) -> dict[int, RequestError | None]:
        """Finished builds that were not reported yet, by number: None, or the error. Waits for all, up to `patience`
        seconds."""
        if not self.asked:
            return {}
        if patience:
            wait([prepared.future for prepared in self.asked.values()], patience)
        done = {number: prepared.failure() for number, prepared in self.asked.items() if prepared.future.done()}
        for number in done:
            del self.asked[number]
        return done

    @contextmanager
    def counting(self, followed: Sequence[PreparedMatcher]) -> Iterator[None]:
        """Within this context, the automatons of these matchers may grow."""
        before = _resident_bytes()
        yield
        grown = _resident_bytes() - before
        if grown > 0:
            for prepared in followed:
                self._count(prepared, grown // len(followed))
            self._put_out_what_is_too_much()

    def fill(self, matchers: Sequence[tuple[LLMatcher, int]], masks_CW: np.ndarray) -> None:
        """Write the mask of each (matcher, row): a bit per token, the lowest bit first, 1 for what may come next.

        masks_CW: int32 (C, num_words). Whether a matcher failed meanwhile is for it to say.
        """
        self._fill(matchers, [row for _, row in matchers], masks_CW, "unsafe_compute_mask_ptr")

    def fill_behind(self, matchers: Sequence[tuple[LLMatcher, int, list[int]]], masks_CW: np.ndarray) -> None:
        """`fill`, of each (matcher, row, tokens) also what may come behind each of the tokens, in the rows below.

        Behind the first token that may not come itself nothing is written. The matchers stay where they are.
        """
        self.fill([(matcher, row) for matcher, row, tokens in matchers if not tokens], masks_CW)
        behind = [each for each in matchers if each[2]]  # the library takes no others
        rows = [row + place for _, row, tokens in behind for place in range(1 + len(tokens))]
        self._fill(behind, rows, masks_CW, "unsafe_compute_mask_ptr_with_draft_token")

    def _fill(self, matchers: Sequence[tuple[Any, ...]], rows: Sequence[int], masks_CW: np.ndarray, how: str) -> None:
        from llguidance import LLExecutor

        if not matchers:
            return
        if self._executor is None:
            self._executor = LLExecutor()
        assert masks_CW.dtype == np.int32, f"{masks_CW.dtype} is no mask"
        assert masks_CW.flags["C_CONTIGUOUS"], "masks lie one behind the other"
        num_rows, num_words = masks_CW.shape
        getattr(self._executor, how)(list(matchers), masks_CW.ctypes.data, 4 * num_words, num_rows)
        if len(self._eos_token_ids) > 1 and not _accepts_several_ends():
            _allow_every_end(masks_CW, rows, self._eos_token_ids)

    def close(self) -> None:
        """End the threads, with what they have not begun. May be called twice; nothing is prepared any more."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _count(self, prepared: PreparedMatcher, more: int) -> None:
        prepared.num_bytes += more
        self.kept_bytes += more if prepared.is_kept else 0

    def _count_what_is_built(self) -> None:
        waiting, self._not_counted = self._not_counted, []
        for prepared in waiting:
            if not prepared.future.done():
                self._not_counted.append(prepared)
            elif prepared.failure() is None:
                self._count(prepared, max(0, prepared.future.result().num_bytes - prepared.num_bytes))

    def _put_out_what_is_too_much(self) -> None:
        """Evict the least recently used rules. One that is being built or followed stays, because it would be built
        twice, and its memory is in use anyway."""
        self._count_what_is_built()
        for grammar, prepared in list(self._kept.items()) if self.kept_bytes > self._max_bytes else ():
            if not prepared.num_users and prepared.future.done():
                del self._kept[grammar]
                prepared.is_kept = False
                self.kept_bytes -= prepared.num_bytes
            if self.kept_bytes <= self._max_bytes:
                return

    def _make_tokens(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        if not self._eos_token_ids:
            raise RequestError("structured_outputs: the model has no end token, so no answer could end",
                               "unsupported_parameter", "structured_outputs")
        ends = self._eos_token_ids if _accepts_several_ends() else self._eos_token_ids[0]
        return LLTokenizer(self._tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=ends)

    @staticmethod
    def _build(tokens: Future[LLTokenizer], grammar: str) -> _Built:
        """With the first mask, by which its automaton has begun to grow: that takes longer than all others."""
        from llguidance import LLMatcher

        table = tokens.result()
        before = _resident_bytes()
        matcher = LLMatcher(table, grammar, log_level=0, limits=parser_limits())
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_bitmask()
        if first.is_error():
            raise unfollowed(first.get_error().partition("\n")[0])
        return _Built(matcher, _resident_bytes() - before)


def _accepts_several_ends() -> bool:
    """Whether the library's masks can allow more than one end token: from llguidance 1.7 on."""
    from llguidance import LLTokenizer

    return hasattr(LLTokenizer, "eos_tokens")


def _allow_every_end(masks_CW: np.ndarray, rows: Sequence[int], eos_token_ids: Sequence[int]) -> None:
    """In these rows, allow all end tokens where the first is allowed: the only one that an older library knows.

    A grammar cannot name it, so its bit says that the answer may end here.
    """
    words_CW = masks_CW.view(np.uint32)
    first, *others = eos_token_ids
    ending = [row for row in rows if words_CW[row, first // 32] >> np.uint32(first % 32) & 1]
    for token in others:
        words_CW[ending, token // 32] |= np.uint32(1 << token % 32)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
