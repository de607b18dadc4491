"""What a finished or running request gives back. Plain data, shared by the engine, the Python API and the batch job."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, overload

import numpy as np

from npu_runner.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
REPETITION_DETECTED = "repetition_detected"
"""The stop_reason of a completion that `repetition_detection` has ended."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability (natural, after temperature 1 softmax of the raw logits) of one token."""

    token_id: int
    token: str
    logprob: float
    token_bytes: bytes


@dataclass(frozen=True)
class PositionLogprobs:
    """One generated position: the sampled token, and the most probable ones, best first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]


class CompactLogprobs(Sequence[PositionLogprobs]):
    """The positions of one completion, kept as numbers: (2 + 2 * k) * 4 bytes each, with its token; read, each becomes
    the PositionLogprobs that it stands for, anew every time.

    ids: int32 (T, 1 + k), logprobs: float32 (T, 1 + k), the sampled token first. describe: (text, bytes) of a token id.
    """

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray, describe: Callable[[int], tuple[str, bytes]]):
        self.ids = ids
        self.logprobs = logprobs
        self.describe = describe

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, index: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, index: slice) -> CompactLogprobs: ...
    def __getitem__(self, index: int | slice) -> PositionLogprobs | CompactLogprobs:
        if isinstance(index, slice):
            return CompactLogprobs(self.ids[index], self.logprobs[index], self.describe)
        pairs = zip(self.ids[index].tolist(), self.logprobs[index].tolist(), strict=True)
        sampled, *top = (self._token(token_id, value) for token_id, value in pairs)
        return PositionLogprobs(sampled, tuple(top))

    def __iter__(self) -> Iterator[PositionLogprobs]:
        return (self[index] for index in range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(ours == theirs for ours, theirs in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def _token(self, token_id: int, value: float) -> TokenLogprob:
        text, raw = self.describe(token_id)
        return TokenLogprob(token_id=token_id, token=text, logprob=value, token_bytes=raw)


@dataclass(frozen=True)
class PromptTokenLogprobs:
    """One token of a prompt: what the model gave it before it was read, and the most probable ones in its place."""

    token: TokenLogprob
    rank: int
    """1: the most probable one."""
    top: tuple[TokenLogprob, ...]


class PromptLogprobs(Sequence[PromptTokenLogprobs | None]):
    """One entry for each token of a prompt, None for the first, which nothing stands before. Kept as numbers, and read
    as CompactLogprobs are.

    token_ids: of the whole prompt (T); ranks: int32 (T - 1); the rest as there, the prompt's own token first (T - 1).
    """

    def __init__(self, token_ids: Sequence[int], ranks: np.ndarray, positions: CompactLogprobs):
        self.token_ids = token_ids
        self.ranks = ranks
        self.positions = positions

    def __len__(self) -> int:
        return len(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> PromptTokenLogprobs | None: ...
    @overload
    def __getitem__(self, index: slice) -> list[PromptTokenLogprobs | None]: ...
    def __getitem__(self, index: int | slice) -> PromptTokenLogprobs | list[PromptTokenLogprobs | None] | None:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        if place == 0:
            return None
        position = self.positions[place - 1]
        return PromptTokenLogprobs(position.sampled, int(self.ranks[place - 1]), position.top)

    def first_token(self) -> TokenLogprob:
        """The one without a log probability, which is NaN here."""
        text, raw = self.positions.describe(self.token_ids[0])
        return TokenLogprob(token_id=self.token_ids[0], token=text, logprob=float("nan"), token_bytes=raw)


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion. `text` ends before a matched stop string; `token_ids` holds every sampled token.

    In a chat with a model that thinks `text` is what comes behind the reasoning.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one did; REPETITION_DETECTED with finish_reason `length`."""
    logprobs: Sequence[PositionLogprobs] | None = None
    error: str | None = None
    """Why, when finish_reason is `error`."""
    error_code: str | None = None
    """A short machine-readable name of it, where there is one."""
    reasoning_content: str | None = None
    """The model's reasoning; None: there is none, or it was not split off (`reasoning_parser`)."""
    num_reasoning_tokens: int = 0
    """Tokens of it, without the tags around it."""
    pooled: np.ndarray | None = None
    """float32 (W,), where the request was not for text: a vector's numbers, a score's one, ... (`PoolingConfig`). Where
    it was for the hidden states of the prompt's T tokens, (T, D)."""

    @property
    def is_repetition(self) -> bool:
        """Ended because it repeated itself."""
        return self.finish_reason == "length" and self.stop_reason == REPETITION_DETECTED

    @property
    def is_cut_off(self) -> bool:
        """Ended at its limit of tokens."""
        return self.finish_reason == "length" and not self.is_repetition


@dataclass(frozen=True)
class RequestOutput:
    """One finished request with all its completions, in index order; where they are pooled, one for each prompt."""

    request_id: str
    completions: list[CompletionOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    """Of all its prompts together."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of the first completion)."""
    prompt_logprobs: PromptLogprobs | None = None
    """Where SamplingParams ask for them."""

    @classmethod
    def failed(cls, request_id: str, error: RequestError) -> RequestOutput:
        """What stands in the place of an answer to a request that could not be served."""
        return cls(request_id, [CompletionOutput(index=0, text="", token_ids=[], finish_reason="error",
                                                 error=error.message, error_code=error.code)])

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The completions, under vLLM's name."""
        return self.completions

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.completions[0].finish_reason

    @property
    def logprobs(self) -> Sequence[PositionLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def reasoning_content(self) -> str | None:
        return self.completions[0].reasoning_content

    @property
    def error(self) -> str | None:
        """Why, when finish_reason is `error`."""
        return self.completions[0].error

    @property
    def error_code(self) -> str | None:
        return self.completions[0].error_code


@dataclass(frozen=True)
class EmbeddingOutput:
    """`embedding`: float32 (D,), as long as `dimensions` asked for."""

    embedding: np.ndarray

    @property
    def hidden_size(self) -> int:
        """How many numbers it has."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """One prompt's vector, under vLLM's names. `outputs` is None where there is an `error`."""

    request_id: str
    outputs: EmbeddingOutput | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    error: str | None = None
    error_code: str | None = None

    @classmethod
    def of(cls, output: RequestOutput) -> EmbeddingRequestOutput:
        """Of a request for one vector."""
        (vector,) = output.completions
        outputs = None if vector.pooled is None else EmbeddingOutput(vector.pooled)
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, vector.error,
                   vector.error_code)

    @property
    def embedding(self) -> np.ndarray:
        """float32 (D,). Raises RequestError with the reason where there is none."""
        if self.outputs is None:
            raise RequestError(self.error or "there is no vector", self.error_code or "no_vector")
        return self.outputs.embedding


def score_of(difference: float, *, is_raw: bool = False) -> float:
    """The score that a difference of logits stands for: its sigmoid, or with `is_raw` itself. As float32 has it."""
    if is_raw:
        return float(np.float32(difference))
    with np.errstate(over="ignore"):
        return float(np.float32(1.0 / (1.0 + np.exp(-np.float64(difference)))))


@dataclass(frozen=True)
class ScoringOutput:
    """`score`: 0 to 1, or without `use_activation` the difference of logits."""

    score: float


@dataclass(frozen=True)
class ScoringRequestOutput:
    """The score of one query and document, under vLLM's names. `outputs` is None where there is an `error`."""

    request_id: str
    outputs: ScoringOutput | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    error: str | None = None
    error_code: str | None = None

    @classmethod
    def of(cls, output: RequestOutput, *, is_raw: bool) -> ScoringRequestOutput:
        """Of a request for one score."""
        (found,) = output.completions
        outputs = None if found.pooled is None else ScoringOutput(score_of(float(found.pooled[0]), is_raw=is_raw))
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, found.error,
                   found.error_code)

    @property
    def score(self) -> float:
        """Raises RequestError with the reason where there is none."""
        if self.outputs is None:
            raise RequestError(self.error or "there is no score", self.error_code or "no_score")
        return self.outputs.score


@dataclass
class StepSeconds:
    """The host's seconds of all steps on rank 0, by phase."""

    prepare_seconds: float = 0.0
    """Index arrays, and their copy to the device."""
    launch_seconds: float = 0.0
    """Launching the forward, images included."""
    sample_seconds: float = 0.0
    """Launching the choice of tokens."""
    wait_seconds: float = 0.0
    """Waiting until the sampled tokens are in host memory."""


@dataclass
class RunnerCounters(StepSeconds):
    """What rank 0 has counted since start-up."""

    vision_cache_hits: int = 0
    vision_cache_misses: int = 0
    vision_cache_evictions: int = 0
    vision_cache_bytes: int = 0
    num_images_encoded: int = 0


@dataclass
class EngineStats(RunnerCounters):
    """Counters since start-up, and gauges of the moment. Copied out by `LLMEngine.stats()`."""

    num_prefill_tokens: int = 0
    """Prompt tokens computed (cached ones are not)."""
    num_decode_tokens: int = 0
    num_prefill_steps: int = 0
    num_decode_steps: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    prefix_cache_queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Prompt tokens found there."""
    state_snapshots_taken: int = 0
    """Snapshots of states for the prefix cache (models with Gated DeltaNet layers), ..."""
    state_snapshots_used: int = 0
    """... prompts that went on from one, ..."""
    state_snapshots_evicted: int = 0
    """... and those that are no more."""
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
