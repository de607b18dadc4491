"""Text models against transformers: every model type, head ratio, bias and rope kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.oracle.running import SMALL, assert_equals_reference

TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20, "colour " * 90]
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 256}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 2 queries a head": ("llama", {}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama, all biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, one kv head": ("llama", {"num_key_value_heads": 1}),
    "llama, linear rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e3, "factor": 4.0}}),
    "llama, dynamic rope": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama, llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama, yarn rope": ("llama", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}}),
    "llama, longrope": ("llama", {"rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 1024,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5], "long_factor": [2.0] * 8}}),
    "qwen2, no grouping": ("qwen2", {"num_key_value_heads": 4}),
    "qwen2, tied, one kv head": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen3, 4 queries a head": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "qwen3, tied, biased": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen3, wide heads": ("qwen3", {"head_dim": 48, "num_attention_heads": 2, "num_key_value_heads": 2}),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens_and_logits_equal_transformers(name: str, checkpoint: Any, platform_name: str) -> None:
    model_type, changes = VARIANTS[name]
    path: Path = checkpoint(model_type, **changes)
    with LLM(path, platform=platform_name, max_num_batched_tokens=128, **SMALL) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in TEXTS]
        assert_equals_reference(path, llm, prompts)


def test_sharded_checkpoint_equals_a_single_file(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3", max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])
