"""Reads the small text files of a checkpoint folder, with errors that name file and remedy. Knows no meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from npu_runner.errors import ModelError


def model_folder(model_path: str | Path) -> Path:
    """The folder as a Path; a ModelError when it is not there."""
    folder = Path(model_path)
    if not folder.is_dir():
        raise ModelError(f"model folder {str(folder)!r} does not exist; give the folder that holds config.json")
    return folder


def read_text(folder: Path, name: str) -> str | None:
    """The UTF-8 text of a file, None when it is missing; a ModelError when it cannot be read."""
    path = folder / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path}: cannot be read ({error}); copy the file again from its source") from error


def read_json(folder: Path, name: str) -> dict[str, Any] | None:
    """The JSON object in a file, None when the file is missing; a ModelError when it is anything else."""
    text = read_text(folder, name)
    if text is None:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{folder / name}: not valid JSON ({error}); copy the file again from its source") from error
    if not isinstance(value, dict):
        raise ModelError(f"{folder / name}: holds a JSON {type(value).__name__}, an object is needed")
    return value


def require_json(folder: Path, name: str) -> dict[str, Any]:
    """Like `read_json`, but a missing file is a ModelError."""
    value = read_json(folder, name)
    if value is None:
        raise ModelError(f"{folder / name} is missing; copy it from the place where the checkpoint came from")
    return value
