"""Weights of 4 and 8 bit integers as npu_weight_quant_batchmatmul takes them, and products with them.

O output features, I input features, G groups of inputs, T tokens.
"""

from __future__ import annotations

import torch
import torch_npu
from torch import Tensor

from npu_runner.platforms.grouped import GroupedWeight, unpacked
from npu_runner.platforms.npu.weight_layout import WeightLayout, packed_words


def settled(weight: GroupedWeight, layout: WeightLayout) -> GroupedWeight:
    """Four bits: int32 (I, O / 8), eight outputs a word, the lowest bits first. int8 in groups: (I, O); by row it stays
    (O, I), which is quicker turned, unless it is to lie in NZ, which is not.

    Scales and zeros, which the operator adds: (G, O); by row (O,). Bits are moved on the host, as the vendor's own
    packing does.
    """
    by_row = weight.scales.shape[1] == 1
    scales, zeros = (None if each is None else each[:, 0].contiguous() if by_row else each.t().contiguous()
                     for each in weight[1:])
    assert scales is not None, "a weight has scales"
    values, num_groups = weight.values, weight.scales.shape[1]
    num_outputs, width = values.shape
    num_inputs = width * 2 if values.dtype == torch.uint8 else width
    group_size = 0 if by_row else num_inputs // num_groups
    if values.dtype == torch.int8:
        stays = by_row and not layout.turns_rows
        values = values if stays else layout.weight_alone(values.t().contiguous(), group_size)
    elif layout.takes_words(num_inputs, num_outputs, group_size):
        values = packed_words(unpacked(values.cpu()).t().contiguous().to(values.device))
    else:
        values = _words(unpacked(values.cpu())).to(values.device)
    return GroupedWeight(values, scales, None if zeros is None else -zeros)


def _words(values_OI: Tensor) -> Tensor:
    low, high = values_OI.t().contiguous().view(torch.uint8).unflatten(1, (-1, 2)).unbind(2)
    return ((low & 15) | (high << 4)).view(torch.int32)


def product(x_TI: Tensor, weight: GroupedWeight, bias_O: Tensor | None, layout: WeightLayout) -> Tensor:
    """x w^T + b with a `settled` weight."""
    values, scales, offsets = weight
    is_turned = values.dtype == torch.int8 and scales.dim() == 1 and not layout.turns_rows
    group_size = 0 if scales.dim() == 1 else x_TI.shape[1] // scales.shape[0]
    return torch_npu.npu_weight_quant_batchmatmul(x_TI, values.t() if is_turned else values, scales, offsets,
                                                  bias=bias_O, antiquant_group_size=group_size)
