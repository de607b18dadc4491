"""Weights of int8 and FP8, rows to multiply them with, and the matmul in float64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from npu_runner.platforms import find_platform
from npu_runner.platforms.quantised import (
    FP8_BLOCKS,
    INT8,
    Fp8Rows,
    Fp8Weight,
    Int8Rows,
    Int8Weight,
    QuantisedOps,
)

LIMIT = 2.0


def weight_of(form: str, num_outputs: int, num_inputs: int, generator: torch.Generator) -> Any:
    """A weight as if it had been rounded: values over the type's whole range, scales of several sizes."""
    values = torch.randn(num_outputs, num_inputs, generator=generator, device="cuda")
    scales = torch.rand(num_outputs, generator=generator, device="cuda") * 1e-3 + 1e-5
    if form == INT8:
        return Int8Weight((values * 40).round().clamp(-127, 127).to(torch.int8), scales)
    if form == FP8_BLOCKS:
        scales = torch.rand(num_outputs // 128, num_inputs // 128, generator=generator, device="cuda") * 1e-3 + 1e-5
    return Fp8Weight((values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scales)


def rows_of(num_rows: int, num_inputs: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Rows of a wider tensor; of several sizes, and one of zeros."""
    x_MI = torch.randn(num_rows, num_inputs + 64, generator=generator, device="cuda")
    x_MI *= torch.logspace(-4, 2, num_rows, device="cuda")[:, None]
    if num_rows > 2:
        x_MI[1] = 0
    return x_MI.to(dtype)[:, :num_inputs]


def rounded(form: str, x_MI: Tensor) -> Any:
    from npu_runner.platforms.cuda.matmul.quantised_inputs import quantise_rows

    kind, dtype = (Int8Rows, torch.int8) if form == INT8 else (Fp8Rows, torch.float8_e4m3fn)
    return kind(*quantise_rows(x_MI, dtype, in_groups=form == FP8_BLOCKS), x_MI.dtype)


def quantised_ops() -> QuantisedOps:
    cuda = find_platform("cuda")
    return cuda.make_quantised_ops(cuda.make_ops())


def exact(rows: Any, weight: Any, bias_O: Tensor | None) -> Tensor:
    """float64 (M, O)."""
    out_MO = wide(*rows[:2]) @ wide(*weight).T
    return out_MO if bias_O is None else out_MO + bias_O.double()


def wide(values: Tensor, scales: Tensor) -> Tensor:
    """values * scales in float64; scales of rows, or of groups of 128 columns, or of blocks."""
    if scales.dim() == 1:
        return values.double() * scales.double()[:, None]
    return values.double() * scales.double().repeat_interleave(len(values) // len(scales), 0).repeat_interleave(128, 1)


def assert_near(found: Tensor, plain: Tensor, expected: Tensor) -> None:
    """Each row by itself: rows are of several sizes."""
    assert found.dtype == plain.dtype
    assert found.shape == expected.shape
    ours, theirs = ((x.double() - expected).abs().amax(1) for x in (found, plain))
    # A row whose plain matmul is exact by luck may be one rounding of its largest value off.
    room = torch.finfo(found.dtype).eps / 2 * expected.abs().amax(1)
    assert bool((ours <= LIMIT * torch.maximum(theirs, room)).all()), (
        f"{float((ours / torch.maximum(theirs, room)).max()):.2f} times what plain torch is from float64")
