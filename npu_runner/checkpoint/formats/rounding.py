"""Matrices of a 16-bit or FP8 checkpoint as int8 with a scale for each row, made while they are read: what the setting
`quantization` int8 asks for. Knows no model; which matrices are meant is told.

R rows, K inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import EllipsisType

import torch

from npu_runner.checkpoint.formats.reader import DequantisingReader, some_rows
from npu_runner.checkpoint.weights_reader import BY_ROW, GroupedForm, GroupedPiece, Int8Inputs, Int8Piece, WeightsReader
from npu_runner.errors import ConfigError, WeightsError

_INT8_MAX = 127.0


class RoundingReader(WeightsReader):
    """Tensors of `base`; those called `names` are rounded to the nearest of 255 steps, the row's largest at 127.

    Scales are those of whole rows, whichever columns are wanted. Matrices that are int8 by row already stay as they
    are. Raises ConfigError for those that are stored in other integers.
    """

    def __init__(self, base: WeightsReader, names: Collection[str]):
        self.path, self._base, self._names = base.path, base, set(names)
        for name in sorted(names):
            form = base.form(name) if isinstance(base, DequantisingReader) else None
            if form is not None and not form.startswith("fp8") and base.int8_inputs(name) is None:
                raise ConfigError(f"quantization int8 makes int8 weights of 16 bits and of FP8, and {name} is stored "
                                  f"as {form}; leave it at auto")

    @property
    def names(self) -> set[str]:
        return self._base.names

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def dtype(self, name: str) -> str:
        return "F32" if name in self._names else self._base.dtype(name)

    def read(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        if name not in self._names:
            return self._base.read(name, dim, start, length)
        return torch.cat([values for _, values in self.pieces(name, dim, start, length)])

    def pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
               ) -> Iterator[tuple[slice | EllipsisType, torch.Tensor]]:
        if name not in self._names:
            yield from self._base.pieces(name, dim, start, length)
            return
        for rows, values_RK, scales_R in self.int8_pieces(name, dim, start, length):
            yield rows, values_RK.float().mul_(scales_R[:, None])

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        """By row, also where the file has one scale for all inputs."""
        return BY_ROW if name in self._names else self._base.int8_inputs(name)

    def int8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[Int8Piece]:
        if self._base.int8_inputs(name) is not None:
            yield from self._base.int8_pieces(name, dim, start, length)
            return
        num_rows, num_inputs = self.shape(name)
        first = (start, length) if dim == 0 else (0, num_rows)
        columns = slice(start, start + length) if dim == 1 else slice(None)
        for rows, (begin, count) in some_rows(first, num_inputs):
            weight_RK = self._base.read(name, 0, begin, count).float()
            scales_R = weight_RK.abs().amax(1) / _INT8_MAX
            if not bool(scales_R.isfinite().all()):
                raise WeightsError(f"{name} holds values that are no numbers; copy the checkpoint again from its "
                                   "source")
            weight_RK.div_(scales_R.masked_fill(scales_R == 0, 1.0)[:, None]).round_()
            yield rows, weight_RK[:, columns].to(torch.int8), scales_R

    def fp8_form(self, name: str) -> str | None:
        return None if name in self._names else self._base.fp8_form(name)

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        return self._base.fp8_pieces(name, dim, start, length)

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        return self._base.fp8_scales(name, dim, start, length)

    def grouped_form(self, name: str) -> GroupedForm | None:
        return None if name in self._names else self._base.grouped_form(name)

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        return self._base.grouped_pieces(name, dim, start, length)

    def close(self) -> None:
        self._base.close()

    def describe(self, dtype: torch.dtype, *, is_multiplied: bool) -> str:
        """For the log. `is_multiplied`: as int8, and not dequantised to `dtype`."""
        done = sum(self._base.int8_inputs(name) is not None for name in self._names)
        stay = f" ({done} are int8 already)" if done else ""
        then = ("multiplied with inputs that are rounded to int8 by row, too" if is_multiplied else
                f"dequantised to {str(dtype).removeprefix('torch.')}; inputs are not quantised")
        return f"{len(self._names)} weights are rounded to int8 by row while loading{stay}, and {then}"
