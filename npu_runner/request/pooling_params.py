"""Parameters of a request for a vector, a score or classes, and the classes of a classifier. Knows nothing of tensors,
tokenizers or models.

W classes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from npu_runner.errors import RequestError
from npu_runner.request.limits import LIMITS, check_count, field_error, shown

CLASSIFY, TOKEN_EMBED = "classify", "token_embed"
"""Tasks, as vLLM calls them."""
LABELS = "labels"
"""The task of choosing from labels, which a model that generates text has."""


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Settings of one request that is pooled, under vLLM's names. Values out of range raise RequestError with the
    field's name; what the model does not give is refused where the model is known."""

    n: ClassVar[int] = 1
    """Results of one prompt."""

    dimensions: int | None = None
    """Keep this many first numbers of the vector, before it is normalised (arXiv 2205.13147); None keeps all."""
    truncate_prompt_tokens: int | None = None
    """Keep this many last tokens of a longer prompt; -1 keeps as many as the model accepts. For a query and a document,
    the end of the document is cut. A prompt with images is refused instead."""
    use_activation: bool | None = None
    """For a score, False returns the difference of the two logits instead of its sigmoid. For classes, False returns
    logits instead of probabilities. None is True."""

    task: str | None = None
    """token_embed: the final hidden state of every token, which is not cut; None: what the model was loaded for."""

    labels: Sequence[str] | None = None
    """The answers whose log-likelihoods behind the prompt are wanted, 2 to 512 different texts, of a model that
    generates text."""
    label_token_ids: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)
    """The tokens of each label, as `ChatProcessor.resolve_params` sets them; a caller leaves it out."""

    def __post_init__(self) -> None:
        self._check("dimensions", self.dimensions, 1)
        self._check("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
        if self.truncate_prompt_tokens == 0:
            raise _error("truncate_prompt_tokens", "0 leaves nothing; -1 leaves as much as fits")
        if not isinstance(self.use_activation, (bool, type(None))):
            raise _error("use_activation", f"{shown(self.use_activation)} is neither true nor false")
        if self.task not in (None, TOKEN_EMBED):
            raise _error("task", f"{shown(self.task)} is not {TOKEN_EMBED}, the only one beside what the model was "
                                 "loaded for; LLM.encode takes the others by name")
        if self.keeps_tokens and self.dimensions is not None:
            raise _error("dimensions", f"states of all tokens ({TOKEN_EMBED}) are not cut; leave it out")
        if self.keeps_tokens and self.use_activation:
            raise _error("use_activation", f"states of all tokens ({TOKEN_EMBED}) are not normalised; leave it out")
        if self.labels is not None:
            self._check_labels(self.labels)

    @property
    def keeps_tokens(self) -> bool:
        """Whether the hidden state of every token is wanted."""
        return self.task == TOKEN_EMBED

    @property
    def max_tokens(self) -> int:
        """Room behind the prompt: the longest label, and one token, as what is pooled is planned like a prompt's first
        token."""
        return 1 + max(map(len, self.label_token_ids or ((),)))

    def _check_labels(self, labels: Any) -> None:
        if isinstance(labels, str) or not isinstance(labels, Sequence):
            raise _error("labels", f"a list of texts is needed, not {type(labels).__name__}")
        check_count("labels", "labels", labels, LIMITS.max_labels)
        if len(labels) < 2:
            raise _error("labels", f"{len(labels)} of them leaves nothing to choose; give at least two")
        seen: dict[str, int] = {}
        for number, label in enumerate(labels):
            if not isinstance(label, str) or not label:
                raise _error(f"labels[{number}]", f"{shown(label)} is no text with a character")
            if seen.setdefault(label, number) != number:
                raise _error(f"labels[{number}]", f"{shown(label)} is labels[{seen[label]}], too")
        for name in ("dimensions", "task"):
            if getattr(self, name) is not None:
                raise _error(name, "it does not go with labels; leave it out")

    def _check(self, name: str, value: Any, low: int) -> None:
        if value is None:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            raise _error(name, f"{shown(value)} is not an integer")
        if value < low:
            raise _error(name, f"{shown(value)} is below {low}")

    def replace(self, **changes: Any) -> PoolingParams:
        """A copy with some fields changed, validated again."""
        return dataclasses.replace(self, **changes)


def _error(name: str, what: str) -> RequestError:
    return field_error(name, f"{what}", "invalid_pooling_parameter")


SOFTMAX, SIGMOID, IDENTITY = "softmax", "sigmoid", "identity"


@dataclass(frozen=True, kw_only=True)
class Classes:
    """`labels`: names of the W classes, in their order. `activation`: softmax, one class is right; sigmoid, each class
    by itself; identity, the logits are the result (regression)."""

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
        """The label of the most probable class."""
        return self.labels[int(logits_W.argmax())]
