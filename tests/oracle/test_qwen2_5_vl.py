"""Qwen2.5-VL against transformers: chunks through images (Qwen2-VL too), published names, towers that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from npu_runner import LLM
from npu_runner.errors import ModelError
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import spoiled
from tests.oracle.image_prompts import FEW_LAYOUTS, LAYOUTS, make_prompts
from tests.oracle.running import SMALL, assert_equals_reference


@pytest.mark.parametrize(("model_type", "num_tokens"), [
    ("qwen2_5_vl", 16), *only_full("another tower, larger chunks", ("qwen2_vl", 16), ("qwen2_5_vl", 37))])
def test_chunks_may_cut_an_image(model_type: str, num_tokens: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        prompts, images = make_prompts(llm, FEW_LAYOUTS)
        assert_equals_reference(path, llm, prompts, images)


def test_tensors_named_as_published_load(checkpoint: Any, tmp_path: Path, platform_name: str) -> None:
    path: Path = checkpoint("qwen2_5_vl")
    published = spoiled(lambda base: path, tmp_path)
    tensors = {name.replace("model.visual.", "visual.").replace("model.language_model.", "model."): tensor
               for name, tensor in load_file(path / "model.safetensors").items()}
    assert {"visual.merger.mlp.0.weight", "model.embed_tokens.weight"} <= set(tensors)
    save_file(tensors, published / "model.safetensors", metadata={"format": "pt"})
    with LLM(published, platform=platform_name, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[:4])
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.parametrize(("changes", "words"), [
    ({"window_size": 20}, "vision_config.window_size 20 is less than a token's side of 28 pixels"),
    ({"hidden_act": "gelu"}, "vision hidden_act 'gelu' is not supported in this tower"),
])
def test_a_tower_that_we_would_get_wrong_is_refused(changes: dict[str, Any], words: str, checkpoint: Any,
                                                    tmp_path: Path) -> None:
    import json

    path: Path = checkpoint("qwen2_5_vl")
    vision = {**json.loads((path / "config.json").read_text())["vision_config"], **changes}
    with pytest.raises(ModelError, match=words):
        LLM(spoiled(lambda base: path, tmp_path, vision_config=vision), platform="cpu", **SMALL)
