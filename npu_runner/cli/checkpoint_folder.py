"""The folder of a model that a command only inspects: a local one, a hub id's small files, or one made for a bare
config.json. Knows nothing of models."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from npu_runner.checkpoint.files import require_json, resolve_checkpoint
from npu_runner.errors import ConfigError

# What Qwen3-VL is published with: where the file is not there, images may be as large.
_LARGEST_IMAGE = {"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096}


def is_bare_config(model: str) -> bool:
    """Whether `model` is a file, which is a config.json then."""
    return Path(model).expanduser().is_file()


@contextmanager
def checkpoint_folder(model: str, revision: str | None) -> Iterator[Path]:
    """The folder of a checkpoint; of a file, which is a config.json, one that has it and, for images, defaults."""
    if not is_bare_config(model):
        yield resolve_checkpoint(model, revision, with_weights=False)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _fill(folder, Path(model).expanduser())
            yield folder
        except ConfigError as error:  # about the file that was named; this folder is gone when the message is read
            message = str(error).replace(str(folder / "config.json"), model).replace(str(folder), model)
            raise type(error)(message) from error


def _fill(folder: Path, file: Path) -> None:
    shutil.copy(file, folder / "config.json")
    config = require_json(folder, "config.json")
    vision = config.get("vision_config")
    if isinstance(vision, dict):
        sizes = {"merge_size": vision.get("spatial_merge_size", 2), **_patches(str(config.get("model_type")), vision),
                 "size": _LARGEST_IMAGE}
        (folder / "preprocessor_config.json").write_text(json.dumps(sizes))


def _patches(model_type: str, vision: dict[str, Any]) -> dict[str, Any]:
    """Side and frames of a patch. A family whose towers take one frame may have any number of frames in its file."""
    from npu_runner.strategies import find_strategy  # imports torch where there is a family of that name

    strategy = find_strategy(model_type)
    if strategy is not None and strategy.image_defaults.temporal_patch_size == 1:
        return {"patch_size": vision.get("patch_size", strategy.image_defaults.patch_size), "temporal_patch_size": 1}
    return {"patch_size": vision.get("patch_size", 16), "temporal_patch_size": vision.get("temporal_patch_size", 2)}
