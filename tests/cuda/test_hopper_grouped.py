"""Matmuls with 4 and 8 bit integers in CUDA C++ on Hopper: no further from float64 than twice what the definition in
plain torch is, and the same each time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.cuda.grouped_weights import BF16, FP16, assert_near, bias_of, exact, rows_of, weight_of
from tests.cuda.paged_work import need_hopper

KINDS = ((4, 128, BF16), (4, 64, BF16), (4, 384, FP16), (8, 0, BF16), (8, 64, FP16))
"""Bits, inputs of a group (0: all of a row), and the dtype."""


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


def check(module: Any, kind: tuple[int, int, torch.dtype], shape: tuple[int, int], rows: tuple[int, ...],
          device: torch.device, *, has_zeros: bool, **how: Any) -> None:
    """Twice: what a matmul leaves behind serves the next, and sums are added in one order."""
    from npu_runner.platforms.cuda.matmul.grouped import lay_out
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    bits, group_size, dtype = kind
    weight = weight_of(bits, group_size, shape, dtype, device, has_zeros=has_zeros)
    ours, whole_OI, bias_O = lay_out(weight), exact(weight), bias_of(shape[0], dtype, device)
    for num_rows in rows:
        x_MI = rows_of(num_rows, shape[1], dtype, device)
        for bias in (None, bias_O):
            matmul = Matmul(x_MI, ours, bias, dtype)
            assert how or module.accepts(matmul)
            found = module.multiply(matmul, **how)
            assert_near(found, whole_OI, x_MI, weight, bias)
            assert torch.equal(module.multiply(matmul, **how), found)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_small_m(kind: tuple[int, int, torch.dtype], has_zeros: bool, device: torch.device) -> None:
    """Clusters and programs alone, warps without a run, several passes, outputs that fill no tile, many tiles."""
    from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m

    for shape in ((72, 384), (1000, 1536), (4224, 3072), (512, 12_288), (24_576, 768)):
        check(hopper_grouped_small_m, kind, shape, (1, 2, 8, 9, 16), device, has_zeros=has_zeros)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_each_plan_of_some_rows(kind: tuple[int, int, torch.dtype], has_zeros: bool, device: torch.device) -> None:
    """One row, rows and outputs that fill no tile, uneven parts of the inputs, more items than programs."""
    from npu_runner.platforms.cuda.matmul import hopper_grouped_wgmma as kernels

    for groups in (2, 3):
        for rows in (64, 96, 128):
            for num_rows, shape, splits in ((1, (72, 768), 1), (rows - 3, (1000, 1536), 2), (2 * rows, (392, 2304), 5),
                                            (rows + 5, (12_800, 384), 1)):
                row_tiles = -(-num_rows // rows)
                items = -(-shape[0] // (64 * groups)) * row_tiles * splits
                plan = kernels.SplitPlan(groups, rows, splits, row_tiles, items, min(items, 132))
                check(kernels, kind, shape, (num_rows,), device, has_zeros=has_zeros, plan=plan)


def test_rows_of_any_stride_and_address(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m, hopper_grouped_wgmma
    from npu_runner.platforms.cuda.matmul.grouped import lay_out
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    weight = weight_of(4, 128, (256, 1024), BF16, device, has_zeros=True)
    ours, whole_OI = lay_out(weight), exact(weight)
    wide = torch.randn(40, 1040, device=device).to(BF16)
    for module, num_rows in ((hopper_grouped_small_m, 5), (hopper_grouped_wgmma, 40)):
        for x_MI in (wide[:num_rows, 8:1032], wide[:num_rows, 3:1027], wide[:, :1024][::40 // num_rows],
                     torch.randn(1024, num_rows, device=device).to(BF16).t(), wide[:1, :1024].expand(num_rows, -1)):
            assert_near(module.multiply(Matmul(x_MI, ours, None, BF16)), whole_OI, x_MI, weight, None)


def test_scales_and_rows_that_shared_memory_does_not_hold_stay_with_triton(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.grouped import GroupedWeight

    for num_rows, num_outputs, num_inputs, group_size, is_taken in (
            (1, 65_504, 8192, 64, False), (1, 16_384, 8192, 64, True), (16, 16_384, 8192, 64, True),
            (8, 8192, 28_672, 128, True), (16, 8192, 28_672, 128, False)):
        values = torch.zeros(-(-num_outputs // 64), num_inputs // 128, 64, 64, dtype=torch.uint8, device=device)
        scales, zeros = torch.zeros(2, num_inputs // group_size, num_outputs, dtype=BF16, device=device)
        x_MI = torch.zeros(num_rows, num_inputs, dtype=BF16, device=device)
        matmul = Matmul(x_MI, GroupedWeight(values, scales, zeros), None, BF16)
        assert hopper_grouped_small_m.accepts(matmul) == is_taken


def test_rings_of_two_stages_where_three_have_no_room(device: torch.device) -> None:
    """Scales of groups of 64, and zeros, of many outputs."""
    from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m

    check(hopper_grouped_small_m, (4, 64, BF16), (16_384, 8192), (1, 16), device, has_zeros=True)


def test_what_stays_with_triton_and_the_library(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m, hopper_grouped_wgmma
    from npu_runner.platforms.cuda.matmul.grouped import lay_out
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    for kind, is_taken in (((4, 32), False), ((8, 32), False), ((4, 64), True), ((8, 0), True)):
        weight = lay_out(weight_of(*kind, (128, 512), BF16, device, has_zeros=False))
        for module, most in ((hopper_grouped_small_m, (1, 16)), (hopper_grouped_wgmma, (129, 256))):
            for num_rows in (0, 1, 16, 17, 128, 129, 256, 257):
                x_MI = torch.zeros(num_rows, 512, dtype=BF16, device=device)
                is_in_range = most[0] <= num_rows <= most[1]
                assert module.accepts(Matmul(x_MI, weight, None, BF16)) == (is_taken and is_in_range)
