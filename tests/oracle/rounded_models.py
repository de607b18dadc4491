"""transformers' models with linears and experts that round their inputs as ours do: in float64 by the references of
int8 and FP8, else by the formula in plain torch. And with linears of integers in groups, whose inputs stay.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import Int8Inputs, WeightsReader
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import Fp8Weight, Int8Weight, QuantisedExperts, QuantisedOps
from tests.oracle.expert_reference import mixture
from tests.oracle.fp8_reference import fp8_product
from tests.oracle.int8_reference import rounded_product, static_product
from tests.oracle.reference import new_model

PLAIN = QuantisedOps(CpuOps())


class Held(NamedTuple):
    """`inputs`: of int8, how they are rounded."""

    values: Tensor
    scales: Tensor
    inputs: Int8Inputs | None = None


class Rounded(nn.Module):
    """A linear of int8 rows, or of FP8 rows or blocks."""

    def __init__(self, held: Held, bias: Tensor | None):
        super().__init__()
        self.values, self.scales, self.inputs = held
        self.bias = None if bias is None else bias.float()

    def forward(self, x: Tensor) -> Tensor:
        rows, is_int8 = x.flatten(0, -2), self.values.dtype == torch.int8
        if self.inputs is not None and self.inputs.scale is not None:
            out = self.static(rows, self.inputs.scale, self.inputs.offset)
        elif x.dtype == torch.float64:
            out = (rounded_product if is_int8 else fp8_product)(rows, self.values, self.scales, self.bias)
        elif is_int8:
            out = PLAIN.linear(rows, Int8Weight(self.values, self.scales), self.bias)
        else:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            out = PLAIN.linear(rows, Fp8Weight(self.values, self.scales), bias)
        return out.unflatten(0, x.shape[:-1])

    def static(self, rows: Tensor, scale: float, offset: float) -> Tensor:
        """In 16 bits by the formula as plain torch computes it: what is not whole is float32."""
        if rows.dtype == torch.float64:
            return static_product(rows, self.values, self.scales, self.bias, scale, offset)
        q = (rows.float() / scale + offset).round().clamp(-128, 127) - offset
        out = (q.double() @ self.values.double().T).float() * (scale * self.scales)
        return (out if self.bias is None else out + self.bias).to(rows.dtype)


class Dequantised(nn.Module):
    """A linear whose weight is rounded once from float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, None if bias is None else bias.data

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class RoundedExperts(nn.Module):
    """A layer's experts, (values, scales) of gate and up and of down, in the place of transformers' module."""

    def __init__(self, gate_up: tuple[Tensor, Tensor], down: tuple[Tensor, Tensor]):
        super().__init__()
        self.gate_up, self.down = gate_up, down

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        if x_TD.dtype == torch.float64:
            return mixture(x_TD, weights_TK, experts_TK, self.gate_up, self.down)
        weights = QuantisedExperts(*self.gate_up), QuantisedExperts(*self.down)
        return PLAIN.experts(x_TD, weights_TK.to(x_TD.dtype), experts_TK, *weights)


def rounded_models(checkpoint: Path, reader: WeightsReader, dtype: torch.dtype = torch.bfloat16
                   ) -> tuple[nn.Module, nn.Module]:
    """The model with such linears and experts where `reader` has int8, FP8 or groups: in float64, and in `dtype`."""
    plain = new_model(checkpoint, dtype)
    for name, linear in list(plain.named_modules()):
        held = _held(reader, f"{name}.weight") if isinstance(linear, nn.Linear) else None
        if held is not None:
            bias = linear.bias if f"{name}.bias" not in reader.names else reader.read(f"{name}.bias")
            plain.set_submodule(name, Rounded(held, bias))
        elif isinstance(linear, nn.Linear) and _has_groups(reader, f"{name}.weight"):
            plain.set_submodule(name, Dequantised(reader.read(f"{name}.weight"), linear.bias))
    for name, experts in list(plain.named_modules()):
        if isinstance(getattr(experts, "gate_up_proj", None), nn.Parameter):
            matrices = _held_experts(reader, name, len(experts.gate_up_proj))
            if matrices is not None:
                plain.set_submodule(name, RoundedExperts(*matrices))
    return copy.deepcopy(plain).double(), plain


def _held_experts(reader: WeightsReader, name: str, count: int) -> list[tuple[Tensor, Tensor]] | None:
    """Of gate and up, and of down; experts lie one by one in the file."""
    found = {each: [_held(reader, f"{name}.{e}.{each}.weight") for e in range(count)]
             for each in ("gate_proj", "up_proj", "down_proj")}
    if any(part is None for parts in found.values() for part in parts):
        return None
    stacks = {each: [torch.stack([part[place] for part in parts if part is not None]) for place in (0, 1)]
              for each, parts in found.items()}
    gate_up = [torch.cat((stacks["gate_proj"][place], stacks["up_proj"][place]), 1) for place in (0, 1)]
    return [(gate_up[0], gate_up[1]), (stacks["down_proj"][0], stacks["down_proj"][1])]


def _has_groups(reader: WeightsReader, name: str) -> bool:
    return name in reader.names and reader.grouped_form(name) is not None


def _held(reader: WeightsReader, name: str) -> Held | None:
    inputs = reader.int8_inputs(name) if name in reader.names else None
    form = reader.fp8_form(name) if name in reader.names else None
    if inputs is not None or form == "fp8":
        pieces = list(reader.row_pieces(name))
        return Held(torch.cat([values for _, values, _ in pieces]), torch.cat([scales for _, _, scales in pieces]),
                    inputs)
    if form is not None:
        return Held(torch.cat([values for _, values in reader.fp8_pieces(name)]), reader.fp8_scales(name))
    return None
