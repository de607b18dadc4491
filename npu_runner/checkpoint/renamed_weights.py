"""The tensors of a checkpoint by the names that a network has for them. Knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import EllipsisType

import torch

from npu_runner.checkpoint.weights_reader import GroupedForm, GroupedPiece, Int8Inputs, ScaledRows, WeightsReader


@dataclass(frozen=True)
class Chunk:
    """One of `num_chunks` equal parts of a stored tensor along its first dim."""

    stored: str
    place: int
    num_chunks: int


class RenamedReader(WeightsReader):
    """`base` under other names."""

    def __init__(self, base: WeightsReader, stored: Mapping[str, str | Chunk]):
        """`stored`: the names in `base` by those that it gets. A tensor that is not among them is left out. A chunk of
        a quantised tensor is dequantised."""
        self.path, self.base = base.path, base
        self._chunks = {name: source for name, source in stored.items() if isinstance(source, Chunk)}
        self._stored = {name: source.stored if isinstance(source, Chunk) else source for name, source in stored.items()}

    @property
    def names(self) -> set[str]:
        return set(self._stored)

    def stored(self, name: str) -> str:
        """The name in `base`; `name` may be that of a stack's Member."""
        stack, bracket, member = name.partition("[")
        return self._stored[stack] + bracket + member

    def shape(self, name: str) -> tuple[int, ...]:
        shape, chunk = self.base.shape(self.stored(name)), self._chunks.get(name)
        return shape if chunk is None else (shape[0] // chunk.num_chunks, *shape[1:])

    def dtype(self, name: str) -> str:
        return self.base.dtype(self.stored(name))

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        if name not in self._chunks:
            return self.base.read(self.stored(name), dim, start, length)
        num_rows = self.shape(name)[0]
        first = self._chunks[name].place * num_rows
        if dim == 0:
            return self.base.read(self.stored(name), 0, first + start, length)
        rows = self.base.read(self.stored(name), 0, first, num_rows)
        return rows if dim is None else rows.narrow(dim, start, length)

    def pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
               ) -> Iterator[tuple[slice | EllipsisType, torch.Tensor]]:
        if name in self._chunks:
            return super().pieces(name, dim, start, length)
        return self.base.pieces(self.stored(name), dim, start, length)

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        return None if name in self._chunks else self.base.int8_inputs(self.stored(name))

    def row_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[ScaledRows]:
        return self.base.row_pieces(self.stored(name), dim, start, length)

    def fp8_form(self, name: str) -> str | None:
        return None if name in self._chunks else self.base.fp8_form(self.stored(name))

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        return self.base.fp8_pieces(self.stored(name), dim, start, length)

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        return self.base.fp8_scales(self.stored(name), dim, start, length)

    def grouped_form(self, name: str) -> GroupedForm | None:
        return None if name in self._chunks else self.base.grouped_form(self.stored(name))

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        return self.base.grouped_pieces(self.stored(name), dim, start, length)

    def kv_scales(self, module: str) -> tuple[float, float] | None:
        """The scales of the innermost module around `module` that has tensors."""
        while module:
            for name, stored in self._stored.items():
                tail = name.removeprefix(module)
                if tail != name and tail.startswith(".") and stored.endswith(tail):
                    return self.base.kv_scales(stored.removesuffix(tail))
            module = module.rpartition(".")[0]
        return None

    def close(self) -> None:
        self.base.close()
