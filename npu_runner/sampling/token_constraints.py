"""Which tokens may come next in one sequence: those of its grammar, those that its request allows, or the end of its
thinking. Lives on the host.

Constrained rows get their last token before their next mask is made, as rows with bad words do. A sequence that returns
is rebuilt from all its tokens. Knows no tensors.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from npu_runner.grammars.matchers import Matchers, PreparedMatcher, unfollowed
from npu_runner.request.prompt_inputs import ReasoningTokens, Thinking
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from llguidance import LLMatcher


class _Phase(enum.Enum):
    START = "may begin to think"
    THINKING = "thinks"
    ANSWER = "answers"
    OVER = "has ended, or failed"


class TokenConstraint:
    """One sequence's. `problem`: why it cannot be followed any more; its next token is none."""

    def __init__(self, params: SamplingParams, *, thinking: Thinking | None, tokens: ReasoningTokens | None,
                 eos_token_ids: Sequence[int], output_token_ids: Sequence[int], grammar: PreparedMatcher | None):
        self.problem: str | None = None
        self.grammar = grammar
        self._tokens = tokens if thinking is not None else None
        self._eos_token_ids = frozenset(eos_token_ids)
        self._most_thinking = params.max_thinking_tokens
        self._allowed_ids = params.allowed_token_ids
        self._allowed_W: np.ndarray | None = None
        """The same as a mask, from its first use on."""
        self._num_thought = 0
        self._has_grammar = grammar is not None
        self._matcher: LLMatcher | None = None
        """A copy of the built one, from the first token of the answer on."""
        self._unfollowed: list[int] = []
        """Tokens of the answer that the matcher has not consumed yet."""
        self._phase = _Phase.ANSWER
        if self._tokens is not None and thinking != "closed":
            self._phase = _Phase.THINKING if thinking == "open" else _Phase.START
        for token in output_token_ids:
            self.observe(token)

    def observe(self, token: int) -> None:
        """The next token, in order. Less than 0: there is none, and no more follow."""
        if token < 0:
            self._phase = _Phase.OVER
        elif self._phase is _Phase.START and self._tokens is not None and token == self._tokens.start_id:
            self._phase = _Phase.THINKING
        elif self._phase is _Phase.THINKING and self._tokens is not None:
            self._num_thought += 1
            if token == self._tokens.end_id:
                self._phase = _Phase.ANSWER
        elif self._has_grammar and self._phase is not _Phase.OVER:
            # After EOS the grammar is off; the token of the step already launched is dropped.
            self._phase = _Phase.OVER if token in self._eos_token_ids else _Phase.ANSWER
            self._unfollowed.append(token)

    def must_know(self, num_untold: int) -> bool:
        """Whether its next mask may depend on the last `num_untold` tokens, which it has not observed yet."""
        if self._has_grammar:
            return self._phase is not _Phase.OVER
        most = self._most_thinking
        return self.may_think and most is not None and self._num_thought + num_untold >= most

    @property
    def restricts(self) -> bool:
        """Whether not every token may come next."""
        if self._allowed_ids is not None:
            return self._phase is not _Phase.OVER
        if self._phase is _Phase.THINKING:
            return self._has_grammar or self._is_spent
        return self._has_grammar and self._phase is not _Phase.OVER

    @property
    def may_think(self) -> bool:
        """Whether what its next tokens mean depends on where it is in its thinking."""
        return self._phase in (_Phase.START, _Phase.THINKING)

    @property
    def _is_spent(self) -> bool:
        return self._most_thinking is not None and self._num_thought >= self._most_thinking

    def matcher(self) -> LLMatcher | None:
        """The matcher after all tokens so far; None if no mask of a grammar is needed. Waits until it is built; a
        sequence waits here only if its matcher was evicted meanwhile."""
        if self.grammar is None or self._phase is _Phase.THINKING or self.problem is not None:
            return None
        if self._matcher is None:
            failure = self.grammar.failure()
            if failure is not None:
                self.problem = failure.message
                return None
            self._matcher = self.grammar.copy()
        if self._unfollowed:
            self._matcher.consume_tokens(self._unfollowed)
            self._unfollowed = []
        self.record_failure()
        return None if self.problem else self._matcher

    def forced_tokens(self) -> list[int]:
        """The text that must come next, in the tokens that the tokenizer makes of it; empty where texts differ.

        Masks allow other tokens for the same text, so another one may be sampled.
        """
        matcher = self.matcher() if self._phase is _Phase.ANSWER else None
        if matcher is None or matcher.is_stopped() or not matcher.compute_ff_bytes():
            return []
        # These are what the line above has found: where nothing forces tokens, the library looks for no text itself.
        return [int(token) for token in matcher.compute_ff_tokens()]

    def record_failure(self) -> None:
        """Take over what has gone wrong in the matcher, before its mask or with it."""
        if self._matcher is not None and self._matcher.is_error():
            self.problem = unfollowed(self._matcher.get_error().partition("\n")[0]).message

    def adjust(self, words_W: np.ndarray) -> None:
        """Change the mask that the matcher wrote, or write one where there was none. uint32, lowest bit first."""
        if self.problem is not None:
            words_W[:] = 0
        elif self._phase is _Phase.THINKING:
            self._adjust_thinking(words_W)
        elif not self._has_grammar:
            words_W[:] = 0xFFFF_FFFF
        elif self._tokens is not None:
            _set_bit(words_W, self._tokens.start_id, self._phase is _Phase.START)
            _set_bit(words_W, self._tokens.end_id, False)  # in the text it would be taken for the reasoning's end
        if self._allowed_ids is not None:
            if self._allowed_W is None:
                self._allowed_W = _mask(self._allowed_ids, len(words_W))
            words_W &= self._allowed_W

    def _adjust_thinking(self, words_W: np.ndarray) -> None:
        assert self._tokens is not None, "only a row that thinks comes here"
        words_W[:] = 0 if self._is_spent else 0xFFFF_FFFF
        if self._is_spent:
            _set_bit(words_W, self._tokens.end_id, True)
            return
        for token in self._eos_token_ids:
            _set_bit(words_W, token, False)  # the answer comes first


class ConstrainedRows:
    """The constraints of a sampler's slots, and the masks of a step."""

    def __init__(self, matchers: Matchers | None, tokens: ReasoningTokens | None, eos_token_ids: Sequence[int]):
        self._matchers = matchers
        self._tokens = tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._of_slot: dict[int, TokenConstraint] = {}

    def add(self, slot: int, params: SamplingParams, thinking: Thinking | None,
            output_token_ids: Sequence[int]) -> None:
        """For a slot that has none; nothing where the sequence is free."""
        has_budget = params.max_thinking_tokens is not None and self._tokens is not None and thinking is not None
        structured = params.structured_outputs
        if structured is None and not has_budget and params.allowed_token_ids is None:
            return
        grammar = None
        if structured is not None:
            assert isinstance(structured, StructuredOutputsParams), f"{structured!r} was not resolved"
            assert structured.compiled, "structured_outputs are resolved before they are queued"
            assert self._matchers is not None, "this sampler follows no grammars"
            grammar = self._matchers.prepare(structured.compiled)
            grammar.num_users += 1
        self._of_slot[slot] = TokenConstraint(
            params, thinking=thinking, tokens=self._tokens, eos_token_ids=self._eos_token_ids,
            output_token_ids=output_token_ids, grammar=grammar)

    def remove(self, slot: int) -> None:
        constraint = self._of_slot.pop(slot, None)
        if constraint is not None and constraint.grammar is not None:
            constraint.grammar.num_users -= 1

    def rows(self, host_slots: np.ndarray) -> list[tuple[int, TokenConstraint]]:
        """(row, constraint) of a step's rows that have one."""
        if not self._of_slot:
            return []
        return [(row, self._of_slot[slot]) for row, slot in enumerate(host_slots.tolist()) if slot in self._of_slot]

    def forced_tokens(self, host_slots: np.ndarray, most: int) -> list[list[int]]:
        """The forced tokens of each row of a step, at most `most` each."""
        forced: list[list[int]] = [[] for _ in host_slots]
        rows = [(row, constraint) for row, constraint in self.rows(host_slots) if constraint.grammar is not None]
        if rows:
            assert self._matchers is not None, "this sampler follows no grammars"
            with self._matchers.counting([each.grammar for _, each in rows if each.grammar is not None]):
                for row, constraint in rows:
                    forced[row] = constraint.forced_tokens()[:most]
        return forced

    def write_masks(self, constraints: Sequence[TokenConstraint], masks_CW: np.ndarray,
                    drafts: Sequence[list[int]] | None = None) -> None:
        """A mask for each, as `Matchers.fill` has them; what failed has one without a bit, and a `problem`.

        `drafts`: of each the tokens that may come next. Below its mask it has one for each of them: what may come
        behind it, or no bit behind one that may not come itself.
        """
        counts = [1] * len(constraints) if drafts is None else [1 + len(tokens) for tokens in drafts]
        firsts = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        grammars = [constraint.grammar for constraint in constraints if constraint.grammar is not None]
        followed = list({id(grammar): grammar for grammar in grammars}.values())
        if followed:
            assert self._matchers is not None, "this sampler follows no grammars"
            with self._matchers.counting(followed):
                asked = [(matcher, place) for place, constraint in enumerate(constraints)
                         if (matcher := constraint.matcher())]
                if asked and drafts is None:
                    self._matchers.fill(asked, masks_CW)
                elif asked and drafts is not None:
                    masks_CW.fill(0)
                    self._matchers.fill_behind([(matcher, firsts[place], drafts[place]) for matcher, place in asked],
                                               masks_CW)
        for constraint, first, count in zip(constraints, firsts, counts, strict=True):
            constraint.record_failure()
            for words_W in masks_CW.view(np.uint32)[first : first + count]:
                constraint.adjust(words_W)


def _mask(token_ids: Sequence[int], num_words: int) -> np.ndarray:
    words_W = np.zeros(num_words, dtype=np.uint32)
    ids = np.asarray(token_ids, dtype=np.uint32)
    np.bitwise_or.at(words_W, ids // 32, np.left_shift(np.uint32(1), ids % 32))
    return words_W


def _set_bit(words_W: np.ndarray, token: int, value: bool) -> None:
    bit = np.uint32(1 << (token % 32))
    if value:
        words_W[token // 32] |= bit
    else:
        words_W[token // 32] &= ~bit
