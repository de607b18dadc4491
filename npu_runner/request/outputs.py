"""Results of finished and running requests. Plain data, shared by the engine, the Python API and the batch job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

import numpy as np

from npu_runner.errors import RequestError
from npu_runner.request.logprobs import CompactLogprobs, PositionLogprobs, PromptLogprobs
from npu_runner.request.pooling_params import Classes

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

_T = TypeVar("_T")
FinishReason = Literal["stop", "length", "abort", "error"]
REPETITION_DETECTED = "repetition_detected"
"""The stop_reason of a completion that `repetition_detection` has ended."""


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
    hidden_states: Mapping[int, np.ndarray] | None = None
    """With `return_hidden_states`: float32 (prompt + answer - 1, D) by layer, as `hidden_state_layers` names it. The
    last token of an answer is never computed. None where the answer has failed."""

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum over the sampled tokens; None without log probabilities."""
        if self.logprobs is None:
            return None
        if isinstance(self.logprobs, CompactLogprobs):
            return float(self.logprobs.logprobs[:, 0].sum(dtype=np.float64))
        return sum(position.sampled.logprob for position in self.logprobs)

    def finished(self) -> bool:
        """Always: what is not finished is not given out."""
        return True

    @property
    def is_repetition(self) -> bool:
        """Ended because it repeated itself."""
        return self.finish_reason == "length" and self.stop_reason == REPETITION_DETECTED

    @property
    def is_cut_off(self) -> bool:
        """Ended at its limit of tokens."""
        return self.finish_reason == "length" and not self.is_repetition


@dataclass(frozen=True)
class RequestMetrics:
    """When a request did what, under the names of vLLM's RequestStateStats. The `_ts` are seconds of one monotonic
    clock; only their differences mean anything."""

    arrival_time: float
    """Unix time at which the engine got the request, its prompt prepared."""
    queued_ts: float
    """The same moment as `arrival_time`, on the monotonic clock."""
    first_token_ts: float
    """Its first token had arrived; 0: it has none."""
    last_token_ts: float
    """Its last completion had ended."""
    num_generation_tokens: int
    """Generated tokens of all completions together."""

    @property
    def first_token_latency(self) -> float:
        """Seconds from the engine's getting it to its first token; 0 where it has none."""
        return max(0.0, self.first_token_ts - self.queued_ts) if self.first_token_ts else 0.0


def short_repr(output: object, **shown: object) -> str:
    """A line for a notebook: the class, the request's id and these values, without what is None; texts cut short."""
    values = {name: value for name, value in shown.items() if value is not None}
    texts = (f"{name}={value[:57] + '...' if isinstance(value, str) and len(value) > 60 else value!r}"
             for name, value in values.items())
    return f"{type(output).__name__}({', '.join(texts)})"


@dataclass(frozen=True, repr=False)
class RequestOutput:
    """One finished request with all its completions, in index order; where they are pooled, one for each prompt."""

    request_id: str
    completions: list[CompletionOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    """Tokens of all prompts together."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of the first completion)."""
    prompt_logprobs: PromptLogprobs | None = None
    """Where SamplingParams ask for them."""
    prompt: str | None = None
    """The text of the prompt: as given, or of a conversation as the chat template wrote it. None: it came as token ids,
    or could not be served, or had several prompts."""
    prompt_token_ids: list[int] | None = None
    """The prompt's tokens, an image's once per embedding. None after a failure, and for several prompts."""
    metrics: RequestMetrics | None = field(default=None, compare=False)
    """None: it never reached the engine."""

    @property
    def finished(self) -> bool:
        """Always: what is not finished is not given out."""
        return True

    @classmethod
    def failed(cls, request_id: str, error: RequestError) -> RequestOutput:
        """The result of a request that could not be served."""
        return cls(request_id, [CompletionOutput(index=0, text="", token_ids=[], finish_reason="error",
                                                 error=error.message, error_code=error.code)])

    def __repr__(self) -> str:
        """One line; the whole is in the attributes."""
        first = self.completions[0] if self.completions else None
        return short_repr(
            self, request_id=self.request_id, text=first and first.text, finish_reason=first and first.finish_reason,
            error=first and first.error, num_prompt_tokens=self.num_prompt_tokens, num_outputs=len(self.completions))

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
    def hidden_states(self) -> Mapping[int, np.ndarray] | None:
        return self.completions[0].hidden_states

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
    """`embedding`: float32 (D,), of `dimensions` numbers if the request sets them."""

    embedding: np.ndarray

    def __repr__(self) -> str:
        return f"EmbeddingOutput(hidden_size={len(self.embedding)})"

    @property
    def hidden_size(self) -> int:
        """The length of the vector."""
        return len(self.embedding)


@dataclass(frozen=True, repr=False)
class PooledRequestOutput(Generic[_T]):
    """The pooled result of one prompt, under vLLM's names. `outputs` is None if there is an `error`."""

    request_id: str
    outputs: _T | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache; 0 for token_embed, which computes all."""
    error: str | None = None
    error_code: str | None = None
    prompt: str | None = None
    """As in RequestOutput, and so are the next two."""
    prompt_token_ids: list[int] | None = None
    metrics: RequestMetrics | None = field(default=None, compare=False)

    @property
    def finished(self) -> bool:
        """Always: what is not finished is not given out."""
        return True

    def __repr__(self) -> str:
        """One line; the whole is in the attributes."""
        return short_repr(self, request_id=self.request_id, outputs=self.outputs, error=self.error,
                          num_prompt_tokens=self.num_prompt_tokens)

    @classmethod
    def from_output(cls, output: RequestOutput, *, classes: Classes | None = None, is_raw: bool = False) -> Self:
        """The result of a request with one prompt. `classes`: the model's, for a classifier; `is_raw` keeps logits."""
        (pooled,) = output.completions
        outputs = None if pooled.pooled is None else cls._make(pooled.pooled, classes, is_raw)
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, pooled.error,
                   pooled.error_code, output.prompt, output.prompt_token_ids, output.metrics)

    @staticmethod
    def _make(values: np.ndarray, classes: Classes | None, is_raw: bool) -> Any:
        raise NotImplementedError

    def require_outputs(self) -> _T:
        """`outputs`. Raises RequestError with the reason where there are none."""
        if self.outputs is None:
            raise RequestError(self.error or "nothing was pooled", self.error_code or "not_pooled")
        return self.outputs


@dataclass(frozen=True, repr=False)
class EmbeddingRequestOutput(PooledRequestOutput[EmbeddingOutput]):
    """The vector of one prompt."""

    @staticmethod
    def _make(values: np.ndarray, classes: Classes | None, is_raw: bool) -> EmbeddingOutput:
        return EmbeddingOutput(values)

    @property
    def embedding(self) -> np.ndarray:
        """float32 (D,). Raises RequestError with the reason where there is none."""
        return self.require_outputs().embedding


def sigmoid_score(difference: float, *, is_raw: bool = False) -> float:
    """The score that a difference of logits stands for: its sigmoid, or with `is_raw` itself. As float32 has it."""
    if is_raw:
        return float(np.float32(difference))
    with np.errstate(over="ignore"):
        return float(np.float32(1.0 / (1.0 + np.exp(-np.float64(difference)))))


@dataclass(frozen=True)
class ScoringOutput:
    """`score`: 0 to 1, or without `use_activation` the difference of logits."""

    score: float


@dataclass(frozen=True, repr=False)
class ScoringRequestOutput(PooledRequestOutput[ScoringOutput]):
    """The score of one query and document. `prompt` is the text that the model read of both."""

    @staticmethod
    def _make(values: np.ndarray, classes: Classes | None, is_raw: bool) -> ScoringOutput:
        return ScoringOutput(sigmoid_score(float(values[0]), is_raw=is_raw))

    @property
    def score(self) -> float:
        """Raises RequestError with the reason where there is none."""
        return self.require_outputs().score


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
    """Counters of rank 0 since its start."""

    vision_cache_hits: int = 0
    vision_cache_misses: int = 0
    vision_cache_evictions: int = 0
    vision_cache_bytes: int = 0
    vision_cache_host_hits: int = 0
    """The number of hits that came from host memory."""
    vision_cache_host_bytes: int = 0
    num_images_encoded: int = 0


@dataclass
class DraftCounters:
    """Tokens that were proposed ahead of a step (`speculative_config`), and the accepted ones."""

    num_drafts: int = 0
    """Rows of steps that had any."""
    num_forced_drafted: int = 0
    """By what a grammar forces, ..."""
    num_forced_accepted: int = 0
    num_ngram_drafted: int = 0
    """... by what followed the same tokens before in prompt and answer, ..."""
    num_ngram_accepted: int = 0
    num_suffix_drafted: int = 0
    """... by what did there or in earlier answers, ..."""
    num_suffix_accepted: int = 0
    num_mtp_drafted: int = 0
    """... and by the model's own head for multi-token prediction."""
    num_mtp_accepted: int = 0
    suffix_cache_bytes: int = 0
    """Host memory that is reserved for these answers, in bytes."""

    @property
    def num_draft_tokens(self) -> int:
        return self.num_forced_drafted + self.num_ngram_drafted + self.num_suffix_drafted + self.num_mtp_drafted

    @property
    def num_accepted_tokens(self) -> int:
        return self.num_forced_accepted + self.num_ngram_accepted + self.num_suffix_accepted + self.num_mtp_accepted

    def count(self, method: str, num_drafted: int, num_accepted: int) -> None:
        """Tokens that `method` proposed for a row of a step, and the accepted ones."""
        for name, number in ((f"num_{method}_drafted", num_drafted), (f"num_{method}_accepted", num_accepted)):
            setattr(self, name, getattr(self, name) + number)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a row with drafts got of a step; 0 where none had any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 0.0


@dataclass
class EngineStats(DraftCounters, RunnerCounters):
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


@dataclass(frozen=True)
class PoolingOutput:
    """`data`: float32. token_embed: (T, D), a row for each token of the prompt; embed: (D,); classify: (W,)."""

    data: np.ndarray

    def __repr__(self) -> str:
        return f"PoolingOutput(shape={self.data.shape})"


@dataclass(frozen=True)
class ClassificationOutput:
    """`probs`: the probability of each class, or without `use_activation` its logit. `label`: the likeliest class.
    `logits`: float32 (W,), before the activation."""

    probs: list[float]
    label: str
    logits: np.ndarray

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, repr=False)
class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """The array of one prompt."""

    @staticmethod
    def _make(values: np.ndarray, classes: Classes | None, is_raw: bool) -> PoolingOutput:
        return PoolingOutput(values if classes is None or is_raw else classes.probabilities(values))

    @property
    def data(self) -> np.ndarray:
        """The array. Raises RequestError with the reason where there is none."""
        return self.require_outputs().data


@dataclass(frozen=True, repr=False)
class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""

    @staticmethod
    def _make(values: np.ndarray, classes: Classes | None, is_raw: bool) -> ClassificationOutput:
        assert classes is not None, "only a classifier gives classes"
        probs_W = values if is_raw else classes.probabilities(values)
        return ClassificationOutput(probs_W.tolist(), classes.label(values), values)

    @property
    def probs(self) -> list[float]:
        """Raises RequestError with the reason where there are none."""
        return self.require_outputs().probs

    @property
    def label(self) -> str:
        """Raises RequestError with the reason where there is none."""
        return self.require_outputs().label
