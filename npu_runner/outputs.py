"""What a finished or running request gives back. Plain data, shared by the engine, the Python API and the batch job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


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


@dataclass(frozen=True)
class CompletionOutput:
    """One finished completion. `text` ends before a matched stop string; `token_ids` holds every sampled token."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one did."""
    logprobs: list[PositionLogprobs] | None = None
    error: str | None = None
    """Why, when finish_reason is `error`."""
    error_code: str | None = None
    """A short machine-readable name of it, where there is one."""


@dataclass(frozen=True)
class RequestOutput:
    """One finished request with all its completions, in index order."""

    request_id: str
    completions: list[CompletionOutput] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache (of the first completion)."""

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
    def logprobs(self) -> list[PositionLogprobs] | None:
        return self.completions[0].logprobs


@dataclass
class EngineStats:
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
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    kv_blocks_peak: int = 0
    vision_cache_hits: int = 0
    vision_cache_misses: int = 0
    vision_cache_evictions: int = 0
    vision_cache_bytes: int = 0
    num_images_encoded: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prepare_seconds: float = 0.0
    """The host's part of all steps on rank 0: index arrays and their copy to the device, ..."""
    launch_seconds: float = 0.0
    """... handing out the forward, ..."""
    sample_seconds: float = 0.0
    """... handing out the choice of tokens, ..."""
    wait_seconds: float = 0.0
    """... and waiting for them."""
