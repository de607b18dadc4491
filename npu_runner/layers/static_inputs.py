"""Shifts and scales of matmuls with inputs of one scale, for both ways in which the inputs are rounded.

A matmul multiplies with the scale's reciprocal, a norm in front of it divides by the scale. Each of the two numbers is
rounded to 16 bits, so each has shifts and scales of its own that correct the rounding.

O outputs, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import Int8Inputs
from npu_runner.errors import WeightsError
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.quantised import NormRounding

MOST_ROWS_WITH_ONES = 1024
"""More than a graph of decode steps has."""


@dataclass(frozen=True)
class StaticTerms:
    """The terms of an int8 linear, on the CPU in float64."""

    name: str
    """The weight's name in the checkpoint."""
    sums_O: Tensor
    """The sum of each row's integers."""
    scales_O: Tensor
    bias_O: Tensor
    offset: float
    """The offset of the inputs."""

    def at_step(self, step: float) -> tuple[Tensor, Tensor]:
        """Shifts (int32) and scales (float32) for inputs round(x / step + offset).

        Raises WeightsError for a bias that is too large for a shift.
        """
        scales_O = self.scales_O * step
        units_O = torch.where(self.bias_O == 0, 0.0, self.bias_O / scales_O)
        shifts_O = units_O.round() - self.offset * self.sums_O
        if not bool((shifts_O.abs() < 2**31).all()):
            raise WeightsError(f"a bias beside {self.name} is too large for the scale of its row; copy the checkpoint "
                               "again from its source")
        return shifts_O.int(), scales_O.float()


class BehindNorm(nn.Module):
    """The rounding of a norm in front of a linear with `num_outputs`, and the terms of its matmuls."""

    shifts: nn.Parameter
    scales: nn.Parameter

    def __init__(self, inputs: Int8Inputs, num_inputs: int, num_outputs: int, context: LayerContext):
        super().__init__()
        assert inputs.scale is not None, "rows with scales of their own have no terms"
        is_bfloat16 = context.dtype == torch.bfloat16
        kinds = (torch.bfloat16, torch.bfloat16) if is_bfloat16 else (torch.float32, torch.int32)
        self.input_scales, self.input_offsets = (context.parameter(num_inputs, dtype=kind) for kind in kinds)
        self.input_scales.fill_(inputs.scale)
        self.input_offsets.fill_(inputs.offset)
        self.shifts = context.parameter(num_outputs, dtype=torch.int32)
        self.scales = context.parameter(num_outputs, dtype=torch.float32)

    @property
    def rounding(self) -> NormRounding:
        return NormRounding(self.input_scales, self.input_offsets)

    def fill(self, terms: StaticTerms) -> None:
        shifts_O, scales_O = terms.at_step(float(self.input_scales[0]))
        self.shifts.copy_(shifts_O)
        self.scales.copy_(scales_O)
