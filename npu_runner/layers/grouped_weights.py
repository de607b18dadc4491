"""Weights of linears that stay 4 or 8 bit integers with scales by row or in groups of inputs: which have a matmul,
their parameters, and how they are filled.

O output features, I input features, G groups of inputs; all of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import GroupedForm, GroupedPiece, Int8Inputs, WeightsReader
from npu_runner.errors import WeightsError
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.platforms.grouped import packed

Held: TypeAlias = Int8Inputs | GroupedForm | str
"""The form of a weight that is not of the model's dtype. Int8Inputs: int8, with such inputs. For FP8 the form's name.
"""

_SMALL_GROUPS, _RUN = (32, 64), 128
_OUTPUTS, _MOST_FEATURES = 8, 65535
_LOST = 2**-8


@dataclass
class GroupedParameters:
    """The parameters of a HeldLinear of this form."""

    form: GroupedForm
    values: nn.Parameter
    scales: nn.Parameter
    zeros: nn.Parameter | None


def common_form(forms: Sequence[Held | None]) -> list[Held | None]:
    """`forms` of the parts of a weight: where those of groups differ in zeros alone, all have them."""
    grouped = [each for each in forms if isinstance(each, GroupedForm)]
    if len({each._replace(has_zeros=True) for each in grouped}) != 1:
        return list(forms)
    one = grouped[0]._replace(has_zeros=any(each.has_zeros for each in grouped))
    return [one if isinstance(each, GroupedForm) else each for each in forms]


def accepts(form: GroupedForm, parts: Sequence[WeightPart], num_outputs: int, num_inputs: int, *,
            is_padded: bool) -> bool:
    """Whether the matmuls of every platform accept it: groups of 32, 64 or a multiple of 128 inputs, of which `parts`
    cut none; inputs in runs of two groups or 128; outputs in eights; neither above 65535."""
    size = form.group_size or _RUN
    run = 2 * size if size in _SMALL_GROUPS else size
    is_cut = any(part.dim == 1 and (is_padded or part.start % (form.group_size or 2)) for part in parts)
    return (not is_cut and (size in _SMALL_GROUPS or size % _RUN == 0) and num_inputs % run == 0
            and num_outputs % _OUTPUTS == 0 and max(num_outputs, num_inputs) <= _MOST_FEATURES)


def allocate(form: GroupedForm, num_outputs: int, num_inputs: int, context: LayerContext) -> GroupedParameters:
    """Allocate the parameters of a `GroupedWeight`."""
    num_groups = num_inputs // form.group_size if form.group_size else 1
    values = (context.parameter(num_outputs, num_inputs // 2, dtype=torch.uint8) if form.bits == 4 else
              context.parameter(num_outputs, num_inputs, dtype=torch.int8))
    zeros = context.parameter(num_outputs, num_groups) if form.has_zeros else None
    return GroupedParameters(form, values, context.parameter(num_outputs, num_groups), zeros)


def bias_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which kernels add a bias."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def fill(parameters: GroupedParameters, part: WeightPart, reader: WeightsReader) -> int:
    """The bytes that were copied."""
    num_bytes = 0
    for piece in reader.grouped_pieces(part.name, part.dim, part.start, part.length):
        values = packed(piece.values) if parameters.form.bits == 4 else piece.values
        _rows(parameters.values, part)[piece.rows].copy_(values)
        num_bytes += values.nbytes + _fill_groups(parameters, part, piece)
    return num_bytes


def _fill_groups(parameters: GroupedParameters, part: WeightPart, piece: GroupedPiece) -> int:
    scales = piece.scales.to(parameters.scales.dtype)
    lost, largest = (scales.float() - piece.scales).abs().max(), piece.scales.abs().max()
    if not bool(lost <= _LOST * largest):  # also where one is no number
        raise WeightsError(f"the scales of {part.name} are from {float(piece.scales.abs().min()):.3g} to "
                           f"{float(largest):.3g}, which {str(scales.dtype).removeprefix('torch.')} does not hold; set "
                           "dtype to bfloat16, or copy the checkpoint again from its source")
    _rows(parameters.scales, part)[piece.rows].copy_(scales)
    if parameters.zeros is None:
        return scales.nbytes
    zeros = torch.zeros_like(scales) if piece.zeros is None else piece.zeros.to(scales.dtype)
    _rows(parameters.zeros, part)[piece.rows].copy_(zeros)
    return scales.nbytes + zeros.nbytes


def _rows(parameter: nn.Parameter, part: WeightPart) -> Tensor:
    """The rows that `part` fills; columns are whole if it cuts them."""
    return parameter.data.narrow(0, part.target_start, part.length) if part.dim == 0 else parameter.data
