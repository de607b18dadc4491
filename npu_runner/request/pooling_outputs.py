"""What `LLM.encode` and `LLM.classify` give back, under vLLM's names. Plain data: knows nothing of models.

T tokens of a prompt, D hidden size, W classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from npu_runner.errors import RequestError
from npu_runner.request.classes import Classes
from npu_runner.request.outputs import RequestOutput

_T = TypeVar("_T")


@dataclass(frozen=True)
class PoolingOutput:
    """`data`: float32. token_embed: (T, D), a row for each token of the prompt; embed: (D,); classify: (W,)."""

    data: np.ndarray


@dataclass(frozen=True)
class ClassificationOutput:
    """`probs`: of each class. `label`: of the likeliest. `logits`: float32 (W,), what the probabilities are made of."""

    probs: list[float]
    label: str
    logits: np.ndarray

    @classmethod
    def of(cls, logits_W: np.ndarray, classes: Classes) -> ClassificationOutput:
        return cls(classes.probabilities(logits_W).tolist(), classes.label(logits_W), logits_W)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True)
class PooledRequestOutput(Generic[_T]):
    """What was asked for of one prompt. `outputs` is None where there is an `error`."""

    request_id: str
    outputs: _T | None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache; 0 for token_embed, which computes all."""
    error: str | None = None
    error_code: str | None = None

    def _there(self) -> _T:
        """`outputs`. Raises RequestError with the reason where there are none."""
        if self.outputs is None:
            raise RequestError(self.error or "nothing was pooled", self.error_code or "not_pooled")
        return self.outputs


@dataclass(frozen=True)
class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """An array of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput, classes: Classes | None = None) -> PoolingRequestOutput:
        """Of a request for one prompt, which was for `classes` if there are any."""
        (pooled,) = output.completions
        data = pooled.pooled
        if data is not None and classes is not None:
            data = classes.probabilities(data)
        outputs = None if data is None else PoolingOutput(data)
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, pooled.error,
                   pooled.error_code)

    @property
    def data(self) -> np.ndarray:
        """The array. Raises RequestError with the reason where there is none."""
        return self._there().data


@dataclass(frozen=True)
class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput, classes: Classes) -> ClassificationRequestOutput:
        """Of a request for one prompt."""
        (pooled,) = output.completions
        outputs = None if pooled.pooled is None else ClassificationOutput.of(pooled.pooled, classes)
        return cls(output.request_id, outputs, output.num_prompt_tokens, output.num_cached_tokens, pooled.error,
                   pooled.error_code)

    @property
    def probs(self) -> list[float]:
        """Raises RequestError with the reason where there are none."""
        return self._there().probs

    @property
    def label(self) -> str:
        """Raises RequestError with the reason where there is none."""
        return self._there().label
