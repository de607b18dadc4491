"""Whether a request leaves any token at its start, as the sampler decides it. Knows no logits, devices or steps.

Only what follows from the request is looked at: its rule's first mask, and the text that the rule forces from there on.
"""

from __future__ import annotations

import numpy as np

from npu_runner.engine.generation import NOTHING_LEFT
from npu_runner.errors import RequestError
from npu_runner.grammars.matchers import Matchers
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.request.structured_outputs import StructuredOutputsParams
from npu_runner.sampling.logit_rules import logit_rules
from npu_runner.sampling.token_constraints import ConstrainedRows, TokenConstraint
from npu_runner.strategies import OpenedCheckpoint

# V vocabulary, W words of 32 tokens


class FirstMasks:
    """For requests to one checkpoint, one after the other."""

    def __init__(self, checkpoint: OpenedCheckpoint):
        self._vocab_size = checkpoint.model_config.vocab_size
        self._ends = checkpoint.end_token_ids
        self._matchers = Matchers(checkpoint.processor.tokenizer, self._vocab_size, self._ends)
        self._rows = ConstrainedRows(self._matchers, checkpoint.processor.reasoning_tokens, self._ends)

    def check(self, prompt: PromptInputs, params: SamplingParams) -> None:
        """Raises RequestError where the rule cannot be followed, and with code no_token_left where no token is left.

        params: as `resolve_params` returns them.
        """
        if params.structured_outputs is None and params.allowed_token_ids is None and not params.bad_words_token_ids:
            return
        self._rows.add(0, params, prompt.thinking, [])
        try:
            for _, constraint in self._rows.rows(np.zeros(1, dtype=np.int64)):
                self._check_rule(constraint, params)
        finally:
            self._rows.remove(0)

    def close(self) -> None:
        """End the threads that build rules."""
        self._matchers.close()

    def _check_rule(self, constraint: TokenConstraint, params: SamplingParams) -> None:
        failure = constraint.grammar.failure() if constraint.grammar is not None else None
        if failure is not None:
            raise failure
        self._check_mask(constraint, params, 0)
        if constraint.grammar is None or constraint.may_think or not params.min_tokens:
            return
        structured = params.structured_outputs
        assert isinstance(structured, StructuredOutputsParams), "it was resolved with the request"
        if structured.choice is not None and params.min_tokens > max(len(text.encode()) for text in structured.choice):
            raise _nothing_left()  # a token has a byte at least, and the end is banned
        matcher = constraint.matcher()
        num_bytes = len(matcher.compute_ff_bytes()) if matcher is not None else 0
        for token in constraint.forced_tokens():
            constraint.observe(token)
        if num_bytes:  # no more tokens than bytes make this text
            self._check_mask(constraint, params, num_bytes)

    def _check_mask(self, constraint: TokenConstraint, params: SamplingParams, num_tokens: int) -> None:
        """After at most `num_tokens` tokens."""
        words_W = np.full((1, -(-self._vocab_size // 32)), -1, dtype=np.int32)
        self._rows.write_masks([constraint], words_W)
        if constraint.problem is not None:
            raise RequestError(constraint.problem, "invalid_structured_outputs", "structured_outputs")
        allowed_V = np.unpackbits(words_W.view(np.uint8), bitorder="little")[: self._vocab_size].astype(np.bool_)
        rules = logit_rules(params, self._ends)
        allowed_V[rules.tokens[np.isneginf(rules.values)]] = False
        if rules.banned_until > num_tokens:
            allowed_V[rules.bans] = False
        if not allowed_V.any():
            raise _nothing_left()


def _nothing_left() -> RequestError:
    return RequestError(str(NOTHING_LEFT.error), str(NOTHING_LEFT.code))
