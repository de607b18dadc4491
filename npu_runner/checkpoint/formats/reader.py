"""Opens a checkpoint's weights, quantised or not: what is quantised is dequantised in slices while it is read.

Knows formats by their modules, no model and no platform.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from types import EllipsisType

import torch

from npu_runner.checkpoint.formats import grouped
from npu_runner.checkpoint.formats.contents import Contents
from npu_runner.checkpoint.formats.kv_scales import KV_SCALES, claim_kv_scales, read_kv_scales
from npu_runner.checkpoint.formats.stored import QuantisedMatrix, QuantisedStack
from npu_runner.checkpoint.quantization import AWQ, COMPRESSED_TENSORS, FP8, GPTQ, MODELSLIM, Quantization
from npu_runner.checkpoint.weights_reader import (
    CheckpointReader,
    GroupedForm,
    GroupedPiece,
    Int8Inputs,
    ScaledRows,
    WeightsReader,
    split_member,
)
from npu_runner.errors import WeightsError
from npu_runner.request.limits import size

logger = logging.getLogger(__name__)

_MODULES: Mapping[str, str] = {AWQ: "awq", COMPRESSED_TENSORS: "compressed_tensors", FP8: "fp8", GPTQ: "gptq",
                               MODELSLIM: "modelslim"}
_ELEMENTS_AT_ONCE = 4 << 20
"""Elements of one tensor that are dequantised at once, in float32; loading takes this much beside the weights."""


def open_weights(path: Path, quantization: Quantization | None,
                 progress: Callable[[int, int], None] = lambda num_read, num_bytes: None) -> WeightsReader:
    """The tensors of a float checkpoint. Raises WeightsError for files that are broken or do not fit their format,
    ModelError for a format's setting that is not read; both before weights are."""
    stored = CheckpointReader(path, progress)
    if quantization is None:
        return stored
    with ExitStack() as stack:
        stack.enter_context(stored)
        reader = DequantisingReader(stored, quantization)
        stack.pop_all()
    return reader


_MULTIPLIED = {None: "int8, with inputs that are rounded to int8",
               "fp8": "FP8, with inputs that are rounded to FP8 by row",
               "fp8_blocks": "FP8, with inputs that are rounded to FP8 in groups of 128",
               "grouped": "they are stored, with inputs in 16 bits"}


class DequantisingReader(WeightsReader):
    """Tensors as a float checkpoint would have them. What is computed is float32, from a slice of what is stored."""

    def __init__(self, stored: CheckpointReader, quantization: Quantization):
        self.path, self._stored, self._method = stored.path, stored, quantization.method
        self._contents = Contents(stored)
        self._grouped: dict[str, GroupedForm | None] = {}
        self._kv_scales = claim_kv_scales(self._contents)
        import_module(f"npu_runner.checkpoint.formats.{_MODULES[quantization.method]}").read(
            self._contents, quantization.settings)
        self._contents.raise_problems()
        if not self._contents.made:
            raise WeightsError(f"{self.path}: its small files say that weights are quantised ({quantization.method}), "
                               "and no tensor is; copy the checkpoint again from its source")
        self._names = (stored.names - self._contents.claimed) | set(self._contents.made)

    @property
    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        made = self._contents.made.get(name)
        return self._stored.shape(name) if made is None else made.shape

    def dtype(self, name: str) -> str:
        return "F32" if name in self._contents.made else self._stored.dtype(name)

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        made = self._contents.made.get(name)
        if made is None:
            return self._stored.read(name, dim, start, length)
        return made.read(_spans(made.shape, dim, start, length))

    def pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
               ) -> Iterator[tuple[slice | EllipsisType, torch.Tensor]]:
        made = self._contents.made.get(name)
        if made is None:
            yield from self._stored.pieces(name, dim, start, length)
            return
        first, *rest = _spans(made.shape, dim, start, length)
        for rows, span in some_rows(first, math.prod(length for _, length in rest)):
            yield rows, made.read([span, *rest])

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        made = self._quantised(name)
        return made.inputs if made is not None and isinstance(made.inputs, Int8Inputs) else None

    def row_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[ScaledRows]:
        made, first, columns = self._matrix(name, dim, start, length)
        for rows, span in some_rows(first, columns[1]):
            yield rows, *made.read_rows(span, columns)

    def fp8_form(self, name: str) -> str | None:
        made = self._quantised(name)
        return made.inputs if made is not None and isinstance(made.inputs, str) else None

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        made, first, columns = self._matrix(name, dim, start, length)
        for rows, span in some_rows(first, columns[1]):
            yield rows, made.read_fp8(span, columns)

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        made, first, columns = self._matrix(name, dim, start, length)
        return made.read_fp8_scales(first, columns)

    def grouped_form(self, name: str) -> GroupedForm | None:
        made = self._contents.made.get(name)
        if name not in self._grouped:
            self._grouped[name] = grouped.form_of(made) if isinstance(made, QuantisedMatrix) else None
        return self._grouped[name]

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        (made, first, columns), form = self._matrix(name, dim, start, length), self.grouped_form(name)
        assert form is not None, f"{name} has no groups"
        for rows, span in some_rows(first, columns[1]):
            yield grouped.read(made, form, rows, span, columns)

    def kv_scales(self, module: str) -> tuple[float, float] | None:
        names = self._kv_scales.get(module)
        return None if names is None else read_kv_scales(self._stored, names)

    def _matrix(self, name: str, dim: int | None, start: int, length: int
                ) -> tuple[QuantisedMatrix, tuple[int, int], tuple[int, int]]:
        """A matrix, and the rows and columns that are wanted of it."""
        made = self._quantised(name)
        assert made is not None, f"{name} is no matrix"
        first, columns = _spans(made.shape, dim, start, length)
        return made, first, columns

    def _quantised(self, name: str) -> QuantisedMatrix | None:
        """A matrix, the `Member` of a stack, or, of a stack, one as all of them are."""
        stored, member = split_member(name)
        made = self._contents.made.get(stored)
        if isinstance(made, QuantisedStack):
            made = made.matrices[0 if member is None else member.place]
        return made if isinstance(made, QuantisedMatrix) and not (member and member.is_turned) else None

    def close(self) -> None:
        self._stored.close()

    def form(self, name: str) -> str | None:
        """In words, how it is stored; None: it is not quantised."""
        made = self._contents.made.get(name)
        return None if made is None else made.form

    @property
    def weight_forms(self) -> frozenset[str]:
        """The stored forms that a platform may have a matmul for."""
        found: set[str | None] = set()
        for name in self._contents.made:
            if (inputs := self.int8_inputs(name)) is not None:
                found.add("int8" if inputs.scale is None else "int8_static")
            else:
                found.add(self.fp8_form(name) or (None if self.grouped_form(name) is None else "grouped"))
        return frozenset(form for form in found if form is not None)

    @property
    def forms(self) -> str:
        """The number of weights by their stored form."""
        return self._contents.describe()

    def describe(self, dtype: torch.dtype, multiplied: Collection[str] = (), *, uses_kv_scales: bool = False) -> str:
        """For the log: what is dequantised, its bytes in the files and as `dtype`, and what nothing is computed from.
        `multiplied`: those that are not dequantised, but multiplied as they are stored."""
        contents = self._contents
        unused = "".join(f"; {count} {what} are not used" for what, count in sorted(contents.unused.items())
                         if not (uses_kv_scales and what == KV_SCALES))
        others = [tensor for name, tensor in contents.made.items() if name not in multiplied]
        num_others = sum(bool(tensor.form) for tensor in others)
        kinds = Counter(self.fp8_form(name) or (None if self.int8_inputs(name) else "grouped") for name in multiplied)
        parts = [f"{count} are multiplied as {_MULTIPLIED[form]}" for form, count in sorted(
            kinds.items(), key=lambda kind: str(kind[0]))]
        if not multiplied or num_others:
            num_bytes = dtype.itemsize * sum(math.prod(tensor.shape) for tensor in others)
            name = str(dtype).removeprefix("torch.")
            taken = f"the other {num_others}" if multiplied else f"{size(contents.stored_bytes)} of the files"
            parts += [f"{taken} become {size(num_bytes)} of {name} while loading, and inputs are not quantised"]
        said = "; ".join(parts)
        return f"quantised weights ({self._method}): {self.forms}; {said}{unused}"


def some_rows(span: tuple[int, int], width: int) -> Iterator[tuple[slice, tuple[int, int]]]:
    """Rows of `span` that are read at once: counted from its start, and as a span."""
    first, count = span
    step = max(1, _ELEMENTS_AT_ONCE // max(1, width))
    for done in range(0, count, step):
        taken = min(step, count - done)
        yield slice(done, done + taken), (first + done, taken)


def _spans(shape: tuple[int, ...], dim: int | None, start: int, length: int) -> list[tuple[int, int]]:
    return [(start, length) if axis == dim else (0, whole) for axis, whole in enumerate(shape)]
