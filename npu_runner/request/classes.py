"""The classes that a model tells apart, and what makes probabilities of its logits. Knows no files and no tensors.

W classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """`labels`: names of the W classes, in their order. `activation`: softmax, one of the classes is it; sigmoid, each
    for itself; identity, the logits are numbers to be told (regression)."""

    labels: tuple[str, ...]
    activation: str

    def probabilities(self, logits_W: np.ndarray) -> np.ndarray:
        """float32 (W,), computed in float64."""
        x_W = logits_W.astype(np.float64)
        if self.activation == SOFTMAX:
            x_W = np.exp(x_W - x_W.max())
            x_W /= x_W.sum()
        elif self.activation == SIGMOID:
            small_W = np.exp(-np.abs(x_W))  # of the larger side it would overflow
            x_W = np.where(x_W >= 0, 1.0, small_W) / (1.0 + small_W)
        else:
            assert self.activation == IDENTITY, f"{self.activation!r} is none of those that checkpoints are read for"
        return x_W.astype(np.float32)

    def label(self, logits_W: np.ndarray) -> str:
        """Of the likeliest class."""
        return self.labels[int(logits_W.argmax())]
