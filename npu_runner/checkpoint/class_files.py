"""What config.json says of a classifier: its architecture, its labels, and what makes probabilities of its logits.

Meanings and defaults are those of transformers' configuration and of its *ForSequenceClassification. Knows no network.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import require_json
from npu_runner.checkpoint.model_config import ClassPooling
from npu_runner.errors import ModelError
from npu_runner.request.classes import IDENTITY, SIGMOID, SOFTMAX, Classes
from npu_runner.request.limits import shown

SUFFIX = "ForSequenceClassification"
_DEFAULT_NUM_LABELS = 2
_REGRESSION, _ONE_LABEL, _SEVERAL_LABELS = ("regression", "single_label_classification", "multi_label_classification")


def classifier_architecture(folder: Path) -> str | None:
    """The class that transformers saved the checkpoint in `folder` from, where it is a classifier's."""
    named = require_json(folder, "config.json").get("architectures")
    names = named if isinstance(named, list) else []
    return next((name for name in names if isinstance(name, str) and name.endswith(SUFFIX)), None)


def read_classes(folder: Path) -> ClassPooling | None:
    """How the checkpoint in `folder` classifies; None: it does not. Raises ModelError for what is not served."""
    name = classifier_architecture(folder)
    if name is None:
        return None
    raw, path = require_json(folder, "config.json"), folder / "config.json"
    model_type = str(raw.get("model_type"))
    if _letters(name.removesuffix(SUFFIX)) != _letters(model_type):
        raise ModelError(f"{path}: architectures names {name}, which is not model_type {model_type!r} with a "
                         f"classifier's head; served is the *{SUFFIX} of a family's own name")
    labels = _read_labels(raw, path)
    text = raw["text_config"] if isinstance(raw.get("text_config"), dict) else raw
    pad = text.get("pad_token_id")
    if pad is not None and (isinstance(pad, bool) or not isinstance(pad, int)):
        raise ModelError(f"{path}: pad_token_id {pad!r} is no token id; correct it there")
    classes = Classes(labels=labels, activation=_activation(raw, path, len(labels)))
    return ClassPooling(classes=classes, pad_token_id=pad)


def _letters(name: str) -> str:
    """Qwen3_5Text and qwen3_5_text are the same."""
    return name.replace("_", "").casefold()


def _read_labels(raw: dict[str, Any], path: Path) -> tuple[str, ...]:
    named = raw.get("id2label")
    if named is None:
        count = raw.get("num_labels", _DEFAULT_NUM_LABELS)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ModelError(f"{path}: num_labels {count!r} is no number of classes; correct it there")
        return tuple(f"LABEL_{index}" for index in range(count))
    if not isinstance(named, dict) or not named or sorted(named) != sorted(map(str, range(len(named)))):
        raise ModelError(f'{path}: id2label {shown(named)} has no label for each class, as {{"0": "bad", "1": "good"}} '
                         "has; correct it there")
    return tuple(str(named[str(index)]) for index in range(len(named)))


def _activation(raw: dict[str, Any], path: Path, num_labels: int) -> str:
    """As vLLM and transformers' pipeline choose it. One class alone is a yes or no, unless it is a regression."""
    kind = raw.get("problem_type")
    known = (_REGRESSION, _ONE_LABEL, _SEVERAL_LABELS)
    if kind not in (None, *known):
        raise ModelError(f"{path}: problem_type {kind!r} is not one of {', '.join(known)}; correct it there, or take "
                         "it out")
    if kind == _ONE_LABEL and num_labels == 1:
        raise ModelError(f"{path}: problem_type {kind!r} with one label, whose probability would always be 1; leave "
                         f"problem_type out for its sigmoid, or write {_REGRESSION!r} for the number itself")
    if kind == _REGRESSION:
        return IDENTITY
    return SIGMOID if kind == _SEVERAL_LABELS or num_labels == 1 else SOFTMAX
