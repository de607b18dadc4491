"""Models of Gated DeltaNet and gated attention against transformers: dense, of experts, with images, without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from npu_runner.errors import ConfigError, ModelError, WeightsError
from npu_runner.layers.gated_delta import gated_delta_shape
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms.gated_delta import GatedDeltaShape
from npu_runner.strategies import pick_strategy
from tests.full_set import only_full
from tests.oracle.changed_checkpoints import copy_with_more_tensors
from tests.oracle.family_prompts import TEXTS, prompts_of
from tests.oracle.kept_graphs import KeptGraphs
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_equals_reference, greedy, runner_of


@pytest.mark.parametrize(("num_tokens", "model_type"), [
    (64, "qwen3_5"), *only_full("larger chunks, and the family without images", (192, "qwen3_5"), (64, "qwen3_next"),
                                (192, "qwen3_next"))])
def test_chunks_carry_the_state(num_tokens: int, model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, max_num_batched_tokens=num_tokens, **SMALL) as llm:
        assert_equals_reference(path, llm, *prompts_of(llm, model_type))


@pytest.mark.full("sizes of blocks; small ones stay with preemption, and the usual one everywhere")
@pytest.mark.parametrize("block_size", [48, 4, 128])
def test_any_block_size(block_size: int, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5_text")
    with LLM(path, platform=platform_name, block_size=block_size, max_num_batched_tokens=256, **SMALL) as llm:
        assert_equals_reference(path, llm, *prompts_of(llm, "qwen3_5_text"))


@pytest.mark.full("the same prompts again; prompts that go on from a snapshot stay (test_state_snapshots.py)")
@pytest.mark.parametrize("model_type", ["qwen3_5_text", "qwen3_5"])
def test_a_warm_prefix_cache_equals_a_cold_one(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, **SMALL) as llm:
        prompts, images = prompts_of(llm, model_type)
        cold = llm.generate(prompts, greedy())
        hits = llm.stats().prefix_cache_hits
        warm = llm.generate(prompts, greedy())
        assert [output.token_ids for output in warm] == [output.token_ids for output in cold]
        assert llm.stats().prefix_cache_hits - hits >= 64 * sum(len(prompt.token_ids) > 64 for prompt in prompts)
        assert_equals_reference(path, llm, prompts, images)


def test_preempted_sequences_end_as_if_undisturbed(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5_text")
    per_block = 2 * 1 * 4 * 2 * 32 * 4  # k and v, layers that attend, block_size, kv heads, head_dim, bytes
    with LLM(path, platform=platform_name, block_size=4, kv_cache_bytes=24 * per_block, max_num_seqs=8,
             max_model_len=72, dtype="float32", enable_prefix_caching=False) as llm:
        prompts = [llm.engine.processor.from_text(text) for text in PREEMPTED]
        assert_equals_reference(path, llm, prompts, num_tokens=MAX_NEW_TOKENS)
        assert llm.stats().num_preemptions > 0, "the test must force preemption"


PREEMPTED = [f"{word} {'which of the pictures ' * count}" for count, word in enumerate("abcdefg")]


def test_a_slot_is_taken_over_by_one_sequence_after_the_other(checkpoint: Any, platform_name: str) -> None:
    """Two slots, many sequences: what the last holder left there is nobody's."""
    path: Path = checkpoint("qwen3_5_text")
    with LLM(path, platform=platform_name, **{**SMALL, "max_num_seqs": 2}) as llm:
        states = runner_of(llm).states
        assert states is not None
        with torch.inference_mode():
            states.states.fill_(torch.nan)
            states.conv_states.fill_(torch.nan)
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in [*TEXTS, *PREEMPTED]])


@pytest.fixture
def graphs(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> KeptGraphs:
    if platform_name != "cpu":
        pytest.skip("elsewhere the graphs themselves are compared")
    from npu_runner.platforms.cpu.platform import CpuPlatform

    made = KeptGraphs()
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: made)
    return made


def test_padded_rows_have_states_of_their_own_and_kept_graphs_are_compared_from_the_same_ones(
        graphs: KeptGraphs, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5_text")
    with LLM(path, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(2, 5), **SMALL) as llm:
        assert graphs.discarded == [], "eager and graph are the same code: they differ only if their states did"
        states = runner_of(llm).states
        assert states is not None
        assert (states.plan.num_padding, int(states.states.count_nonzero())) == (2, 0)
        with torch.inference_mode():
            states.states[:, states.plan.max_num_seqs :] = torch.nan
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in PREEMPTED])


def test_a_batch_without_states_for_its_padding_runs_eagerly(graphs: KeptGraphs, checkpoint: Any, platform_name: str,
                                                             caplog: pytest.LogCaptureFixture) -> None:
    path: Path = checkpoint("qwen3_5_text")
    graphs.least = 8
    with LLM(path, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(2, 5, 8), **SMALL) as llm:
        assert llm.engine.info.graphs.startswith("8 ")
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in PREEMPTED])
        assert "batch of 1 has no states to be padded to the smallest graph (8) with" in caplog.text
        assert "batch of 7" not in caplog.text


@pytest.mark.slow
@pytest.mark.full("inductor compiles for a minute; the same steps without a compiler stay, as do graphs on npu")
def test_compiled_equals_eager(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5_text", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    with LLM(path, platform=platform_name, graph_mode="reduce-overhead", graph_batch_sizes=(4,), **SMALL) as llm:
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in PREEMPTED])


def test_the_multi_token_prediction_head_is_left_out_and_said_so(checkpoint: Any, platform_name: str, tmp_path: Path,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    path = copy_with_more_tensors(checkpoint("qwen3_5_text"), tmp_path, "mtp.fc.weight", "mtp.layers.0.q.weight")
    with caplog.at_level("INFO"), LLM(path, platform=platform_name, **SMALL) as llm:
        llm.generate(["which"], greedy())
    assert "2 tensors" in caplog.text
    assert "left out: mtp." in caplog.text
    path = copy_with_more_tensors(checkpoint("qwen3_5_text"), tmp_path / "other", "mtp2.weight")
    with pytest.raises(WeightsError, match=r"left over: mtp2\.weight"):
        LLM(path, platform=platform_name, **SMALL)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "unknown layer": ({"layer_types": ["mamba", "full_attention"] * 2}, r"layer_types names 'mamba'"),
    "no attention": ({"layer_types": ["linear_attention"] * 4}, r"layer_types names no full_attention layer"),
    "too few layers": ({"layer_types": ["linear_attention"]}, r"layer_types has 1 entries for 4 layers"),
    "no state size": ({"linear_key_head_dim": None}, r"field 'linear_key_head_dim' is missing"),
    "no kernel": ({"linear_conv_kernel_dim": None}, r"field 'linear_conv_kernel_dim' is missing"),
    "heads that do not divide": ({"linear_num_value_heads": 3}, r"2 key heads of 16, 3 value heads .* is not possible"),
    "no gate": ({"attn_output_gate": False}, r"attn_output_gate false is not supported"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_config_that_cannot_be_served_is_refused_by_name(name: str, checkpoint: Any, tmp_path: Path) -> None:
    """Before anything is loaded: there are no weights in the folder."""
    changes, message = BROKEN[name]
    config = json.loads((checkpoint("qwen3_5_text") / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        pick_strategy(tmp_path).read_config()


def test_ranks_that_do_not_divide_the_key_heads_are_refused(checkpoint: Any) -> None:
    config = pick_strategy(checkpoint("qwen3_5_text")).read_config()
    assert gated_delta_shape(config, TensorParallel(1, 2)) == GatedDeltaShape(
        num_k_heads=1, num_v_heads=2, head_k_dim=16, head_v_dim=16, conv_kernel_size=4)
    with pytest.raises(ConfigError, match="linear_num_key_heads 2 does not divide by tensor_parallel_size 4"):
        gated_delta_shape(config, TensorParallel(0, 4))
