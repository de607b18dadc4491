"""Results of `LLM.encode` and `LLM.classify`, under vLLM's names. Plain data: knows nothing of models.

T tokens of a prompt, D hidden size, W classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from npu_runner.request.outputs import PooledRequestOutput
from npu_runner.request.pooling_params import Classes


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
