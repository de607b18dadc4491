"""Weights in groups of int4 and int8, rows to multiply them with, and the matmul in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.platforms.grouped import GroupedWeight, matmul, packed, unpacked

LIMIT = 2.0
BF16, FP16 = torch.bfloat16, torch.float16


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
    ours, plain = ((each.double() - expected).abs().amax(1) for each in (found, matmul(x_MI, weight, bias_O)))
    assert bool((ours <= LIMIT * plain.clamp_min(torch.finfo(x_MI.dtype).eps / 4 * expected.abs().amax(1))).all()), (
        f"{(ours / plain).max():.2f} times as far as plain torch")


def bias_of(num_outputs: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    bias_O = torch.randn(num_outputs, generator=torch.Generator().manual_seed(3))
    return bias_O.to(torch.float32 if dtype == BF16 else dtype).to(device)
