"""transformers' models with linears that round their inputs as ours do: in float64 by the references of int8 and FP8,
else by the formula in plain torch. And with linears of integers in groups, whose inputs stay.
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
from npu_runner.platforms.ops import Fp8Weight, Int8Weight
from tests.oracle.fp8_reference import fp8_product
from tests.oracle.int8_reference import rounded_product, static_product


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
            out = CpuOps().int8_linear(rows, Int8Weight(self.values, self.scales), self.bias)
        else:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            out = CpuOps().fp8_linear(rows, Fp8Weight(self.values, self.scales), bias)
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


def rounded_models(checkpoint: Path, reader: WeightsReader, dtype: torch.dtype = torch.bfloat16
                   ) -> tuple[nn.Module, nn.Module]:
    """The model with such linears where `reader` has int8, FP8 or groups: in float64, and in `dtype`."""
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
    for name, linear in list(plain.named_modules()):
        held = _held(reader, f"{name}.weight") if isinstance(linear, nn.Linear) else None
        if held is not None:
            bias = linear.bias if f"{name}.bias" not in reader.names else reader.read(f"{name}.bias")
            plain.set_submodule(name, Rounded(held, bias))
        elif isinstance(linear, nn.Linear) and _has_groups(reader, f"{name}.weight"):
            plain.set_submodule(name, Dequantised(reader.read(f"{name}.weight"), linear.bias))
    return copy.deepcopy(plain).double(), plain


def _has_groups(reader: WeightsReader, name: str) -> bool:
    return name in reader.names and reader.grouped_form(name) is not None


def _held(reader: WeightsReader, name: str) -> Held | None:
    if name in reader.names and (inputs := reader.int8_inputs(name)) is not None:
        pieces = list(reader.int8_pieces(name))
        return Held(torch.cat([values for _, values, _ in pieces]), torch.cat([scales for _, _, scales in pieces]),
                    inputs)
    if name in reader.names and reader.fp8_form(name) is not None:
        return Held(torch.cat([values for _, values in reader.fp8_pieces(name)]), reader.fp8_scales(name))
    return None
