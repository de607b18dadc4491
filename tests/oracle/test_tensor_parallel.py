"""Two ranks in processes of their own give what one gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, greedy, need_two_devices
from tests.oracle.test_qwen3_vl import LAYOUTS, make_prompts
from tests.oracle.test_scheduling_changes_nothing import text_prompts
from tests.oracle.tiny_checkpoints import VISION_OF

ONE_OF_EACH: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
CASES = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"num_key_value_heads": 1},  # fewer kv heads than ranks: both hold it
    "qwen3": {"vocab_size": 321},  # a vocabulary that does not divide
    "qwen3_vl": {"tie_word_embeddings": True},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_vl_moe": {},
    "qwen2_5_vl": {},
    "qwen3_5": {},
    "qwen3_5_text": ONE_OF_EACH,
    "qwen3_5_moe": ONE_OF_EACH,
    "qwen3_5_moe_text": ONE_OF_EACH,
    "qwen3_next": {"linear_num_value_heads": 6},
}


@pytest.fixture(autouse=True)
def _two_devices(platform_name: str) -> None:
    need_two_devices(platform_name)


# Fewer kv heads than ranks; pictures; experts and states.
FAST = ("qwen2", "qwen3_vl", "qwen3_5_moe")


@pytest.mark.parametrize("model_type", FAST)
def test_two_ranks_equal_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    assert_equal_one(model_type, checkpoint, platform_name)


@pytest.mark.full("two ranks start for each; a family of each kind stays")
@pytest.mark.parametrize("model_type", [name for name in CASES if name not in FAST])
def test_two_ranks_of_other_families_equal_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    assert_equal_one(model_type, checkpoint, platform_name)


def assert_equal_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type, **CASES[model_type])

    def run(ranks: int) -> list[list[int]]:
        with LLM(path, platform=platform_name, tensor_parallel_size=ranks, max_num_batched_tokens=64, **SMALL) as llm:
            prompts = make_prompts(llm, LAYOUTS[:7])[0] if model_type in VISION_OF else text_prompts(llm)
            return [output.token_ids for output in llm.generate(prompts, greedy())]

    alone = run(1)
    assert run(2) == alone
    assert all(len(tokens) == MAX_NEW_TOKENS for tokens in alone)


@pytest.mark.slow
@pytest.mark.full("two ranks compile at once on two cores; two ranks without graphs stay, as do graphs on npu")
def test_two_ranks_with_graphs_equal_one_without(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3", num_hidden_layers=1)

    def run(**settings: Any) -> list[list[int]]:
        with LLM(path, platform=platform_name, **settings, **{**SMALL, "max_num_seqs": 4}) as llm:
            graphs = llm.engine.info.graphs
            assert graphs == ("4" if "graph_mode" in settings else "eager")
            return [output.token_ids for output in llm.generate(text_prompts(llm), greedy())]

    alone = run(enforce_eager=True)
    assert run(tensor_parallel_size=2, graph_mode="reduce-overhead", graph_batch_sizes=(4,)) == alone
