"""Says which files of a checkpoint folder hold its weights. The loader opens these files, and no others are hashed.

Knows names and the index; opens no weights and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from npu_runner.checkpoint.files import is_modelslim, require_json
from npu_runner.errors import WeightsError
from npu_runner.request.limits import shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_INDICES = "*.safetensors.index.json"


class WeightFiles(NamedTuple):
    """The files that hold a checkpoint's weights."""

    names: list[str]
    """Without folders, in order. Empty where the folder has neither weights nor an index."""
    index_file: str | None = None
    """The name of the index that counts, where there is one."""
    file_of: Mapping[str, str] = {}
    """The file that holds each tensor, as the index says; empty without an index."""


def weight_files(folder: Path) -> WeightFiles:
    """The files that transformers would take the weights from, or a quantiser's files by their own names.

    An index with missing files does not count beside `model.safetensors`. Raises WeightsError for an index without a
    weight_map, for file names that lead elsewhere, and for `model.safetensors` beside an index that is whole.
    """
    name = _index(folder)
    singles = _of_other_names(folder) or [SINGLE] * (folder / SINGLE).is_file()
    if name is None:
        return WeightFiles(singles)
    file_of = _read_index(folder, name)
    names = sorted(set(file_of.values()))
    singles = [each for each in singles if each not in names]
    if singles and not all((folder / each).is_file() for each in names):
        return WeightFiles(singles)
    if name == INDEX and SINGLE not in names and (folder / SINGLE).is_file():
        raise WeightsError(
            f"{folder} holds {SINGLE} beside {INDEX} and its {len(names)} files, which are the weights of two saves; "
            f"remove {SINGLE}, or the index and its files")
    return WeightFiles(names, name, file_of)


def weights_are_there(folder: Path) -> bool:
    """Whether every file of weights is in the folder. A hub id may have only its small files there."""
    names = weight_files(folder).names
    return bool(names) and all((folder / name).is_file() for name in names)


def _index(folder: Path) -> str | None:
    """The index file; ModelSlim's is called otherwise, and stands before one that was copied along."""
    if is_modelslim(folder):
        found = sorted((file.name for file in folder.glob(_INDICES)), key=lambda name: ("quant" not in name, name))
        return found[0] if found else None
    return INDEX if (folder / INDEX).exists() else None


def _read_index(folder: Path, name: str) -> dict[str, str]:
    """The file of each tensor."""
    file_of = require_json(folder, name).get("weight_map")
    if not isinstance(file_of, dict) or not file_of:
        raise WeightsError(f"{folder / name} has no weight_map; copy it again from its source")
    for tensor, file in file_of.items():
        if not isinstance(file, str) or "/" in file or "\\" in file or file in ("", ".", ".."):
            raise WeightsError(f"{folder / name} names the file {shown(file)} for {shown(tensor)}; weights lie in the "
                               "folder of the index itself, under a name without a path")
    return file_of


def _of_other_names(folder: Path) -> list[str]:
    """The weights of a folder without an index, where a quantiser chose their names."""
    if not is_modelslim(folder) and not (folder / "quantize_config.json").exists():
        return []
    named = sorted((file.name for file in folder.glob("*.safetensors")), key=lambda name: ("quant" not in name, name))
    return [name for name in named if "quant" in name] or named
