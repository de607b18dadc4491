"""Results of `LLM.encode` and `LLM.classify`, under vLLM's names. Plain data: knows nothing of models.

T tokens of a prompt, D hidden size, W classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_runner.request.outputs import PooledRequestOutput, RequestOutput
from npu_runner.request.pooling_params import Classes


@dataclass(frozen=True)
class PoolingOutput:
    """`data`: float32. token_embed: (T, D), a row for each token of the prompt; embed: (D,); classify: (W,)."""

    data: np.ndarray

    def __repr__(self) -> str:
        return f"PoolingOutput(shape={self.data.shape})"


@dataclass(frozen=True)
class ClassificationOutput:
    """`probs`: of each class, or without `use_activation` the logits. `label`: of the likeliest. `logits`: float32
    (W,), what the probabilities are made of."""

    probs: list[float]
    label: str
    logits: np.ndarray

    @classmethod
    def of(cls, logits_W: np.ndarray, classes: Classes, *, is_raw: bool = False) -> ClassificationOutput:
        probs_W = logits_W if is_raw else classes.probabilities(logits_W)
        return cls(probs_W.tolist(), classes.label(logits_W), logits_W)

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, repr=False)
class PoolingRequestOutput(PooledRequestOutput[PoolingOutput]):
    """An array of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput, classes: Classes | None = None, *, is_raw: bool = False) -> PoolingRequestOutput:
        """The result of a request with one prompt. `classes`: the model's, for a classifier; `is_raw` keeps logits."""
        if classes is None or is_raw:
            return cls.of_values(output, PoolingOutput)
        return cls.of_values(output, lambda logits_W: PoolingOutput(classes.probabilities(logits_W)))

    @property
    def data(self) -> np.ndarray:
        """The array. Raises RequestError with the reason where there is none."""
        return self.there().data


@dataclass(frozen=True, repr=False)
class ClassificationRequestOutput(PooledRequestOutput[ClassificationOutput]):
    """The classes of one prompt."""

    @classmethod
    def of(cls, output: RequestOutput, classes: Classes, *, is_raw: bool = False) -> ClassificationRequestOutput:
        """The result of a request with one prompt; with `is_raw`, its `probs` are logits."""
        return cls.of_values(output, lambda logits_W: ClassificationOutput.of(logits_W, classes, is_raw=is_raw))

    @property
    def probs(self) -> list[float]:
        """Raises RequestError with the reason where there are none."""
        return self.there().probs

    @property
    def label(self) -> str:
        """Raises RequestError with the reason where there is none."""
        return self.there().label
