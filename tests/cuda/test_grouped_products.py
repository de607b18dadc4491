"""Products with weights of 4 and 8 bit integers: no further from float64 than twice what the definition in plain torch
is.

M rows, I input features, O output features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_runner.platforms import find_platform
from npu_runner.platforms.grouped import GroupedWeight, packed, product, unpacked

LIMIT = 2.0
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = ((4, 128), (4, 64), (4, 32), (4, 0), (8, 128), (8, 32), (8, 0))
"""Bits, and inputs of a group; 0: all of a row."""
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 128, 256, 257, 1000)
SHAPES = ((1000, 1024), (4224, 1536), (12_288, 1024), (1024, 12_288))


def weight_of(bits: int, group_size: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *,
              has_zeros: bool) -> GroupedWeight:
    """Values over the whole range, scales of several sizes, zeros to both ends."""
    generator = torch.Generator().manual_seed(sum(shape) + bits + group_size)
    half, groups = 1 << (bits - 1), shape[1] // (group_size or shape[1])
    values = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    scales = (torch.rand(shape[0], groups, generator=generator) * 1e-2 + 1e-4).to(dtype)
    zeros = torch.randint(-half, half + 1, scales.shape, generator=generator).to(dtype) if has_zeros else None
    stored = packed(values) if bits == 4 else values
    return GroupedWeight(*(None if each is None else each.to(device) for each in (stored, scales, zeros)))


def rows_of(num_rows: int, num_inputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows of a wider tensor, of several sizes."""
    x_MI = torch.randn(num_rows, num_inputs + 64, generator=torch.Generator().manual_seed(num_rows))
    return (x_MI * torch.logspace(-3, 1, num_rows)[:, None]).to(dtype).to(device)[:, :num_inputs]


def exact(weight: GroupedWeight) -> Tensor:
    """float64 (O, I)."""
    values = unpacked(weight.values).double().unflatten(1, (weight.scales.shape[1], -1))
    values = values if weight.zeros is None else values - weight.zeros.double()[..., None]
    return (values * weight.scales.double()[..., None]).flatten(1)


def assert_near(found: Tensor, whole_OI: Tensor, x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> None:
    """Row by row."""
    expected = x_MI.double() @ whole_OI.T + (0 if bias_O is None else bias_O.double())
    assert found.dtype == x_MI.dtype
    ours, plain = ((each.double() - expected).abs().amax(1) for each in (found, product(x_MI, weight, bias_O)))
    assert bool((ours <= LIMIT * plain.clamp_min(torch.finfo(x_MI.dtype).eps / 4 * expected.abs().amax(1))).all()), (
        f"{(ours / plain).max():.2f} times as far as plain torch")


def bias_of(num_outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    bias_O = torch.randn(num_outputs, generator=torch.Generator().manual_seed(3))
    return bias_O.to(torch.float32 if dtype == BF16 else dtype).to(device)


def check(bits: int, group_size: int, shape: tuple[int, int], rows: tuple[int, ...], dtype: torch.dtype,
          device: torch.device, *, has_zeros: bool) -> None:
    weight = weight_of(bits, group_size, shape, dtype, device, has_zeros=has_zeros)
    whole_OI, bias_O = exact(weight), bias_of(shape[0], dtype, device)
    cuda = find_platform("cuda")
    ops = cuda.make_quantised_ops(cuda.make_ops())
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
def test_small_products(bits: int, group_size: int, has_zeros: bool, device: torch.device) -> None:
    """Also where kernels are interpreted."""
    check(bits, group_size, (72, 256), (1, 3, 70, 200), BF16, device, has_zeros=has_zeros)


@pytest.mark.parametrize("has_zeros", [False, True])
@pytest.mark.parametrize(("bits", "group_size"), KINDS)
@pytest.mark.parametrize(("shape", "dtype"), [*((shape, BF16) for shape in SHAPES), (SHAPES[0], FP16)])
def test_products(shape: tuple[int, int], dtype: torch.dtype, bits: int, group_size: int, has_zeros: bool,
                  device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("takes minutes where kernels are interpreted")
    check(bits, group_size, shape, ROWS, dtype, device, has_zeros=has_zeros)


def test_a_tile_that_cuts_inputs_and_one_row_alone(device: torch.device) -> None:
    from npu_runner.platforms.cuda import grouped_products as kernels

    for bits, group_size in ((4, 128), (4, 64), (8, 0)):
        weight = weight_of(bits, group_size, (72, 768), BF16, device, has_zeros=True)
        prepared, whole_OI = kernels.prepared(weight), exact(weight)
        x_MI = rows_of(1, 768, BF16, device)
        for tile in (kernels.Tile(4, 3, 4), kernels.Tile(4, 3, 8)):
            out_MO = x_MI.new_empty(1, 72)
            kernels.few_rows(x_MI, prepared, None, out_MO, tile)
            assert_near(out_MO, whole_OI, x_MI, weight, None)
        assert_near(kernels.one_row(x_MI, prepared, None), whole_OI, x_MI, weight, None)
