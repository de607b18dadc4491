"""Matmuls with weights of 4 and 8 bit integers: no further from float64 than twice what the definition in plain torch
is.

M rows, I input features, O output features.
"""

from __future__ import annotations

import pytest
import torch

from tests.cuda.grouped_weights import BF16, FP16, assert_near, bias_of, exact, rows_of, weight_of
from tests.cuda.quantised_weights import quantised_ops

KINDS = ((4, 128), (4, 64), (4, 32), (4, 0), (8, 128), (8, 32), (8, 0))
"""Bits, and inputs of a group; 0: all of a row."""
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 256, 257, 1000)
SHAPES = ((1000, 1024), (4224, 1536), (12_288, 1024), (1024, 12_288))


def check(bits: int, group_size: int, shape: tuple[int, int], rows: tuple[int, ...], dtype: torch.dtype,
          device: torch.device, *, has_zeros: bool) -> None:
    weight = weight_of(bits, group_size, shape, dtype, device, has_zeros=has_zeros)
    whole_OI, bias_O = exact(weight), bias_of(shape[0], dtype, device)
    ops = quantised_ops()
    prepared = ops.prepare_weight(weight)
    assert prepared.scales.nbytes == weight.scales.nbytes
    assert prepared.values.nbytes * shape[0] == weight.values.nbytes * -(-shape[0] // 64) * 64
    for num_rows in rows:
        x_MI = rows_of(num_rows, shape[1], dtype, device)
        for bias in (None, bias_O):
            assert_near(ops.linear(x_MI, prepared, bias), whole_OI, x_MI, weight, bias)
    assert ops.linear(x_MI[:0], prepared, bias_O).shape == (0, shape[0])


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 32), (4, 0)])
def test_small_matmuls(bits: int, group_size: int, has_zeros: bool, device: torch.device) -> None:
    """Also where kernels are interpreted."""
    check(bits, group_size, (72, 256), (1, 3, 70, 200), BF16, device, has_zeros=has_zeros)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), KINDS)
@pytest.mark.parametrize(("shape", "dtype"), [*((shape, BF16) for shape in SHAPES), (SHAPES[0], FP16)])
def test_matmuls(shape: tuple[int, int], dtype: torch.dtype, bits: int, group_size: int, has_zeros: bool,
                 device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("takes minutes where kernels are interpreted")
    check(bits, group_size, shape, ROWS, dtype, device, has_zeros=has_zeros)


def test_a_tile_that_cuts_inputs_and_one_row_alone(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul import grouped as kernels
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    for bits, group_size in ((4, 128), (4, 64), (8, 0)):
        weight = weight_of(bits, group_size, (72, 768), BF16, device, has_zeros=True)
        ours, whole_OI = kernels.lay_out(weight), exact(weight)
        x_MI = rows_of(1, 768, BF16, device)
        matmul = Matmul(x_MI, ours, None, BF16)
        for split_k in (4, 8):
            out_MO = x_MI.new_empty(1, 72)
            kernels.multiply_small_m(matmul, out_MO, split_k)
            assert_near(out_MO, whole_OI, x_MI, weight, None)
        assert_near(kernels.gemv(matmul), whole_OI, x_MI, weight, None)
