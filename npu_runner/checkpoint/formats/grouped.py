"""Stored matrices of 4 or 8 bit integers in groups of inputs, or by row, without multiplying them out. Knows no format
and no model.

N outputs, K inputs; R rows and C columns of a block, G groups of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.checkpoint.formats.stored import Grid, QuantisedMatrix, Span
from npu_runner.checkpoint.weights_reader import GroupedForm, GroupedPiece

_ROWS_AT_ONCE = 4096


def form_of(matrix: QuantisedMatrix) -> GroupedForm | None:
    """None: it has others, or a group's inputs are scattered, or zeros are no whole numbers. Reads zeros, and which
    group each input belongs to."""
    if not matrix.bits or len(matrix.scales) != 1:
        return None
    (grid,), (num_outputs, num_inputs) = matrix.scales, matrix.shape
    group_size = grid.block[1] if grid.matrix.shape[1] > 1 else 0
    is_of_rows = grid.block[0] == 1 or (grid.block[0] == num_outputs and not group_size)
    if not is_of_rows or (group_size and num_inputs % group_size) or _is_scattered(grid, num_inputs):
        return None
    has_zeros = _has_zeros(matrix)
    return None if has_zeros is None else GroupedForm(matrix.bits, group_size, has_zeros)


def read(matrix: QuantisedMatrix, form: GroupedForm, place: slice, rows: Span, columns: Span) -> GroupedPiece:
    """`place`: what the piece is to say of its rows."""
    values = (matrix.values.read(rows, columns) - matrix.centre).to(torch.int8)
    scales = _of_groups(matrix.scales[0], form, rows, columns)
    if not form.has_zeros or matrix.zeros is None:
        return GroupedPiece(place, values, scales, None)
    return GroupedPiece(place, values, scales, _of_groups(matrix.zeros, form, rows, columns) - matrix.centre)


def _of_groups(grid: Grid, form: GroupedForm, rows: Span, columns: Span) -> Tensor:
    """float32 (R, G)."""
    if not form.group_size:
        return grid.at(rows, (0, 1)).expand(rows[1], 1)
    groups = columns[0] // form.group_size, columns[1] // form.group_size
    return grid.matrix.read(rows, groups).to(torch.float32)


def _is_scattered(grid: Grid, num_inputs: int) -> bool:
    if grid.groups is None or grid.reader is None:
        return False
    return not torch.equal(grid.reader.read(grid.groups).long(), torch.arange(num_inputs) // grid.block[1])


def _has_zeros(matrix: QuantisedMatrix) -> bool | None:
    """Whether a zero is not 0; None: one is no number of as many bits."""
    if matrix.zeros is None:
        return False
    grid, largest, found = matrix.zeros.matrix, 1 << (matrix.bits - 1), False
    for start in range(0, grid.shape[0], _ROWS_AT_ONCE):
        stored = grid.read((start, min(_ROWS_AT_ONCE, grid.shape[0] - start)), (0, grid.shape[1]))
        zeros = stored.to(torch.float32) - matrix.centre
        if not bool(((zeros == zeros.round()) & (zeros.abs() <= largest)).all()):
            return None
        found = found or bool(zeros.any())
        if found and not stored.is_floating_point():
            return True
    return found
