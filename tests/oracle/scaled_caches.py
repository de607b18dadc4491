"""Checkpoints with scales for keys and values in FP8 that matter: many keys and values are beyond the format's largest
number, and the scales of keys, of values and of layers differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from scripts.quantised.writing import quantise

SCHEME: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"), "older": ("k_proj.output_scale", "v_proj.output_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"), "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"), "one for both": ("kv_scale", "kv_scale"),
}  # fmt: skip
KEYS, VALUES = 500.0, 40000.0
"""What keys and values are larger by; queries and the output projection are smaller by as much, so that the network
computes what it did."""


def scales_of(layer: int) -> tuple[float, float]:
    return 8.0 + layer, 400.0 + layer


def enlarge(path: Path) -> None:
    """Keys and values of a checkpoint with norms of heads."""
    factors = {"k_norm.weight": KEYS, "q_norm.weight": 1 / KEYS, "v_proj.weight": VALUES, "o_proj.weight": 1 / VALUES}
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in tensors:
        tensors[name] *= factors.get(".".join(name.split(".")[-2:]), 1.0)
    save_file(tensors, file, metadata={"format": "pt"})


def with_scales(path: Path, scales: dict[str, Tensor], scheme: Any = SCHEME) -> Path:
    """Adds these tensors to a quantised folder, and `kv_cache_scheme` to its config."""
    (file,) = path.glob("*.safetensors")
    save_file(load_file(file) | scales, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (path / "config.json").write_text(json.dumps(config))
    return path


def scaled_checkpoint(plain: Path, target: Path, *, names: str = "compressed-tensors", scheme: Any = SCHEME,
                      num_layers: int = 3, prefix: str = "model.layers", is_swapped: bool = False) -> Path:
    """An FP8 checkpoint by row made of `plain`, with `scales_of` each layer. `is_swapped`: those of keys are called
    those of values."""
    quantise(plain, target, "fp8-dynamic", group_size=8)
    scales = {f"{prefix}.{layer}.self_attn.{name}": torch.tensor([scale]) for layer in range(num_layers)
              for name, scale in zip(NAMES[names], scales_of(layer)[::-1 if is_swapped else 1], strict=True)}
    return with_scales(target, scales, scheme)
