"""Opens the safetensors files of a checkpoint folder. Knows names, shapes and slices; nothing of models."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from types import EllipsisType, TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from npu_runner.checkpoint.files import is_modelslim, require_json
from npu_runner.errors import WeightsError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_INDICES = "*.safetensors.index.json"
_Reader = TypeVar("_Reader", bound="WeightsReader")
ScaledRows: TypeAlias = tuple[slice, torch.Tensor, torch.Tensor]
"""Which rows of those that were asked for, their values (int8 or e4m3), and a scale for each of them (float32)."""


class Int8Inputs(NamedTuple):
    """Inputs x of a product as int8: round(x / scale + offset). Without a scale each row has its own, max|x| / 127."""

    scale: float | None = None
    offset: float = 0.0


BY_ROW = Int8Inputs()


class GroupedForm(NamedTuple):
    """(values - zeros) * scales, whole numbers of `bits` bits, for products with inputs in 16 bits."""

    bits: int
    """4 or 8."""
    group_size: int
    """So many inputs of a row share a scale and a zero; 0: all do."""
    has_zeros: bool


class GroupedPiece(NamedTuple):
    """Some rows of those that were asked for."""

    rows: slice
    values: torch.Tensor
    """int8 (R, C), from -8 to 7 where they have 4 bits."""
    scales: torch.Tensor
    """float32 (R, G)."""
    zeros: torch.Tensor | None
    """float32 (R, G), whole numbers."""


class Member(NamedTuple):
    """One matrix of a stack, a tensor of three dims. What reads it alone is called by the stack's name and `suffix`.
    `is_turned`: it lies as (inputs, outputs), and is read as (outputs, inputs)."""

    place: int
    is_turned: bool = False

    @property
    def suffix(self) -> str:
        return f"[{self.place}]" + (".T" if self.is_turned else "")


def split_member(name: str) -> tuple[str, Member | None]:
    """The tensor that is stored, and which of its matrices is meant; None: it is no stack, or all of it is."""
    found = _MEMBER.fullmatch(name)
    return (name, None) if found is None else (found[1], Member(int(found[2]), bool(found[3])))


_MEMBER = re.compile(r"(.*)\[(\d+)\](\.T)?")


class WeightsReader(ABC):
    """Float tensors of a checkpoint, by name. A context manager."""

    path: Path

    @property
    @abstractmethod
    def names(self) -> set[str]: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]: ...

    @abstractmethod
    def dtype(self, name: str) -> str:
        """As safetensors calls it: "BF16", "F32", "I8", ..."""

    @abstractmethod
    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        """The tensor, or elements [start, start + length) of it along `dim`, on the CPU in its stored dtype."""

    def pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
               ) -> Iterator[tuple[slice | EllipsisType, torch.Tensor]]:
        """What `read` returns, piece by piece: which elements of its first dim (all: ...), and their values."""
        yield ..., self.read(name, dim, start, length)

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        """How inputs of products with this matrix are rounded, where it is one of int8, by row and without zeros; None:
        it is not, or inputs stay as they are. Of a stack: with each of its matrices."""
        return None

    def row_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[ScaledRows]:
        """As `pieces`, not multiplied out. Asked for where there are `int8_inputs`, of a stack for each `Member`, and
        where the `fp8_form` is fp8."""
        raise AssertionError(f"{name} has no scales of rows")

    def fp8_form(self, name: str) -> str | None:
        """fp8: a matrix of FP8 (e4m3) with a scale for each row. fp8_blocks: one for each block of 128 x 128. Both are
        for products whose inputs are rounded to FP8, too. None: it is neither. Of a stack: that of its matrices."""
        return None

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As `pieces`, in FP8 and not multiplied out. Asked for where the `fp8_form` is fp8_blocks."""
        raise AssertionError(f"{name} is not FP8")

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        """float32 of the elements of `fp8_pieces`: a scale for each block, none of which is cut."""
        raise AssertionError(f"{name} is not FP8")

    def grouped_form(self, name: str) -> GroupedForm | None:
        """That of a matrix whose groups lie side by side, and whose products take inputs as they are; else None."""
        return None

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        """As `pieces`, not multiplied out; no group is cut. Asked for where there is a `grouped_form`."""
        raise AssertionError(f"{name} has no groups")

    def kv_scales(self, module: str) -> tuple[float, float] | None:
        """What keys and what values of an attention module are divided by before they become FP8; None: it has no such
        scales. Raises WeightsError for what is none."""
        return None

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self: _Reader) -> _Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 traceback: TracebackType | None) -> None:
        self.close()


class CheckpointReader(WeightsReader):
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
        self._unread = set(self._file_of)

    @property
    def names(self) -> set[str]:
        return set(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return str(self._file_of[name].get_slice(name).get_dtype())

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        return self._read(name, None if dim is None else (slice(None),) * dim + (slice(start, start + length),))

    def read_block(self, name: str, *spans: tuple[int, int]) -> torch.Tensor:
        """Elements [start, start + length) along each dim, for spans (start, length)."""
        return self._read(name, tuple(slice(start, start + length) for start, length in spans))

    def _read(self, name: str, slices: tuple[slice, ...] | None) -> torch.Tensor:
        file = self._file_of[name]
        values = file.get_tensor(name) if slices is None else file.get_slice(name)[slices]
        if name in self._unread:
            self._unread.remove(name)
            self._count(prod(file.get_slice(name).get_shape()) * values.element_size())
        return values

    def _count(self, num_bytes: int) -> None:
        self._num_read += num_bytes
        percent = 100 * self._num_read // self._num_bytes
        if percent > self._percent:
            self._percent = percent
            self._progress(self._num_read, self._num_bytes)

    def close(self) -> None:
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
        index = _index(self.path)
        if index is None:
            return
        promised = set(require_json(self.path, index).get("weight_map", {}))
        lost = sorted(promised - set(self._file_of))
        if lost:
            raise WeightsError(f"{self.path / index} names tensors that no file holds: {_some(lost)}")


def has_module(path: Path, name: str) -> bool | None:
    """Whether the checkpoint in `path` has a tensor of the module `name`, quantised or not; None: it has no weights
    (there is `load_format`)."""
    index, prefix = _index(path), f"{name}."
    if index is not None:
        return any(each.startswith(prefix) for each in require_json(path, index).get("weight_map", {}))
    if not (path / _SINGLE).exists() and not _of_other_names(path):
        return None
    with CheckpointReader(path) as reader:
        return any(each.startswith(prefix) for each in reader.names)


def weights_are_there(path: Path) -> bool:
    """Whether every file of weights is in the folder: of a hub id, small files alone may be."""
    try:
        return all((path / name).is_file() for name in _file_names(path))
    except WeightsError:  # none is
        return False


def _index(path: Path) -> str | None:
    """The index file; ModelSlim's is called otherwise, and stands before one that was copied along."""
    if is_modelslim(path):
        found = sorted((file.name for file in path.glob(_INDICES)), key=lambda name: ("quant" not in name, name))
        return found[0] if found else None
    return _INDEX if (path / _INDEX).exists() else None


def _of_other_names(path: Path) -> list[str]:
    """The weights of a folder without an index, where a quantiser chose their names."""
    if not is_modelslim(path) and not (path / "quantize_config.json").exists():
        return []
    return sorted((file.name for file in path.glob("*.safetensors")), key=lambda name: ("quant" not in name, name))


def _file_names(path: Path) -> list[str]:
    index = _index(path)
    if index is not None:
        weight_map = require_json(path, index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise WeightsError(f"{path / index} has no weight_map")
        return sorted(set(weight_map.values()))
    named = _of_other_names(path)
    if named:
        quantised = [name for name in named if "quant" in name]
        return quantised or named
    if (path / _SINGLE).exists():
        return [_SINGLE]
    others = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    hint = f"; {', '.join(others)} cannot be used, convert it to safetensors" if others else ""
    raise WeightsError(f"{path} holds neither {_SINGLE} nor {_INDEX}{hint}")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"


def renamed_tensor(name: str, renamed: Mapping[str, str]) -> str:
    """The checkpoint's name of a tensor. `renamed`: how names begin there, by how they begin here; the first that fits
    counts, and a `*` in both is the number of a layer."""
    for ours, theirs in renamed.items():
        found = _beginning(ours).match(name)
        if found is not None:
            return theirs.replace("*", found[1] if found.lastindex else "*") + name[found.end():]
    return name


@cache
def _beginning(pattern: str) -> re.Pattern[str]:
    return re.compile(re.escape(pattern).replace(r"\*", r"(\d+)"))
