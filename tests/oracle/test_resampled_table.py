"""Learned tables resampled to images' grids equal torch's interpolate, for any sizes and for several images at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.models.vision.parts import block_order
from npu_runner.models.vision.resampled_table import (
    AxisTaps,
    ResampledTable,
    bicubic,
    bilinear,
    bilinear_corners,
)
from npu_runner.platforms import pick_platform

C = 3
WAYS: list[tuple[AxisTaps, dict[str, Any]]] = [
    (bilinear, {"mode": "bilinear", "align_corners": False}),
    (bilinear_corners, {"mode": "bilinear", "align_corners": True}),
    (bicubic, {"mode": "bicubic", "align_corners": False}),
]


def table_of(side: int, axis_taps: AxisTaps, dtype: torch.dtype = torch.float32) -> ResampledTable:
    context = LayerContext(pick_platform("cpu").make_ops(), None, TensorParallel(), dtype, torch.device("cpu"))  # type: ignore[arg-type]
    table = ResampledTable(side * side, C, axis_taps, context)
    table.weight.data.copy_(torch.randn(side * side, C, generator=torch.Generator().manual_seed(side)))
    return table


def resampled(table: ResampledTable, grids: list[tuple[int, int]], x_PC: torch.Tensor) -> torch.Tensor:
    places = [torch.from_numpy(values) for values in table.places(grids, 2)]
    assert [(values.dtype, values.shape[1:]) for values in places] == [
        (dtype, (len(x_PC), 4)) for dtype in (torch.int32, torch.float32)]
    return table(x_PC, *places)


def by_torch(table: ResampledTable, grids: list[tuple[int, int]], how: dict[str, Any]) -> torch.Tensor:
    """(P, C) float32, in merge-block order."""
    square = table.weight.float().view(table.side, table.side, C).permute(2, 0, 1)[None]
    images = (F.interpolate(square, grid, **how)[0].permute(1, 2, 0) for grid in grids)
    return torch.cat([image[tuple(torch.from_numpy(block_order(*grid, 2)).long().unbind(-1))]
                      for image, grid in zip(images, grids, strict=True)])


half_sides = st.integers(1, 40)


@settings(max_examples=60, deadline=None)
@given(way=st.sampled_from(WAYS), side=st.integers(1, 30),
       halves=st.lists(st.tuples(half_sides, half_sides), min_size=1, max_size=3))
def test_tables_are_resampled_as_torch_does_it(way: tuple[AxisTaps, dict[str, Any]], side: int,
                                               halves: list[tuple[int, int]]) -> None:
    axis_taps, how = way
    grids = [(2 * height, 2 * width) for height, width in halves]
    table = table_of(side, axis_taps)
    expected_PC = by_torch(table, grids, how)
    torch.testing.assert_close(resampled(table, grids, torch.zeros_like(expected_PC)), expected_PC, atol=2e-5, rtol=0)


@pytest.mark.parametrize(("axis_taps", "how"), WAYS)
def test_half_precision_is_summed_in_float32_rounded_and_added(axis_taps: AxisTaps, how: dict[str, Any]) -> None:
    table, grids = table_of(7, axis_taps, torch.bfloat16), [(4, 10), (12, 2)]
    expected_PC = by_torch(table, grids, how)
    x_PC = torch.randn(expected_PC.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours_PC = resampled(table, grids, x_PC)
    assert ours_PC.dtype is torch.bfloat16
    # One of them may lie a last bit beside, where a sum falls on the middle of two.
    assert (ours_PC != x_PC + expected_PC.bfloat16()).sum() <= 1
