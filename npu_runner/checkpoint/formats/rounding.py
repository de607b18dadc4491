"""Matrices of a checkpoint as int8 or FP8 (e4m3), made while they are read: what the setting `quantization` asks for.
Scales are those of rows, and for some of FP8 those of blocks. int8 is made of 16 bits and FP8, FP8 of 16 bits. Knows no
model; which matrices are meant is told.

R rows, K inputs; A x B blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from types import EllipsisType
from typing import NamedTuple

import torch

from npu_runner.checkpoint.formats.reader import DequantisingReader, some_rows
from npu_runner.checkpoint.weights_reader import (
    BY_ROW,
    GroupedForm,
    GroupedPiece,
    Int8Inputs,
    Member,
    ScaledRows,
    WeightsReader,
    split_member,
)
from npu_runner.errors import ConfigError, WeightsError

BLOCK = 128
"""Rows and columns of a block."""


class Target(NamedTuple):
    """The target of rounding rows or blocks: weight / scale to the nearest, ties to even, with the scale max|weight| /
    `largest`. arXiv 2209.05433 defines e4m3."""

    name: str
    """As `quantization` and the start line call it."""
    largest: float
    dtype: torch.dtype

    def rounded(self, weight: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
        """In `dtype`; `weight`, float32, is overwritten. `most`: the largest magnitude beside each weight, as that
        broadcasts.

        Weights of 16 bits have many ties. They stay ties, because their product with `largest` is exact.
        """
        values = weight.mul_(self.largest).div_(most.masked_fill(most == 0, 1.0))
        return (values if self.dtype.is_floating_point else values.round_()).to(self.dtype)


TO_INT8, TO_FP8 = Target("int8", 127.0, torch.int8), Target("FP8", 448.0, torch.float8_e4m3fn)


class RoundingReader(WeightsReader):
    """Tensors of `base`; those called `names` are rounded to `target`.

    Scales are those of whole rows, whichever columns are wanted. Matrices that are int8 by row already stay as they
    are, of FP8 those of any form. Raises ConfigError for those that are stored in other integers. `turned`: the stacks
    among `names` whose matrices lie as (inputs, outputs); a row is what makes one output. `in_blocks`: those among
    `names` that get a scale for each block of 128 x 128, which no slice cuts. Of FP8 alone.
    """

    def __init__(self, base: WeightsReader, names: Collection[str], turned: Collection[str] = (),
                 target: Target = TO_INT8, in_blocks: Collection[str] = ()):
        self.path, self._base, self._names, self._turned = base.path, base, set(names), set(turned)
        self._target, self._is_int8 = target, target == TO_INT8
        for name in sorted(names):
            form = base.form(name) if isinstance(base, DequantisingReader) else None
            if form is None or (self._is_int8 and base.int8_inputs(name) is not None):
                continue
            if not form.startswith("fp8"):
                made_of = "16 bits and of FP8" if self._is_int8 else "16 bits"
                raise ConfigError(f"quantization {target.name.lower()} makes {target.name} weights of {made_of}, and "
                                  f"{name} is stored as {form}; leave it at auto")
            if not self._is_int8:
                self._names.remove(name)
        self._in_blocks = self._names & set(in_blocks)
        self._block_scales: dict[tuple[str, int | None, int, int], torch.Tensor] = {}
        assert not (self._is_int8 and self._in_blocks), "blocks are of FP8"

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
        elif len(self.shape(name)) == 3:
            yield from self._experts(name, dim, start, length)
        else:
            yield from self._multiplied_out(name, dim, start, length)

    def _multiplied_out(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                        ) -> Iterator[tuple[slice, torch.Tensor]]:
        """The dequantised matrix, float32."""
        if split_member(name)[0] in self._in_blocks:
            values_RK, scales_AB = self._blocks(name)
            whole_RK = values_RK.float() * scales_AB.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
            cut_RK = whole_RK if dim is None else whole_RK.narrow(dim, start, length)
            yield slice(0, len(cut_RK)), cut_RK
            return
        for rows, values_RK, scales_R in self.row_pieces(name, dim, start, length):
            yield rows, values_RK.float().mul_(scales_R[:, None])

    def _experts(self, name: str, dim: int | None, start: int, length: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """One matrix of a stack after the other, as it lies there."""
        is_turned = name in self._turned
        first, count = (start, length) if dim == 0 else (0, self.shape(name)[0])
        axis = dim or 1
        cut = (start, length) if dim else (0, self.shape(name)[1])
        for place in range(count):
            member = Member(first + place, is_turned)
            whole = torch.cat([values_RK for _, values_RK in self._multiplied_out(name + member.suffix)])
            yield slice(place, place + 1), (whole.T if is_turned else whole).narrow(axis - 1, *cut)[None]

    def int8_inputs(self, name: str) -> Int8Inputs | None:
        """By row, also where the file has one scale for all inputs."""
        return BY_ROW if self._is_int8 and name in self._names else self._base.int8_inputs(name)

    def row_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> Iterator[ScaledRows]:
        if split_member(name)[0] not in self._names or self._base.int8_inputs(name) is not None:
            yield from self._base.row_pieces(name, dim, start, length)
            return
        columns = slice(start, start + length) if dim == 1 else slice(None)
        for rows, weight_RK in self._rows(name, (start, length) if dim == 0 else None):
            most_R = self._checked(name, weight_RK.abs().amax(1))
            yield rows, self._target.rounded(weight_RK, most_R[:, None])[:, columns], most_R / self._target.largest

    def _blocks(self, name: str, span: tuple[int, int] | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Values (R, K) and scales (A, B) of whole blocks of rows; None: of all."""
        weight_RK = torch.cat([rows_RK for _, rows_RK in self._rows(name, span)])
        weight_ARBK = weight_RK.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))
        most_AB = self._checked(name, weight_ARBK.abs().amax((1, 3)))
        values_ARBK = self._target.rounded(weight_ARBK, most_AB[:, None, :, None])
        return values_ARBK.flatten(2).flatten(0, 1), most_AB / self._target.largest

    def _checked(self, name: str, most: torch.Tensor) -> torch.Tensor:
        if not bool((most * self._target.largest).isfinite().all()):
            raise WeightsError(f"{name} holds values that are no numbers; copy the checkpoint again from its source")
        return most

    def _rows(self, name: str, span: tuple[int, int] | None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Whole rows in float32, some at a time; None: all. A matrix of a stack is read whole."""
        stored, member = split_member(name)
        if member is None:
            num_rows, num_inputs = self.shape(name)
            for rows, (begin, count) in some_rows(span or (0, num_rows), num_inputs):
                yield rows, self._base.read(name, 0, begin, count).to(torch.float32, copy=True)
            return
        whole = self._base.read(stored, 0, member.place, 1)[0]
        whole_NK = whole.T if member.is_turned else whole
        for rows, (begin, count) in some_rows(span or (0, len(whole_NK)), whole_NK.shape[1]):
            yield rows, whole_NK[begin : begin + count].to(torch.float32, copy=True)

    def fp8_form(self, name: str) -> str | None:
        if name in self._names:
            return None if self._is_int8 else "fp8_blocks" if name in self._in_blocks else "fp8"
        return self._base.fp8_form(name)

    def fp8_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                   ) -> Iterator[tuple[slice, torch.Tensor]]:
        if split_member(name)[0] not in self._in_blocks:
            yield from self._base.fp8_pieces(name, dim, start, length)
            return
        values_RK, scales_AB = self._blocks(name, (start, length) if dim == 0 else None)
        if dim == 1:
            values_RK = values_RK[:, start : start + length]
            scales_AB = scales_AB[:, start // BLOCK : (start + length) // BLOCK]
        self._block_scales = {(name, dim, start, length): scales_AB}  # asked for next, and no other
        yield slice(0, len(values_RK)), values_RK

    def fp8_scales(self, name: str, dim: int | None = None, start: int = 0, length: int = 0) -> torch.Tensor:
        if split_member(name)[0] not in self._in_blocks:
            return self._base.fp8_scales(name, dim, start, length)
        if (name, dim, start, length) not in self._block_scales:
            list(self.fp8_pieces(name, dim, start, length))
        return self._block_scales[name, dim, start, length]

    def grouped_form(self, name: str) -> GroupedForm | None:
        return None if name in self._names else self._base.grouped_form(name)

    def grouped_pieces(self, name: str, dim: int | None = None, start: int = 0, length: int = 0,
                       ) -> Iterator[GroupedPiece]:
        return self._base.grouped_pieces(name, dim, start, length)

    def kv_scales(self, module: str) -> tuple[float, float] | None:
        return self._base.kv_scales(module)

    def close(self) -> None:
        self._base.close()

    def describe(self, dtype: torch.dtype, *, is_multiplied: bool) -> str:
        """For the log. `is_multiplied`: as the target, and not dequantised to `dtype`."""
        made = self._target.name
        done = sum(self._base.int8_inputs(name) is not None for name in self._names)
        stay = f" ({done} are {made} already)" if done else ""
        by_row, in_blocks = len(self._names - self._in_blocks), len(self._in_blocks)
        blocks, groups = (f", {in_blocks} of experts by block of {BLOCK} x {BLOCK}",
                          f", of experts in groups of {BLOCK}") if in_blocks else ("", "")
        then = (f"multiplied with inputs that are rounded to {made} by row{groups}, too" if is_multiplied else
                f"dequantised to {str(dtype).removeprefix('torch.')}; inputs are not quantised")
        return f"{by_row} weights are rounded to {made} by row{blocks} while loading{stay}, and {then}"
