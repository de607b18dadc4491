"""What a caller asks of one request's decoding. Knows nothing of tensors, tokenizers or models."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from npu_runner.errors import RequestError

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Decoding settings of one request. Values out of range raise RequestError with the field's name.

    The penalties are OpenAI's (frequency, presence: over generated tokens only, subtracted from the logits) and
    CTRL's repetition penalty (arXiv 1909.05858: over prompt and generated tokens, positive logits divided,
    negative ones multiplied).
    """

    n: int = 1
    """Completions per prompt; each is a sequence of its own, seeded with `seed + index`."""
    max_tokens: int | None = None
    """Most tokens to generate; None: as many as the model's context leaves."""
    min_tokens: int = 0
    """Neither EOS nor a stop token may be sampled, nor a stop string end the text, before this many tokens."""
    temperature: float = 1.0
    """0 is greedy: the most probable token after penalties, bias and bans."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches p."""
    min_p: float = 0.0
    """Keep tokens at least min_p times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of the given token ids, -100 to 100."""
    seed: int | None = None
    """Same seed, same tokens, whatever else is in the batch. None draws a fresh one."""
    stop: Sequence[str] = ()
    """The text ends before the first of these strings, wherever token boundaries fall."""
    stop_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()
    """Strings that may not be generated (as token sequences, with and without a leading space)."""
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no log probabilities. k: those of each sampled token and of the k most probable ones (0 to 20)."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _strings("stop", self.stop))
        object.__setattr__(self, "bad_words", _strings("bad_words", self.bad_words))
        object.__setattr__(self, "stop_token_ids", tuple(_integer("stop_token_ids", i, 0) for i in self.stop_token_ids))
        _integer("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error("min_tokens", f"{self.min_tokens} is more than max_tokens {self.max_tokens}")
        _number("temperature", self.temperature, 0.0, 100.0)
        _integer("top_k", self.top_k, 0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise _error("top_p", "must be greater than 0; use temperature 0 for greedy decoding")
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        bias = {_integer("logit_bias", int(k), 0): _number("logit_bias", v, -100.0, 100.0)
                for k, v in self.logit_bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        if self.seed is not None:
            _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def replace(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def _error(name: str, what: str) -> RequestError:
    return RequestError(f"{name}: {what}", code="invalid_sampling_parameter", param=name)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _error(name, f"{value!r} is not an integer")
    if value < low or (high is not None and value > high):
        raise _error(name, f"{value} is outside {low} to {'unlimited' if high is None else high}")
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _error(name, f"{value!r} is not a finite number")
    if not low <= value <= high:
        raise _error(name, f"{value} is outside {low} to {high}")
    return float(value)


def _strings(name: str, value: str | Sequence[str]) -> tuple[str, ...]:
    items = (value,) if isinstance(value, str) else tuple(value)
    for item in items:
        if not isinstance(item, str) or not item:
            raise _error(name, f"{item!r} is not a non-empty string")
    return items
