"""A request until all its completions have ended, and each of them while it grows: its tokens, its text, their log
probabilities and what ends it; and the short way for rows that only grow.

Knows nothing of steps or of other requests.

S slots, B rows of a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from npu_runner.core.sequence import Sequence
from npu_runner.engine.detokenizer import detokenizer_for
from npu_runner.request.logprobs import CompactLogprobs, Describe, PromptLogprobs
from npu_runner.request.outputs import (
    REPETITION_DETECTED,
    CompletionOutput,
    FinishReason,
    RequestMetrics,
    RequestOutput,
)
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.repetition_detection import RepetitionDetectionParams
from npu_runner.request.repetition_detector import RepetitionDetector
from npu_runner.request.sampling_params import num_top_logprobs
from npu_runner.runner.base import StepLogprobs
from npu_runner.sampling.sampler import ALL_BANNED, NO_TOKEN


class End(NamedTuple):
    """Why a completion is over; `error` says it in words where that is its own fault or the model's."""

    reason: FinishReason
    stop_reason: str | int | None = None
    error: str | None = None
    code: str | None = None


_LENGTH = End("length")
_REPETITION = End("length", REPETITION_DETECTED)
_NOT_A_NUMBER = End("error", error="the model's output is not a number (NaN or infinity): the weights are broken, or "
                                   "too much for the dtype; try dtype float32")
NOTHING_LEFT = End("error", error="no token is left: what structured_outputs, tool_choice or max_thinking_tokens "
                   "allow next is banned by min_tokens, bad_words, no_repeat_ngram_size or "
                   "allowed_token_ids, or the grammar has no way to go on", code="no_token_left")


def not_followed(why: str, code: str = "invalid_structured_outputs") -> End:
    """The end of a completion whose rule cannot be built, or not be followed any further."""
    return End("error", error=why, code=code)


class Generation:
    """`end_tokens` end it where stops are allowed. Where no stop string is looked for, the text is decoded at the end.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer, end_tokens: frozenset[int], vocab_size: int = 0):
        params = sequence.params
        self.sequence = sequence
        self.logprobs = None if params.logprobs is None else LogprobsRecord(
            num_top_logprobs(params.logprobs, vocab_size))
        self.pooled: np.ndarray | None = None
        self._num_states = 0
        self.finished: CompletionOutput | None = None
        self._tokenizer = tokenizer
        self.end_tokens = end_tokens
        self._restart()
        self._most_tokens = (sequence.max_num_tokens or sys.maxsize) - sequence.num_prompt_tokens

    @property
    def is_watched(self) -> bool:
        """Whether each of its tokens is looked at, whatever it is."""
        return self._detokenizer is not None or self.logprobs is not None or self._detector is not None

    @property
    def num_left(self) -> int:
        """Tokens that it may still have."""
        return self._most_tokens - len(self.sequence.output_token_ids)

    def append(self, token: int, logprobs: StepLogprobs | None, row: int) -> End | None:
        """One more token, of a step's row; returns what ends the completion with it."""
        if token < 0:
            return _NOT_A_NUMBER if token == NO_TOKEN else NOTHING_LEFT
        sequence = self.sequence
        sequence.append(token)
        if self.logprobs is not None and logprobs is not None:
            self.logprobs.append(logprobs, row)
        return self._end_with(token, len(sequence.output_token_ids))

    def _restart(self) -> None:
        """Forget all tokens that it was told."""
        params = self.sequence.params
        detection = params.repetition_detection
        assert detection is None or isinstance(detection, RepetitionDetectionParams), f"{detection!r} was not checked"
        self._has_end_token = False
        self._detokenizer = detokenizer_for(params, self._tokenizer) if params.stop else None
        self._detector = None if detection is None else RepetitionDetector(detection)

    def rollback(self) -> None:
        """Back to what is booked whole. An interrupt may have come between any two lines of `append`, or before an end
        was handled. Then the token is dropped, and sampled again."""
        token_ids = self.sequence.output_token_ids
        if self.logprobs is not None:
            del token_ids[self.logprobs.num_tokens :]
        self.finished = self.pooled = None
        self._num_states = 0
        while (num_kept := self._report_again()) < len(token_ids):
            del token_ids[num_kept:]
        if self.logprobs is not None:
            self.logprobs.cut(len(token_ids))

    def _report_again(self) -> int:
        """Ask of each token once more whether it ends the completion, as if none had been; those before one that does,
        or all."""
        self._restart()
        for place, token in enumerate(self.sequence.output_token_ids):
            if self._end_with(token, place + 1) is not None:
                return place
        return len(self.sequence.output_token_ids)

    def _end_with(self, token: int, num_tokens: int) -> End | None:
        """The end that this token, of number `num_tokens`, brings; None if it brings none. Call it for each token in
        order."""
        params = self.sequence.params
        is_repetition = self._detector is not None and self._detector.append(token)
        if token in self.end_tokens and num_tokens >= params.min_tokens:
            self._has_end_token = True
            return End("stop", token if token in params.stop_token_ids else None)
        if self._detokenizer is not None:
            stop = self._detokenizer.append([token], stops_allowed=num_tokens >= params.min_tokens)
            if stop is not None:
                return End("stop", stop)
        if num_tokens >= self._most_tokens:
            return _LENGTH
        return _REPETITION if is_repetition and num_tokens >= params.min_tokens else None

    def put_states(self, place: int, states_LD: np.ndarray) -> None:
        """Store the hidden states of the tokens from `place` on. A restarted sequence stores them again."""
        end = place + len(states_LD)
        if self.pooled is None:
            self.pooled = np.empty((self.sequence.num_prompt_tokens, states_LD.shape[1]), dtype=np.float32)
        if end > len(self.pooled):
            grown = np.empty((max(end, len(self.pooled) * 5 // 4), states_LD.shape[1]), dtype=np.float32)
            grown[: len(self.pooled)] = self.pooled
            self.pooled = grown
        self.pooled[place:end] = states_LD
        self._num_states = end

    def hidden_states(self, layers: SequenceOf[int]) -> dict[int, np.ndarray] | None:
        """The stored states by layer, float32 (T, D), of all tokens but the last; `layers`: in the order in which they
        were stored."""
        if not self.sequence.params.return_hidden_states or self.pooled is None:
            return None
        count = self.sequence.num_prompt_tokens + len(self.sequence.output_token_ids) - 1
        assert self._num_states >= count, f"{self._num_states} hidden states of {count} tokens"
        parts = np.split(self.pooled[:count], len(layers), axis=1)
        return {layer: np.ascontiguousarray(part) for layer, part in zip(layers, parts, strict=True)}

    def put_label(self, place: int, records: np.ndarray) -> None:
        """Store the log probabilities of a label's tokens from `place` on, and of the end tokens behind its last one.
        `records`: see runner/token_results.py."""
        sequence = self.sequence
        if self.pooled is None:
            self.pooled = np.zeros(len(sequence.output_token_ids) + len(sequence.scored_ends), dtype=np.float32)
        first = place - sequence.num_prompt_tokens
        self.pooled[first : first + len(records)] = records[:, 0].view(np.float32)

    def receive_label(self) -> End:
        """Ends a label with its log-likelihood: float32 (1,), computed in float64."""
        assert self.pooled is not None, "the log probabilities come with the steps that compute them"
        values, num_tokens = self.pooled.astype(np.float64), len(self.sequence.output_token_ids)
        likelihood = values[:num_tokens].sum() + np.logaddexp.reduce(values[num_tokens:])
        return self.receive_pooled(np.array([likelihood], dtype=np.float32))

    def receive_pooled(self, values_W: np.ndarray) -> End:
        """Ends a prompt that is pooled with its W numbers, or with the states of its tokens, which are there by now."""
        pooling = self.sequence.pooling
        if pooling is not None and pooling.keeps_tokens:
            assert self.pooled is not None, "the states come with the steps that compute them"
            values_W = self.pooled
        if not np.isfinite(values_W).all():
            return _NOT_A_NUMBER
        self.pooled = values_W
        return End("stop")

    def finish_text(self) -> str:
        """End the text, and return all of it; nothing where no text is asked for."""
        params, token_ids = self.sequence.params, self.sequence.output_token_ids
        if not params.detokenize:
            return ""
        if self._detokenizer is None:
            is_hidden = self._has_end_token and not params.include_stop_str_in_output
            return self._tokenizer.decode(token_ids[: len(token_ids) - is_hidden], params.skip_special_tokens)
        if self._has_end_token:
            self._detokenizer.append_end_token(token_ids[-1])
        return self._detokenizer.finish()


class PlainRows:
    """Books a decode step's tokens for rows that nothing happens to but one more token: most of them, in most steps.

    For up to `max_num_seqs` slots; none of them is plain until `note` says so: after its prompt, and whenever more may
    have happened.
    """

    def __init__(self, max_num_seqs: int):
        self._is_watched_S = np.ones(max_num_seqs, dtype=np.bool_)
        self._num_left_S = np.zeros(max_num_seqs, dtype=np.int64)
        # Of whatever was ever noted: a token that ends one row sends others that bring it one by one as well.
        self._ends = {NO_TOKEN, ALL_BANNED}

    def record(self, slot: int, generation: Generation) -> None:
        """Record that results of this slot belong to `generation`, until its next prompt."""
        self._is_watched_S[slot] = generation.is_watched
        self._num_left_S[slot] = generation.num_left
        self._ends |= generation.end_tokens

    def reset(self) -> None:
        """Slots are given out anew."""
        self._is_watched_S[:] = True

    def book(self, slots_B: np.ndarray, sequences: SequenceOf[Sequence | None],
             tokens: SequenceOf[int] | SequenceOf[list[int]]) -> SequenceOf[int]:
        """Append each plain row's token of a step that was under way. Returns the rows to be booked one by one, in
        order: all rows, if some row has no token or several."""
        if not tokens or isinstance(tokens[0], list):
            return range(len(sequences))
        ids = cast("SequenceOf[int]", tokens)
        self._num_left_S[slots_B] -= 1
        is_other_B = self._is_watched_S[slots_B] | (self._num_left_S[slots_B] <= 0)
        if not self._ends.isdisjoint(ids):
            is_other_B |= np.fromiter((token in self._ends for token in ids), dtype=np.bool_, count=len(ids))
        others = np.flatnonzero(is_other_B).tolist()
        kept = list(sequences)
        for row in others:
            kept[row] = None
        for sequence, token in zip(kept, ids, strict=True):
            if sequence is not None:  # in a line of its own for each: a call would take as long as all of this
                sequence.output_token_ids.append(token)
                sequence.num_expected -= 1
        return others


class LogprobsRecord:
    """`num_top` most probable tokens beside each sampled one: 8 + 8 * num_top bytes a token."""

    def __init__(self, num_top: int):
        self._num_top = num_top
        self._packed = bytearray()

    @property
    def num_tokens(self) -> int:
        return len(self._packed) // self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return 4 * (2 + 2 * self._num_top)

    def cut(self, num_tokens: int) -> None:
        """Forget those behind the first `num_tokens`."""
        del self._packed[num_tokens * self._token_bytes :]

    def append(self, step: StepLogprobs, row: int) -> None:
        self._packed += step.packed(row, self._num_top)

    def finish(self, token_ids: SequenceOf[int], describe: Describe) -> CompactLogprobs:
        """All of it, with the sampled tokens."""
        records = np.frombuffer(self._packed, dtype=np.int32).reshape(-1, 2 + 2 * self._num_top)
        self._packed = bytearray()
        return _compact(token_ids[: len(records)], records, describe)


class PromptLogprobsRecord:
    """Log probabilities of a prompt's tokens except the first, each with the `num_top` most probable tokens."""

    def __init__(self, token_ids: SequenceOf[int], num_top: int):
        self._token_ids = token_ids
        self._num_top = num_top
        self._records = np.zeros((max(0, len(token_ids) - 1), 2 + 2 * num_top), dtype=np.int32)
        self._num_known = 0

    @property
    def is_whole(self) -> bool:
        return self._num_known == len(self._records)

    def put(self, place: int, records: np.ndarray) -> None:
        """Store the records of the tokens from `place` on. A restarted prompt stores them again."""
        self._records[place - 1 : place - 1 + len(records)] = records
        self._num_known = place - 1 + len(records)

    def finish(self, describe: Describe) -> PromptLogprobs:
        """All log probabilities of the prompt."""
        return PromptLogprobs(self._token_ids, _compact(self._token_ids[1:], self._records, describe))


def _compact(token_ids: SequenceOf[int], records: np.ndarray, describe: Describe) -> CompactLogprobs:
    """`records` int32 (T, 2 + 2 * K): bits of the tokens' own log probabilities, their ranks, the most probable ids,
    the bits of theirs."""
    num_top = records.shape[1] // 2 - 1
    ids = np.column_stack([np.asarray(token_ids, dtype=np.int32), records[:, 2 : 2 + num_top]])
    values = np.column_stack([records[:, 0], records[:, 2 + num_top :]]).view(np.float32)
    return CompactLogprobs(ids, values, records[:, 1].copy(), describe)


@dataclass(eq=False)
class UnfinishedRequest:
    """A request from the moment the engine has it. `generations`: one for each completion, for each prompt of a
    request for vectors, or with `has_labels` for each label of each prompt."""

    request_id: str
    prompts: SequenceOf[PromptInputs]
    has_labels: bool = False
    generations: list[Generation] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Cached tokens of its first prefill, because a preempted request finds its own blocks."""
    prompt_logprobs: PromptLogprobsRecord | None = None
    arrival_time: float = field(default_factory=time.time)
    queued_ts: float = field(default_factory=time.monotonic)
    first_token_ts: float = 0.0

    def record_first_token(self) -> None:
        """Its first token, or its first vector, has arrived. Later calls change nothing."""
        self.first_token_ts = self.first_token_ts or time.monotonic()

    def output(self, completions: list[CompletionOutput], describe: Describe) -> RequestOutput:
        """The result of the request. With several prompts it has neither a prompt text nor a list of ids."""
        if self.has_labels:
            completions = [_with_labels(list(labels)) for _, labels in groupby(completions, attrgetter("index"))]
        only = self.prompts[0] if len(self.prompts) == 1 else None
        metrics = RequestMetrics(
            arrival_time=self.arrival_time, queued_ts=self.queued_ts, first_token_ts=self.first_token_ts,
            last_token_ts=time.monotonic(),
            num_generation_tokens=sum(len(completion.token_ids) for completion in completions))
        return RequestOutput(
            self.request_id, completions, num_prompt_tokens=sum(len(prompt.token_ids) for prompt in self.prompts),
            num_cached_tokens=self.num_cached_tokens or 0, prompt_logprobs=self._scores(describe),
            prompt=only.text if only else None, prompt_token_ids=only.token_ids if only else None, metrics=metrics)

    def _scores(self, describe: Describe) -> PromptLogprobs | None:
        """None if not requested, or if the request ended before its prompt was computed."""
        record = self.prompt_logprobs
        return record.finish(describe) if record is not None and record.is_whole else None


def _with_labels(labels: list[CompletionOutput]) -> CompletionOutput:
    """One result of the labels of a prompt, with their log-likelihoods in order; or the first that has failed."""
    failed = next((label for label in labels if label.pooled is None), None)
    if failed is not None:
        return replace(failed, token_ids=[])
    values_W = np.concatenate([label.pooled for label in labels if label.pooled is not None])
    return replace(labels[0], token_ids=[], pooled=values_W)
