"""Fields of config.json that stand beside each other and disagree count as they do in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from npu_runner import LLM
from npu_runner.config import RunnerConfig
from npu_runner.errors import ModelError
from npu_runner.strategies import open_checkpoint, pick_strategy
from tests.full_set import only_full
from tests.oracle.running import SMALL, assert_equals_reference

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def changed(checkpoint: Any, tmp_path: Path, model_type: str = "qwen3", *, head: torch.Tensor | str | None = None,
            **fields: Any) -> Path:
    """A copy with these fields of config.json, and with this head (equal: the embedding's values)."""
    path: Path = shutil.copytree(checkpoint(model_type), tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **fields}))
    tensors = load_file(path / "model.safetensors")
    tensors[HEAD] = tensors[EMBEDDING].clone() if head == "equal" else tensors[HEAD]
    tensors = {name: tensor for name, tensor in tensors.items() if head != "none" or name != HEAD}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("scaling", [
    YARN, {**YARN, "rope_theta": 5e5}, {"type": "linear", "factor": 2.0}, {}, None,
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64}], ids=str)
@pytest.mark.parametrize("parameters", [{"rope_type": "default", "rope_theta": 1e6}, YARN, None], ids=str)
def test_rope_scaling_counts_before_rope_parameters(scaling: Any, parameters: Any, checkpoint: Any, tmp_path: Path
                                                    ) -> None:
    path = changed(checkpoint, tmp_path, rope_scaling=scaling, rope_parameters=parameters)
    right, rope = AutoConfig.from_pretrained(path).rope_parameters, pick_strategy(path).read_config().rope
    expected = {name: value for name, value in right.items() if name not in ("rope_type", "type", "rope_theta")}
    assert (rope.kind, rope.theta, rope.parameters) == (right["rope_type"], right["rope_theta"], expected)


@pytest.mark.parametrize("model_type", ["qwen3", *only_full("other families; one stays", "qwen2", "llama")])
def test_yarn_that_is_added_to_a_new_file_shapes_the_tokens(model_type: str, checkpoint: Any, tmp_path: Path,
                                                            platform_name: str) -> None:
    path = changed(checkpoint, tmp_path, model_type, rope_scaling=YARN)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        texts = ["a red circle " * count for count in (9, 2)]
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in texts])


@pytest.mark.parametrize(("head", "is_tied"), [("other", False), ("equal", True), ("none", True)])
def test_a_stored_head_that_differs_counts_although_config_json_ties_it(head: str, is_tied: bool, checkpoint: Any,
                                                                        tmp_path: Path) -> None:
    path = changed(checkpoint, tmp_path, head=head, tie_word_embeddings=True)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (reference.lm_head.weight is reference.model.embed_tokens.weight) == is_tied
    opened = open_checkpoint(RunnerConfig(model=str(path)))
    assert opened.model_config.tie_word_embeddings is is_tied


def test_tokens_of_a_head_that_differs_are_those_of_transformers(checkpoint: Any, tmp_path: Path, platform_name: str
                                                                 ) -> None:
    path = changed(checkpoint, tmp_path, head="other", tie_word_embeddings=True)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in ("a circle", "two")])


def test_a_file_of_weights_that_config_json_names_is_refused(checkpoint: Any, tmp_path: Path) -> None:
    """transformers would open it, and nothing else."""
    path = changed(checkpoint, tmp_path, transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match=r"transformers_weights 'other\.safetensors' names the weights' file"):
        pick_strategy(path).read_config()
