"""Float tensors that a checkpoint holds in parts: stored numbers, scales, zeros. Any block of one can be computed
alone.

A weight is (values - zeros) * scales, in float32, from the numbers as they are stored. Knows no format's names and no
model.

N outputs, K inputs; R rows and C columns of a block; a span is (start, length).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from npu_runner.checkpoint.weights_reader import CheckpointReader, Int8Inputs
from npu_runner.errors import WeightsError

Span = tuple[int, int]
NORM_SHIFT = ".shift"
"""Suffix of a computed tensor that is added after a norm."""
_MOST_OFFSET = 256  # up to this bfloat16 has all whole numbers


class FloatTensor(ABC):
    """A tensor of a float checkpoint, computed from stored ones."""

    shape: tuple[int, ...]
    form: str
    """In words: values and what shares a scale."""

    @abstractmethod
    def read(self, spans: Sequence[Span]) -> Tensor:
        """One block, a span for each dim: float32, on the CPU, owned by the caller."""


class Matrix(ABC):
    """Numbers of the checkpoint as a matrix."""

    shape: tuple[int, int]

    @abstractmethod
    def read(self, rows: Span, columns: Span) -> Tensor:
        """(R, C), of any dtype."""


class StoredMatrix(Matrix):
    """A tensor as it lies in the file, or one of a stack (`index`). One of fewer dims is seen as `shape`."""

    def __init__(self, reader: CheckpointReader, name: str, shape: tuple[int, int] | None = None,
                 index: int | None = None, *, is_transposed: bool = False):
        self._reader, self._name, self._index, self._is_transposed = reader, name, index, is_transposed
        stored = reader.shape(name)
        self._is_flat = len(stored) < 2
        own = stored[-2:] if len(stored) >= 2 else (1, 1)
        self.shape = shape or ((own[1], own[0]) if is_transposed else (own[0], own[1]))

    def read(self, rows: Span, columns: Span) -> Tensor:
        if self._is_flat:
            return self._reader.read(self._name).reshape(self.shape)[_slice(rows), _slice(columns)]
        if self._is_transposed:
            return self._reader.read_block(self._name, columns, rows).T
        if self._index is None:
            return self._reader.read_block(self._name, rows, columns)
        return self._reader.read_block(self._name, (self._index, 1), rows, columns)[0]


class StoredVector(FloatTensor):
    """A float tensor of one dim as it lies in the file, under another name."""

    form = ""

    def __init__(self, reader: CheckpointReader, name: str):
        self._reader, self._name, self.shape = reader, name, reader.shape(name)

    def read(self, spans: Sequence[Span]) -> Tensor:
        (start, length), = spans
        return self._reader.read(self._name)[start: start + length].float()


class PackedMatrix(Matrix):
    """Small integers side by side in the words of a stored matrix, packed along its dim `dim`.

    Number i of a word has the bits from `bits * order[i]` on. `is_signed`: two's complement; else `offset` is added.
    With `is_transposed` the file has the other dim first.
    """

    def __init__(self, reader: CheckpointReader, name: str, shape: tuple[int, int], *, bits: int, dim: int,
                 word_bits: int = 32, order: Sequence[int] | None = None, offset: int = 0, is_signed: bool = False,
                 is_transposed: bool = False):
        self._reader, self._name, self.shape = reader, name, shape
        self._bits, self._dim, self._offset = bits, dim, offset
        self._is_signed, self._is_transposed = is_signed, is_transposed
        self._num = word_bits // bits
        self._shifts = bits * torch.tensor(order or range(self._num), dtype=torch.int32)

    def read(self, rows: Span, columns: Span) -> Tensor:
        spans = [columns, rows] if self._is_transposed else [rows, columns]
        start, length = spans[self._dim]
        first, end = start // self._num, -(-(start + length) // self._num)
        spans[self._dim] = (first, end - first)
        words = self._reader.read_block(self._name, *spans).to(torch.int32).unsqueeze(self._dim + 1)
        shifts = self._shifts if self._dim == 1 else self._shifts[:, None]
        numbers = (words >> shifts).bitwise_and_((1 << self._bits) - 1).flatten(self._dim, self._dim + 1)
        numbers = numbers.narrow(self._dim, start - first * self._num, length)
        if self._is_signed:
            half = 1 << (self._bits - 1)
            numbers = (numbers ^ half) - half
        numbers = numbers + self._offset if self._offset else numbers
        return numbers.T if self._is_transposed else numbers


@dataclass(frozen=True)
class Grid:
    """Numbers of which each belongs to a block of `block` rows and columns of a weight, the last ones cut short.

    `groups`: the name of the tensor that says the grid's column for each column of the weight, where they are not side
    by side.
    """

    matrix: Matrix
    block: tuple[int, int]
    groups: str | None = None
    reader: CheckpointReader | None = None

    def at(self, rows: Span, columns: Span) -> Tensor:
        """float32, of a shape that broadcasts to (R, C)."""
        row_span, row_places = _places(rows, self.block[0])
        if self.groups is None:
            column_span, column_places = _places(columns, self.block[1])
        else:
            column_span, column_places = (0, self.matrix.shape[1]), self._column_groups[_slice(columns)]
        found = self.matrix.read(row_span, column_span).to(torch.float32)
        if column_places is not None:
            found = found.index_select(1, column_places)
        return found if row_places is None else found.index_select(0, row_places)

    @cached_property
    def _column_groups(self) -> Tensor:
        assert self.groups is not None, "asked only where groups are scattered"
        assert self.reader is not None, "scattered groups come from a file"
        groups, count = self.reader.read(self.groups).long(), self.matrix.shape[1]
        if len(groups) and not 0 <= int(groups.min()) <= int(groups.max()) < count:
            raise WeightsError(f"{self.groups} names groups {int(groups.min())} to {int(groups.max())}, and there are "
                               f"scales of {count}; copy the file again from its source")
        return groups


@dataclass(frozen=True)
class QuantisedMatrix(FloatTensor):
    """(N, K): (values - zeros) * scales, scales of several grids multiplied first.

    `inputs`: values are int8 with a scale for each row, and this is how inputs of its matmuls are rounded; or they are
    FP8, and this is their form as `WeightsReader.fp8_form` has it.
    """

    form: str
    values: Matrix
    scales: tuple[Grid, ...]
    zeros: Grid | None = None
    inputs: Int8Inputs | str | None = None
    bits: int = 0
    """Bits of integers that a matmul may multiply with 16-bit inputs (grouped.py); 0 if it may not."""
    centre: int = 0
    """Stored values and zeros are this much larger than in two's complement."""

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.values.shape

    def read(self, spans: Sequence[Span]) -> Tensor:
        rows, columns = spans
        weight_RC = self.values.read(rows, columns).to(torch.float32)
        if self.zeros is not None:
            weight_RC -= self.zeros.at(rows, columns)
        scale, *others = (grid.at(rows, columns) for grid in self.scales)
        for other in others:
            scale = scale * other
        return weight_RC.mul_(scale)

    def read_rows(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        """int8 or float8_e4m3fn (R, C) and float32 (R,), of one whose `inputs` say that rows have scales."""
        assert self.inputs is not None and self.inputs != "fp8_blocks", f"{self.form} has none"  # noqa: PT018
        (grid,) = self.scales
        values = self.values.read(rows, columns)
        return (values.to(torch.int8) if isinstance(self.inputs, Int8Inputs) else values,
                grid.at(rows, (0, 1)).flatten().expand(rows[1]))

    def read_fp8(self, rows: Span, columns: Span) -> Tensor:
        """float8_e4m3fn (R, C), of one in blocks."""
        assert self.inputs == "fp8_blocks", f"{self.form} is not FP8 in blocks"
        return self.values.read(rows, columns)

    def read_fp8_scales(self, rows: Span, columns: Span) -> Tensor:
        """float32: a scale for each block, of which none is cut."""
        (grid,) = self.scales
        spans = [(start // size, -(-length // size)) for (start, length), size in zip((rows, columns), grid.block,
                                                                                      strict=True)]
        return grid.matrix.read(*spans).to(torch.float32)


@dataclass(frozen=True)
class QuantisedStack(FloatTensor):
    """(E, N, K): matrices of one shape, as experts are stored together."""

    matrices: tuple[QuantisedMatrix, ...]

    @property
    def form(self) -> str:  # type: ignore[override]
        return self.matrices[0].form

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (len(self.matrices), *self.matrices[0].shape)

    def read(self, spans: Sequence[Span]) -> Tensor:
        (start, length), *rest = spans
        return torch.stack([matrix.read(rest) for matrix in self.matrices[start: start + length]])


def _slice(span: Span) -> slice:
    return slice(span[0], span[0] + span[1])


def _places(span: Span, block: int) -> tuple[Span, Tensor | None]:
    """The part of a grid that elements of `span` need, and each element's place in it; None: as they are, or the one
    place for all."""
    start, length = span
    first, last = start // block, (start + max(1, length) - 1) // block
    if block == 1 or first == last:
        return (first, last - first + 1), None
    return (first, last - first + 1), torch.arange(start, start + length) // block - first


def static_inputs(reader: CheckpointReader, scale_name: str, offset_name: str | None) -> Int8Inputs:
    """Inputs x are round(x / scale + offset); without `offset_name` it is 0.

    Raises WeightsError for a scale that is not above 0, and for an offset that bfloat16 does not hold.
    """
    scale = reader.read(scale_name).double().item()
    offset = 0.0 if offset_name is None else reader.read(offset_name).double().item()
    if not 0 < scale < math.inf or offset != round(offset) or abs(offset) > _MOST_OFFSET:
        raise WeightsError(f"{scale_name} is {scale} and {offset_name or 'its offset'} {offset}; a scale of inputs is "
                           f"above 0, an offset a whole number of at most {_MOST_OFFSET}; copy the checkpoint again "
                           "from its source")
    return Int8Inputs(scale, offset)
