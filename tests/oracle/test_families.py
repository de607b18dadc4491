"""Every family against transformers: greedy tokens and logits in float32, of its plain config and of its variants."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.strategies import pick_strategy
from tests.families import FAMILIES, sees_images
from tests.full_set import only_full
from tests.oracle.family_prompts import TEXTS, prompts_of
from tests.oracle.running import SMALL, assert_equals_reference

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model_type}, {what}" if what else model_type: (model_type, changes)
    for model_type, family in FAMILIES.items() for what, changes in {"": {}, **family.variants}.items()
}
MORE = [f"{model_type}, {what}" for model_type, family in FAMILIES.items() for what in family.more]


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in MORE), *only_full(
    "variants of which another family's variant has what they change (tests/families.py)", *MORE)])
def test_greedy_tokens_and_logits_equal_transformers(name: str, checkpoint: Any, platform_name: str) -> None:
    model_type, changes = CASES[name]
    path: Path = checkpoint(model_type, **changes)
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **SMALL) as llm:
        prompts, images = prompts_of(llm, model_type, of_variant=bool(changes))
        assert_equals_reference(path, llm, prompts, images)
        if sees_images(model_type):
            num_images = len({id(image) for of_prompt in images for image in of_prompt})
            assert llm.stats().num_images_encoded == num_images, "the tower runs once for each distinct image"


def test_sharded_checkpoint_equals_a_single_file(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


def test_configs_that_differ_only_in_what_layers_read_are_told_apart(checkpoint: Any) -> None:
    """Kept graphs go by the config: one of a model with biases is not taken for a model without."""
    plain, biased = (pick_strategy(checkpoint("llama", **changes)).read_config()
                     for changes in ({}, {"attention_bias": True}))
    assert biased.source != plain.source
    assert dataclasses.replace(biased, source=plain.source) == plain
