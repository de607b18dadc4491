"""Checkpoints whose norms are shifted, and transformers' models with these shifts."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from scripts.quantised.writing import quantise
from tests.oracle.quantised_folders import one_range

NORMS = ("input_layernorm", "post_attention_layernorm")
BEHIND = {"input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
          "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj")}


def shifted(plain: Path, folder: Path, name: str, *, copies: bool = False) -> Path:
    """A quantised copy whose norms are shifted. Linears of static inputs take a part of it back, as ModelSlim's do."""
    quantise(plain, folder, name, ranges=one_range(plain))
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(4)
    for norm in sorted(key.removesuffix(".weight") for key in tensors if key.endswith("norm.weight")):
        layer, _, kind = norm.rpartition(".")
        if kind not in NORMS and norm != "model.norm":
            continue
        weight = tensors[f"{norm}.weight"]
        shift = torch.randn(weight.shape, generator=generator) / 2
        tensors[f"{norm}.bias"] = shift.to(weight.dtype)
        if copies:
            tensors |= {f"{norm}.module.{each}": tensors[f"{norm}.{each}"].clone() for each in ("weight", "bias")}
        for linear in BEHIND.get(kind, ()):
            module = f"{layer}.{linear}"
            if f"{module}.quant_bias" in tensors:
                back = torch.randint(-3000, 3000, tensors[f"{module}.quant_bias"].shape, generator=generator)
                tensors[f"{module}.quant_bias"] += back.int()
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def add_shifts(model: nn.Module, found: dict[str, Tensor]) -> None:
    """Have the norms of transformers' model add what `found` has for them."""
    for name, module in model.named_modules():
        if f"{name}.shift" in found:
            shift = found[f"{name}.shift"]
            module.register_forward_hook(lambda _, __, out, shift=shift: out + shift.to(out.dtype))
