"""Linears of int8 in small folders, and a context to load them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from npu_runner.layers.linear import OutputPart
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import INT8, INT8_STATIC, QuantisedOps
from tests.oracle.quantised_folders import write_folder

BF16 = torch.bfloat16
TOKENS = torch.randn(5, 160, generator=torch.Generator().manual_seed(9)) * 3
NAMES = ("q_proj", "k_proj", "v_proj")
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


class Parts(TensorParallel):
    """One of two ranks by itself; what it would add up is added up by the test."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x


def context(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext(CpuOps(), None, Parts(rank, size), dtype, torch.device("cpu"),  # type: ignore[arg-type]
                        weight_forms=(INT8, INT8_STATIC), quantised=QuantisedOps(CpuOps()))


def compressed(inputs: dict[str, Any] | None, **of_weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": inputs, "format": "int-quantized",
             "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", **of_weights}}
    return {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}


def folder(path: Path, tensors: dict[str, dict[str, Tensor]], inputs: dict[str, Any] | None = DYNAMIC) -> Path:
    named = {f"{name}.{suffix}": tensor for name, parts in tensors.items() for suffix, tensor in parts.items()}
    return write_folder(path, named, config=compressed(inputs))


def parts(sizes: Sequence[int]) -> list[OutputPart]:
    return [OutputPart(name, size, 0, size) for name, size in zip(NAMES, sizes, strict=True)]


def static_folder(path: Path, tensors: dict[str, dict[str, Tensor]]) -> Path:
    named = {f"{name}.{suffix}": tensor for name, parts in tensors.items() for suffix, tensor in parts.items()}
    return write_folder(path, named, description={"version": "1.0.0", **{
        name: "FLOAT" if name.endswith(".bias") else "W8A8" for name in named}})
