"""Tiny checkpoints as embedding models are published, and what transformers makes of them. Holds no tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.oracle import reference

TRANSFORMER, POOLING, NORMALIZE = (f"sentence_transformers.models.{kind}" for kind in
                                   ("Transformer", "Pooling", "Normalize"))


def write_modules(path: Path, *, is_normalised: bool = True, **mode: Any) -> Path:
    """sentence-transformers' files for last-token pooling; `mode` stands in the place of Pooling's own."""
    kinds = [(TRANSFORMER, ""), (POOLING, "1_Pooling"), *([(NORMALIZE, "2_Normalize")] if is_normalised else [])]
    modules = [{"idx": index, "name": str(index), "path": folder, "type": kind}
               for index, (kind, folder) in enumerate(kinds)]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    config = mode or {"word_embedding_dimension": 64, "pooling_mode_cls_token": False, "include_prompt": True,
                      "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
    (path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return path


def save_bare(path: Path, target: Path) -> Path:
    """The checkpoint in `path` as its base model saves itself: no output head, names without their prefix."""
    model = reference.load_model(path)
    model.model.save_pretrained(target)
    config = json.loads((target / "config.json").read_text())
    config["architectures"] = json.loads((path / "config.json").read_text())["architectures"]
    (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"):
        if (path / name).exists():
            (target / name).write_bytes((path / name).read_bytes())
    return target


@torch.inference_mode()
def expected_vector(path: Path, token_ids: Sequence[int], images: Sequence[Image.Image] = (), *,
                    dimensions: int | None = None, is_normalised: bool = True) -> np.ndarray:
    """transformers' last hidden state of the last token, cut and normalised in float64."""
    output = reference.load_model(path).model(**reference.model_inputs(path, token_ids, images))
    vector = output.last_hidden_state[0, -1].double().numpy()[:dimensions]
    return vector / np.linalg.norm(vector) if is_normalised else vector


def assert_same(ours: np.ndarray, expected: np.ndarray, *, tolerance: float = 1e-4) -> None:
    assert ours.dtype == np.float32
    assert ours.shape == expected.shape
    assert np.abs(ours - expected).max() < tolerance * max(1.0, np.abs(expected).max())
    cosine = ours @ expected / np.linalg.norm(ours) / np.linalg.norm(expected)
    assert cosine > 1 - tolerance
