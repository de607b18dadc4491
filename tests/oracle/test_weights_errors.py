"""Weights that do not fit are refused before anything is read, and every tensor at fault is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.errors import WeightsError
from tests.oracle.running import SMALL

INDEX = "model.safetensors.index.json"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=["single", "sharded"])
def copied(request: pytest.FixtureRequest, checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    size = {"single": "5GB", "sharded": "100KB"}[request.param]
    path: Path = shutil.copytree(checkpoint("qwen3", max_shard_size=size), tmp_path / "model")
    assert (path / INDEX).exists() == (request.param == "sharded")
    return path


def change(path: Path, name: str, edit: Callable[[Tensors], object]) -> None:
    """Apply `edit` to the file that holds (or, by its place in the index, would hold) the tensor `name`."""
    index = json.loads((path / INDEX).read_text()) if (path / INDEX).exists() else {"weight_map": {}}
    file = path / index["weight_map"].get(name, "model.safetensors")
    tensors = load_file(file)
    edit(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(path: Path, **settings: Any) -> str:
    with pytest.raises(WeightsError) as caught:
        LLM(path, platform="cpu", **SMALL, **settings)
    return str(caught.value)


QUERY = "model.layers.1.self_attn.q_proj.weight"
GATE = "model.layers.0.mlp.gate_proj.weight"


def test_every_tensor_at_fault_is_named_at_once(copied: Path) -> None:
    change(copied, QUERY, lambda tensors: tensors.update({QUERY: tensors[QUERY][:, :60].contiguous()}))
    change(copied, GATE, lambda tensors: tensors.update({"model.extra.weight": torch.ones(3, 2)}))
    norm = "model.norm.weight"
    change(copied, norm, lambda tensors: tensors.pop(norm))
    if (copied / INDEX).exists():
        index = json.loads((copied / INDEX).read_text())
        del index["weight_map"][norm]
        (copied / INDEX).write_text(json.dumps(index))
    message = refusal(copied)
    assert "missing: model.norm.weight [64]" in message
    assert "left over: model.extra.weight [3, 2]" in message
    assert f"misshapen: {QUERY} is [64, 60], config.json makes it [64, 64]" in message
    assert len(re.findall("missing:|left over:|misshapen:", message)) == 3


def test_a_tensor_that_the_index_promises_and_no_file_holds_is_named(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3", max_shard_size="100KB"), tmp_path / "model")
    change(path, QUERY, lambda tensors: tensors.pop(QUERY))
    assert QUERY in refusal(path)


def test_a_shard_that_is_not_there_is_named(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3", max_shard_size="100KB"), tmp_path / "model")
    lost = sorted(path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"{lost.name} is missing" in refusal(path)


def test_an_index_that_says_nothing_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3", max_shard_size="100KB"), tmp_path / "model")
    (path / INDEX).write_text('{"weight_map": {}}')
    assert "has no weight_map" in refusal(path)


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{not a header}..", b"PK\x03\x04 a zip", None])
def test_a_file_that_is_no_safetensors_is_named(content: bytes | None, checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000] if content is None else content)
    assert "model.safetensors cannot be read" in refusal(path)


def test_other_formats_are_refused_with_the_remedy(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    assert "pytorch_model.bin cannot be used, convert it to safetensors" in refusal(path)
    (path / "pytorch_model.bin").unlink()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in refusal(path)


@pytest.mark.parametrize(("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")], ids=str)
def test_quantised_weights_that_no_config_tells_of_are_refused_by_name(
        dtype: torch.dtype, name: str, checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    change(path, QUERY, lambda tensors: tensors.update({QUERY: tensors[QUERY].to(dtype)}))
    assert f"of another type: {QUERY} holds {name}, and nothing in the folder says" in refusal(path)


def test_a_rank_of_many_names_the_tensor_too(checkpoint: Any, tmp_path: Path) -> None:
    path: Path = shutil.copytree(checkpoint("qwen3"), tmp_path / "model")
    change(path, QUERY, lambda tensors: tensors.update({QUERY: tensors[QUERY][:60].contiguous()}))
    assert f"misshapen: {QUERY} is [60, 64]" in refusal(path, tensor_parallel_size=2)
