"""Qwen2-VL against transformers: old files and published names, heads that are tied or not, and what is refused before
the network is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.errors import ModelError, WeightsError
from npu_runner.strategies import pick_strategy
from tests.oracle.changed_checkpoints import spoiled
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.running import SMALL, assert_equals_reference

HEAD = "lm_head.weight"


def as_published(path: Path, folder: Path) -> Path:
    """The same checkpoint as Qwen2-VL's files were published: text fields at the root, `in_chans`, short names."""
    made = spoiled(lambda base: path, folder)
    config = json.loads((path / "config.json").read_text())
    text, vision = config.pop("text_config"), config["vision_config"]
    rope = text.pop("rope_parameters")
    text.pop("layer_types")
    vision.update(in_chans=vision.pop("in_channels"), model_type="qwen2_vl", spatial_patch_size=vision["patch_size"])
    del vision["hidden_act"]
    old = {**text, **config, "rope_theta": rope["rope_theta"], "torch_dtype": "float32",
           "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    (made / "config.json").write_text(json.dumps(old))
    names = set(load_file(path / "model.safetensors"))
    assert {"visual.merger.ln_q.bias", "model.norm.weight", HEAD} <= names, "transformers 5 writes the short names"
    return made


def as_new(path: Path, folder: Path) -> Path:
    """With the names that transformers gives the parts in memory, and some releases wrote."""
    made = spoiled(lambda base: path, folder)
    tensors = {(name if name == HEAD else name.replace("visual.", "model.visual.") if name.startswith("visual.")
                else name.replace("model.", "model.language_model.")): tensor
               for name, tensor in load_file(path / "model.safetensors").items()}
    assert {"model.visual.merger.ln_q.bias", "model.language_model.norm.weight", HEAD} <= set(tensors)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


@pytest.mark.parametrize("form", [as_published, as_new])
def test_old_files_and_both_namings_load(form: Any, checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    path: Path = checkpoint("qwen2_vl")
    with LLM(form(path, tmp_path), platform=platform_name, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:4])
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.parametrize(("said", "has_head", "is_tied"), [
    (None, True, False), (None, False, True), (True, True, True), (True, False, True), (False, True, False)])
def test_config_json_decides_whether_the_head_is_tied(said: bool | None, has_head: bool, is_tied: bool, checkpoint: Any,
                                                      tmp_path: Path) -> None:
    made = spoiled(checkpoint, tmp_path, base="qwen2_vl", tie_word_embeddings=said)
    with_head(made, has_head)
    assert pick_strategy(made).read_config().tie_word_embeddings is is_tied


def test_a_head_that_config_json_promises_is_missed(checkpoint: Any, tmp_path: Path) -> None:
    made = spoiled(checkpoint, tmp_path, base="qwen2_vl", tie_word_embeddings=False)
    with_head(made, False)
    with pytest.raises(WeightsError, match=rf"missing: {HEAD}"):
        LLM(made, platform="cpu", **SMALL)


def with_head(path: Path, is_there: bool) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors[HEAD] = torch.zeros_like(tensors["model.embed_tokens.weight"])
    save_file({name: tensor for name, tensor in tensors.items() if is_there or name != HEAD},
              path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(("changes", "words"), [
    ({"hidden_act": "relu"}, "vision hidden_act 'relu' is not supported; supported are .*quick_gelu"),
    ({"in_channels": 1}, "vision_config.in_channels 1 is not supported"),
    ({"patch_size": [14, 7]}, r"vision_config.patch_size \[14, 7\] is not supported"),
    ({"rope_parameters": {"rope_type": "yarn"}}, "vision rope_type 'yarn' is not supported"),
    ({"patch_size": 16}, "patch_size is 14 in preprocessor_config.json but patch_size is 16"),
])
def test_a_tower_that_we_would_get_wrong_is_refused(changes: dict[str, Any], words: str, checkpoint: Any,
                                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path: Path = checkpoint("qwen2_vl")
    vision = {**json.loads((path / "config.json").read_text())["vision_config"], **changes}
    monkeypatch.setattr("npu_runner.strategies.qwen2_vl.Qwen2VLStrategy.build", None)  # refused before
    with pytest.raises(ModelError, match=words):
        LLM(spoiled(lambda base: path, tmp_path, vision_config=vision), platform="cpu", **SMALL)


@pytest.mark.parametrize(("changes", "words"), [
    ({"do_center_crop": True}, "do_center_crop is set"), ({"resample": 9}, "resample is 9"),
    ({"merge_size": 3}, "merge_size is 3 in preprocessor_config.json but spatial_merge_size is 2")])
def test_images_that_we_would_get_wrong_are_refused(changes: dict[str, Any], words: str, checkpoint: Any,
                                                    tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = spoiled(checkpoint, tmp_path, base="qwen2_vl")
    file = made / "preprocessor_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    monkeypatch.setattr("npu_runner.strategies.qwen2_vl.Qwen2VLStrategy.build", None)  # refused before
    with pytest.raises(ModelError, match=words):
        LLM(made, platform="cpu", **SMALL)
