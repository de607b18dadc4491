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

from npu_runner.checkpoint.weight_files import INDEX, SINGLE, WeightFiles, weight_files, weights_are_there
from npu_runner.errors import WeightsError

_HEAD, _EMBEDDING = "lm_head", "embed_tokens.weight"
_FLOATS = ("F64", "F32", "F16", "BF16")
_ROWS_AT_ONCE = 2048
_Reader = TypeVar("_Reader", bound="WeightsReader")
ScaledRows: TypeAlias = tuple[slice, torch.Tensor, torch.Tensor]
"""Which rows of those that were asked for, their values (int8 or e4m3), and a scale for each of them (float32)."""


class Int8Inputs(NamedTuple):
    """Inputs x of a matmul as int8: round(x / scale + offset). Without a scale each row has its own, max|x| / 127."""

    scale: float | None = None
    offset: float = 0.0


BY_ROW = Int8Inputs()


class GroupedForm(NamedTuple):
    """(values - zeros) * scales, whole numbers of `bits` bits, for matmuls with inputs in 16 bits."""

    bits: int
    """4 or 8."""
    group_size: int
    """Number of inputs of a row that share a scale and a zero point; 0 means all."""
    has_zeros: bool


class GroupedPiece(NamedTuple):
    """Some of the requested rows."""

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
        """The result of `read` in pieces: the indices of its first dim (... for all), and their values."""
        yield ..., self.read(name, dim, start, length)

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        """The rounding of GEMM inputs for an int8 matrix with row scales and no zero points; None for other matrices
        and for inputs that are not rounded. For a stack, it applies to each of its matrices."""
        return None

    def row_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[ScaledRows]:
        """As `pieces`, not multiplied out. Asked for where there are `int8_inputs`, of a stack for each `Member`, and
        where the `fp8_form` is fp8."""
        raise AssertionError(f"{name} has no scales of rows")

    def fp8_form(self, name: str) -> str | None:
        """fp8: a matrix of FP8 (e4m3) with a scale for each row. fp8_blocks: one for each block of 128 x 128. Both are
        for matmuls whose inputs are rounded to FP8, too. None: neither. A stack has the form of its matrices."""
        return None

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        """As `pieces`, in FP8 and not multiplied out. Asked for where the `fp8_form` is fp8_blocks."""
        raise AssertionError(f"{name} is not FP8")

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        """float32 of the elements of `fp8_pieces`: a scale for each block, none of which is cut."""
        raise AssertionError(f"{name} is not FP8")

    def grouped_form(self, name: str) -> GroupedForm | None:
        """The form of a matrix with contiguous groups and unrounded GEMM inputs; None for others."""
        return None

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        """As `pieces`, not multiplied out; no group is cut. Asked for where there is a `grouped_form`."""
        raise AssertionError(f"{name} has no groups")

    def kv_scales(self, module: str) -> tuple[float, float] | None:
        """The divisors of keys and of values of an attention module before conversion to FP8; None without such scales.
        Raises WeightsError for an invalid scale."""
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
        files = weight_files(path)
        if not files.names:
            raise WeightsError(f"{path} holds neither {SINGLE} nor {INDEX}{_hint(path)}")
        opened = {name: self._open(path / name) for name in files.names}
        self._files = list(opened.values())
        self._num_bytes = sum((path / name).stat().st_size for name in files.names)
        self._file_of: dict[str, Any] = {}
        self._find_tensors(opened, files)
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

    def _find_tensors(self, opened: Mapping[str, Any], files: WeightFiles) -> None:
        """The file of each tensor: the one that the index names, or the only one that has it."""
        found: dict[str, list[str]] = {}
        for file, handle in opened.items():
            for name in handle.keys():  # noqa: SIM118
                found.setdefault(name, []).append(file)
        lost = sorted(name for name, file in files.file_of.items() if file not in found.get(name, []))
        if lost:
            raise WeightsError(f"{self.path / str(files.index_file)} names tensors that their file does not hold: "
                               f"{_some(lost)}")
        double = sorted(name for name, places in found.items() if len(places) > 1 and name not in files.file_of)
        if double:
            raise WeightsError(f"{self.path}: {' and '.join(found[double[0]])} both hold {_some(double)}, and no index "
                               "says which of them counts; remove one of the files")
        self._file_of = {name: opened[files.file_of.get(name, places[0])] for name, places in found.items()}


def has_module(path: Path, name: str) -> bool | None:
    """Whether the checkpoint in `path` has a tensor of the module `name`, quantised or not; None: it has no weights
    (there is `load_format`)."""
    files, prefix = weight_files(path), f"{name}."
    if not files.names:
        return None
    if files.index_file is not None:
        return any(each.startswith(prefix) for each in files.file_of)
    with CheckpointReader(path) as reader:
        return any(each.startswith(prefix) for each in reader.names)


def stores_another_head(path: Path, dtype: torch.dtype) -> bool:
    """Whether the checkpoint in `path` has an output head beside the embedding, and the two differ as `dtype`.

    Such a head counts although config.json ties it to the embedding, as in transformers. A quantised one is not looked
    at.
    """
    if not has_module(path, _HEAD) or not weights_are_there(path):
        return False
    with CheckpointReader(path) as reader:
        embedding = min((name for name in reader.names if name.endswith(_EMBEDDING)), key=len, default=None)
        pair = [f"{_HEAD}.weight", str(embedding)]
        if any(name not in reader.names or reader.dtype(name) not in _FLOATS for name in pair):
            return False
        if reader.shape(pair[0]) != reader.shape(pair[1]):
            return True
        num_rows = reader.shape(pair[1])[0]
        return any(not torch.equal(*(reader.read(name, 0, start, min(_ROWS_AT_ONCE, num_rows - start)).to(dtype)
                                     for name in pair)) for start in range(0, num_rows, _ROWS_AT_ONCE))


def _hint(path: Path) -> str:
    others = sorted(file.name for file in path.glob("*") if file.suffix in (".bin", ".pt", ".pth", ".gguf"))
    return f"; {', '.join(others)} cannot be used, convert it to safetensors" if others else ""


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
