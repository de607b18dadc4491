"""Copies of checkpoints with another config, or with more tensors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def spoiled(checkpoint: Any, folder: Path, base: str = "qwen3", **config: Any) -> Path:
    """A copy of a checkpoint with changes in its config.json; None removes a field."""
    path: Path = shutil.copytree(checkpoint(base), folder / "model")
    values = {**json.loads((path / "config.json").read_text()), **config}
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return path


def copy_with_more_tensors(path: Path, folder: Path, *names: str) -> Path:
    shutil.copytree(path, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, **{name: torch.ones(2, 2) for name in names}}, folder / "model.safetensors")
    return folder
