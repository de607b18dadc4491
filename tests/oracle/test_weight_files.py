"""The files that a checkpoint's weights lie in: those that transformers opens, all of them hashed and no others."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from npu_runner.batch.files.fingerprint import WeightDigests, files_of_model, fingerprint_model
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import WeightsError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
NORM = "model.norm.weight"


@pytest.fixture
def shards(checkpoint: Any, tmp_path: Path) -> Path:
    """A checkpoint of many shards that a test may spoil."""
    path: Path = shutil.copytree(checkpoint("qwen3", max_shard_size="100KB"), tmp_path / "model")
    return path


def norm_in(path: Path) -> list[float]:
    with CheckpointReader(path) as reader:
        return list(reader.read(NORM).tolist())


def norm_of_transformers(path: Path) -> list[float]:
    return list(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()[NORM].tolist())


def hashed(path: Path) -> set[str]:
    """The files of weights that a manifest names, each by samples and whole."""
    lines = {name for name in fingerprint_model(path) if name.endswith(".safetensors")}
    with WeightDigests(path, num_threads=1) as digests:
        assert set(digests.lines()) == lines
    assert {file.name for file in files_of_model(path)} >= lines
    return lines


def save_single(path: Path, value: float) -> None:
    """All weights in one file, beside what lies there; its norm holds `value`."""
    tensors = {name: tensor for file in path.glob("model-*.safetensors") for name, tensor in load_file(file).items()}
    tensors[NORM] = torch.full_like(tensors[NORM], value)
    save_file(tensors, path / SINGLE, metadata={"format": "pt"})


@pytest.mark.parametrize("lost", ["all", "one"])
def test_an_index_without_its_shards_does_not_count_beside_a_single_file(lost: str, shards: Path) -> None:
    save_single(shards, 3.0)
    for file in sorted(shards.glob("model-*.safetensors"))[: None if lost == "all" else 1]:
        file.unlink()
    assert norm_in(shards) == norm_of_transformers(shards) == [3.0] * 64
    assert hashed(shards) == {SINGLE}


def test_two_whole_saves_in_one_folder_are_refused_by_name(shards: Path) -> None:
    save_single(shards, 3.0)
    for read in (norm_in, fingerprint_model):
        with pytest.raises(WeightsError, match=f"{SINGLE} beside {INDEX} and its .* files"):
            read(shards)


def test_files_of_other_names_count_neither_for_weights_nor_for_hashes(shards: Path) -> None:
    before, right = hashed(shards), norm_in(shards)
    save_file({NORM: torch.full((64,), 9.0)}, shards / "consolidated.safetensors", metadata={"format": "pt"})
    assert norm_in(shards) == norm_of_transformers(shards) == right
    assert hashed(shards) == before == {file.name for file in shards.glob("model-*.safetensors")}


def test_all_that_an_index_names_is_hashed(shards: Path) -> None:
    """Whatever the files are called."""
    file = next(shards.glob("model-00001*.safetensors"))
    file.rename(shards / "first.weights")
    index = (shards / INDEX).read_text().replace(file.name, "first.weights")
    (shards / INDEX).write_text(index)
    assert "first.weights" in fingerprint_model(shards)
    with WeightDigests(shards, num_threads=1) as digests:
        assert set(digests.lines()) == set(json.loads(index)["weight_map"].values())


@pytest.mark.parametrize("name", ["parts/a.safetensors", "../a.safetensors", "{absolute}", "..", "", 7, None])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: Any, shards: Path) -> None:
    """Even where there is such a file."""
    (shards / "parts").mkdir()
    for place in (shards / "parts", shards.parent):
        save_file({NORM: torch.ones(64)}, place / "a.safetensors")
    name = str(shards.parent / "a.safetensors") if name == "{absolute}" else name
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"][NORM] = name
    (shards / INDEX).write_text(json.dumps(index))
    for read in (norm_in, fingerprint_model, files_of_model):
        with pytest.raises(WeightsError, match=f"names the file .* for .*{NORM}"):
            read(shards)


def test_the_index_decides_which_file_holds_a_tensor(shards: Path) -> None:
    right, places = norm_in(shards), json.loads((shards / INDEX).read_text())["weight_map"]
    for file in {*places.values()} - {places[NORM]}:
        save_file({**load_file(shards / file), NORM: torch.full((64,), 7.0)}, shards / file)
    assert norm_in(shards) == right
    tensors = load_file(shards / places[NORM])
    del tensors[NORM]
    save_file(tensors, shards / places[NORM])
    with pytest.raises(WeightsError, match=f"their file does not hold: {NORM}"):
        norm_in(shards)


def test_a_tensor_of_two_files_that_no_index_knows_is_refused(shards: Path) -> None:
    for file in sorted(shards.glob("model-*.safetensors"))[:2]:
        save_file({**load_file(file), "more": torch.ones(1)}, file)
    with pytest.raises(WeightsError, match=r"both hold more, and no index says"):
        norm_in(shards)


def test_a_shard_that_is_a_link_counts_as_a_file_of_the_folder(shards: Path, tmp_path: Path) -> None:
    """The hub's cache consists of links."""
    file = next(shards.glob("model-00001*.safetensors"))
    shutil.move(file, tmp_path / "blob")
    os.symlink(tmp_path / "blob", file)
    assert file.name in hashed(shards)
    assert norm_in(shards)
