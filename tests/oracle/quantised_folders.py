"""Folders of a few quantised tensors, and how they are read: whole, in slices, piece by piece. Knows no format.

`weights(N, K)` draws with outliers, so that scales of neighbours differ.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from npu_runner.checkpoint.formats import reader as formats_reader
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.layers.weights_loader import load_weights
from scripts.quantised.formats import Range

MODULE = "model.layers.0.mlp.up_proj"
WEIGHT = f"{MODULE}.weight"


def weights(num_outputs: int = 96, num_inputs: int = 160, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    scale = torch.rand(num_outputs, 1, generator=generator) + 0.1
    return torch.randn(num_outputs, num_inputs, generator=generator) * scale


def write_folder(path: Path, tensors: Mapping[str, Tensor], *, config: Mapping[str, Any] | None = None,
                 description: Mapping[str, Any] | None = None, file: str = "model.safetensors") -> Path:
    """`config`: its quantization_config; `description`: ModelSlim's."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({} if config is None else {"quantization_config": config}))
    if description is not None:
        (path / "quant_model_description.json").write_text(json.dumps(description))
    own = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
    save_file(own, path / file, metadata={"format": "pt"})
    return path


def loaded(path: Path, make: Callable[[], nn.Module]) -> Any:
    """The linear that `make` makes, as it is loaded where the checkpoint calls it `linear`."""
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = make()

    block = Block()
    with torch.inference_mode(), open_weights(path, read_quantization(path)) as reader:
        load_weights(block, reader)
    return block.linear


def of_module(parts: Mapping[str, Tensor], module: str = MODULE) -> dict[str, Tensor]:
    return {f"{module}.{name}": tensor for name, tensor in parts.items()}


def one_range(path: Path, least: float = -6.0, most: float = 5.0) -> dict[str, Range | None]:
    """The same inputs for each linear of a float checkpoint: what calibration finds for those that share them."""
    with CheckpointReader(path) as reader:
        return {name.removesuffix(".weight"): Range(least, most) for name in reader.names
                if len(reader.shape(name)) == 2}


def read_all(path: Path) -> dict[str, Tensor]:
    """Each tensor whole."""
    with open_weights(path, read_quantization(path)) as reader:
        return {name: reader.read(name) for name in sorted(reader.names)}


def assert_reads(path: Path, expected: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    """These are all tensors of `path`, equal bit for bit: whole, cut along each dim at odd places, and in pieces."""
    with open_weights(path, read_quantization(path)) as reader:
        assert reader.names == set(expected)
        for name, right in expected.items():
            assert reader.shape(name) == tuple(right.shape)
            assert reader.dtype(name) == "F32"
            assert_same(reader.read(name), right, dtype)
            for dim, length in enumerate(right.shape):
                for start, count in ((0, length // 2), (length // 3, length // 2), (length - 1, 1)):
                    assert_same(reader.read(name, dim, start, count), right.narrow(dim, start, count), dtype)
                    found = torch.empty_like(right.narrow(dim, start, count))
                    for rows, values in reader.pieces(name, dim, start, count):
                        found[rows] = values.to(found.dtype)
                    assert_same(found, right.narrow(dim, start, count), dtype)


def assert_same(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    worst = (found.float() - right.float()).abs().max().item()
    assert torch.equal(found.to(dtype), right.to(dtype)), f"differs by {worst:.2e}"


def in_small_pieces(monkeypatch: Any) -> None:
    """A tensor of some rows is read in several pieces."""
    monkeypatch.setattr(formats_reader, "_ELEMENTS_AT_ONCE", 1000)


def by_us(quantised: Path, target: Path, source: Path) -> None:
    tensors = {name: tensor.contiguous().clone() for name, tensor in read_all(quantised).items()}
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
