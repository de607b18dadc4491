"""Inputs of a matmul of 16-bit floats, and the float64 result that it is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

# M rows, I input features, O output features

DTYPES = [torch.bfloat16, torch.float16]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 6e-4}  # of the largest value: one rounding


def random_work(num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x_MI = torch.randn(num_rows, num_inputs + 64)[:, :num_inputs].to(dtype)
    weight_OI = (torch.randn(num_outputs, num_inputs) * num_inputs**-0.5).to(dtype)
    return x_MI, weight_OI, torch.randn(num_outputs).to(dtype)


def assert_matmul(found: Tensor, x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> None:
    expected = x_MI.double() @ weight_OI.double().T + (0.0 if bias_O is None else bias_O.double())
    assert found.dtype == x_MI.dtype
    assert found.shape == expected.shape
    assert (found.double().cpu() - expected).abs().max() < TOLERANCE[x_MI.dtype] * expected.abs().max()
