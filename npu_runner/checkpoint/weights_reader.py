"""Opens the safetensors files of a checkpoint folder. Knows names, shapes and slices; nothing of models."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from npu_runner.checkpoint.files import require_json
from npu_runner.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class CheckpointReader:
    """A checkpoint of one or many safetensors files, memory-mapped; tensors are copied out one slice at a time.

    `progress`: called with (bytes of the tensors that were read so far, bytes of all files), once a percent at most. A
    tensor counts whole, with the first slice of it.
    """

    def __init__(self, path: Path, progress: Callable[[int, int], None] = lambda num_read, num_bytes: None):
        self.path = path
        self._progress = progress
        self._num_read = self._percent = 0
        names = _file_names(path)
        self._files = [self._open(path / name) for name in names]
        self._num_bytes = sum((path / name).stat().st_size for name in names)
        self._file_of: dict[str, Any] = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._check_index()
        self._unread = self.names

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """As safetensors calls it: "BF16", "F32", "I8", ..."""
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        """The tensor, or elements [start, start + length) of it along `dim`, on the CPU in its stored dtype."""
        file = self._file_of[name]
        if dim is None:
            values = file.get_tensor(name)
        else:
            values = file.get_slice(name)[(slice(None),) * dim + (slice(start, start + length),)]
        if name in self._unread:
            self._unread.remove(name)
            self._count(prod(self.shape(name)) * values.element_size())
        return values

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        percent = 100 * self._num_read // self._num_bytes
        if percent > self._percent:
            self._percent = percent
            self._progress(self._num_read, self._num_bytes)

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self._files.clear()
        self._file_of.clear()

    def _open(self, file: Path) -> Any:
        try:
            return safe_open(str(file), framework="pt")
        except FileNotFoundError:
            raise WeightsError(f"{file} is missing: the checkpoint is incomplete") from None
        except (SafetensorError, OSError) as broken:
            raise WeightsError(f"{file} cannot be read: {broken}") from broken

    def _check_index(self) -> None:
        if not (self.path / _INDEX).exists():
            return
        promised = set(require_json(self.path, _INDEX).get("weight_map", {}))
        lost = sorted(promised - self.names)
        if lost:
            raise WeightsError(f"{self.path / _INDEX} names tensors that no file holds: {_some(lost)}")


def has_tensor(path: Path, name: str) -> bool | None:
    """Whether the checkpoint in `path` has a tensor of that name; None: it has no weights (there is `load_format`)."""
    if (path / _INDEX).exists():
        return name in require_json(path, _INDEX).get("weight_map", {})
    if not (path / _SINGLE).exists():
        return None
    with CheckpointReader(path) as reader:
        return name in reader.names


def _file_names(path: Path) -> list[str]:
    if (path / _INDEX).exists():
        weight_map = require_json(path, _INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{path / _INDEX} has no weight_map")
        return sorted(set(weight_map.values()))
    if (path / _SINGLE).exists():
        return [_SINGLE]
    others = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; {', '.join(others)} cannot be used, convert it to safetensors" if others else ""
    raise WeightsError(f"{path} holds neither {_SINGLE} nor {_INDEX}{hint}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
