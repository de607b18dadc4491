"""Products of int8 that a start on CANN 8.5 computes on the device, and on the CPU by their definition, where weights
are quantised. Knows no model.

T tokens, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms import reference_platform
from npu_runner.platforms.npu.ops import NpuOps
from npu_runner.platforms.npu.probes import BOUND, difference
from npu_runner.platforms.npu.quantised_ops import NpuQuantisedOps
from npu_runner.platforms.quantised import INT8, INT8_STATIC, Int8Weight, NormRounding, QuantisedOps, StaticInt8Weight

_NUM_TOKENS, _NUM_INPUTS, _NUM_OUTPUTS = 37, 512, 384
_INPUT_SCALE, _INPUT_OFFSET, _EPS = 1 / 32, -9, 1e-6
"""A power of two: it is the same in every dtype, and so is its reciprocal."""


class _Numbers(NamedTuple):
    """The same on both sides, but for the dtype."""

    x_TI: Tensor
    residual_TI: Tensor
    gain_I: Tensor
    values_OI: Tensor
    scales_O: Tensor
    bias_O: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> _Numbers:
        kept = (each.to(device) for each in self[3:])
        return _Numbers(*(each.to(device, dtype) for each in self[:3]), *kept)


def why_unproven(forms: Iterable[str]) -> dict[str, str]:
    """What is wrong with the products of a form, by its name, if anything is; the device is the current one."""
    found = {}
    for form in forms:
        compute = _PRODUCTS.get(form)
        finding = f"{form} has no probe" if compute is None else _finding(compute)
        if finding is not None:
            found[form] = finding
    return found


def _finding(compute: Callable[[QuantisedOps, _Numbers], Tensor]) -> str | None:
    numbers, device = _draw(), torch.device("npu", torch.npu.current_device())
    try:
        found = compute(NpuQuantisedOps(NpuOps()), numbers.to(device, torch.bfloat16)).cpu()
    except RuntimeError as refusal:
        return f"is refused: {str(refusal).strip().partition(chr(10))[0]}"
    plain = QuantisedOps(reference_platform().make_ops())
    error = difference(found, compute(plain, numbers.to(torch.device("cpu"), torch.float32)))
    if error <= BOUND:
        return None
    return f"differs from the CPU by {100 * error:.1f} % of a row's length, {100 * BOUND:.0f} % is allowed"


def _draw() -> _Numbers:
    generator = torch.Generator().manual_seed(85)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    values_OI = torch.randint(-127, 128, (_NUM_OUTPUTS, _NUM_INPUTS), generator=generator, dtype=torch.int8)
    scales_O = torch.rand(_NUM_OUTPUTS, generator=generator) / 127
    return _Numbers(normal(_NUM_TOKENS, _NUM_INPUTS), normal(_NUM_TOKENS, _NUM_INPUTS), 1 + normal(_NUM_INPUTS) / 8,
                    values_OI, scales_O, normal(_NUM_OUTPUTS).float())


def _by_row(ops: QuantisedOps, numbers: _Numbers) -> Tensor:
    """With a bias, and behind a norm (T, 2 O)."""
    weight = ops.prepare_weight(Int8Weight(numbers.values_OI, numbers.scales_O))
    rows, _ = ops.add_rms_norm(numbers.x_TI, numbers.residual_TI, numbers.gain_I, _EPS, INT8)
    return torch.cat((ops.linear(numbers.x_TI, weight, numbers.bias_O), ops.linear(rows, weight, None)), 1)


def _by_one_scale(ops: QuantisedOps, numbers: _Numbers) -> Tensor:
    """The same with inputs of one scale."""
    x_TI = numbers.x_TI

    def all_of(value: float, dtype: torch.dtype, count: int = 1) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=x_TI.device)

    shifts_O = (1000 * numbers.bias_O).int() - _INPUT_OFFSET * numbers.values_OI.cpu().sum(1).int().to(x_TI.device)
    prepared = ops.prepare_weight(Int8Weight(numbers.values_OI, numbers.scales_O))
    weight = StaticInt8Weight(prepared[0], shifts_O, numbers.scales_O * _INPUT_SCALE,
                              all_of(1 / _INPUT_SCALE, x_TI.dtype), all_of(_INPUT_OFFSET, x_TI.dtype))
    rounding = NormRounding(*(all_of(value, x_TI.dtype, _NUM_INPUTS) for value in (_INPUT_SCALE, _INPUT_OFFSET)))
    rows, _ = ops.add_rms_norm(x_TI, numbers.residual_TI, numbers.gain_I, _EPS, rounding)
    return torch.cat((ops.linear(x_TI, weight, None), ops.linear(rows, weight, None)), 1)


_PRODUCTS: dict[str, Callable[[QuantisedOps, _Numbers], Tensor]] = {INT8: _by_row, INT8_STATIC: _by_one_scale}
