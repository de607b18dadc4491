"""Tiny classifiers as transformers saves them, and what it makes of them. Holds no tests."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.oracle import reference

LABELS = ("bad", "good", "neither")
FILES = ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json")


def make_classifier(base: Path, target: Path, *, labels: Sequence[str] = LABELS, seed: int = 5, **config: Any) -> Path:
    """The body of the checkpoint in `base` under a random head, as its family's *ForSequenceClassification is saved.

    `config`: what else config.json says, such as problem_type.
    """
    import transformers

    name = _class_name(json.loads((base / "config.json").read_text()))
    model = getattr(transformers, name).from_pretrained(
        base, dtype=torch.float32, id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)}, **config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        model.score.weight.normal_(0.0, 0.1, generator=generator)
    model.save_pretrained(target)
    for file in FILES:
        if (base / file).exists():
            shutil.copy(base / file, target / file)
    return target


def _class_name(config: dict[str, Any]) -> str:
    """Of the classifier beside the model that the checkpoint was saved from."""
    family = str(config["architectures"][0]).partition("For")[0]
    return f"{family}{'Text' * config['model_type'].endswith('_text')}ForSequenceClassification"


def edit_config(path: Path, **changes: Any) -> Path:
    """None takes a field out."""
    config = {**json.loads((path / "config.json").read_text()), **changes}
    (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))
    return path


@lru_cache(maxsize=8)
def load_classifier(path: Path) -> Any:
    import transformers

    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_logits(path: Path, token_ids: Sequence[int], images: Sequence[Image.Image] = ()) -> np.ndarray:
    """transformers' logits of one prompt, float32 (W,)."""
    model = load_classifier(path)
    inputs: dict[str, Any] = {"input_ids": torch.tensor([list(token_ids)])}
    if images:
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == model.config.image_token_id).int()
        inputs.update(reference.load_image_processor(path)(list(images), return_tensors="pt"))
    logits: np.ndarray = model(**inputs).logits[0].numpy()
    return logits
