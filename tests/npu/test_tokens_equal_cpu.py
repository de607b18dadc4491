"""The npu platform gives the tokens of the cpu platform: every mode, every model, one rank and several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import SHAPES_VL
from tests.cann.environment import has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.oracle.tiny_checkpoints import VISION_OF

pytestmark = [pytest.mark.npu, pytest.mark.slow]
emulated = pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16")

NUM_PICTURES, FEW_PICTURES = 40, 24
# The worst step shows the tower pairs of frames, as many as a step has room for, in float32.
ROOM = 2 << 30
BUCKETS, FEW_BUCKETS = [1, 4, 16], [4, 16]
MODES = ["eager", "reduce-overhead", "max-autotune"]


def shapes(mode: str, num_pictures: int = NUM_PICTURES, **settings: Any) -> Case:
    common: dict[str, Any] = {"graph_mode": mode, "max_model_len": 1024, "max_num_seqs": 16,
                              "vision_cache_bytes": SMALL["vision_cache_bytes"], **FLOAT32}
    if mode != "eager":
        common["graph_batch_sizes"] = BUCKETS
    return Case(str(SHAPES_VL), {**common, **settings}, "shapes", num_pictures, max_tokens=48, ignore_eos=False)


@pytest.fixture(scope="module")
def shapes_on_cpu() -> dict[str, Any]:
    return on_cpu(shapes("eager"))


@emulated
def test_shapes_vl(tmp_path: Path) -> None:
    case = shapes("reduce-overhead", FEW_PICTURES, graph_batch_sizes=FEW_BUCKETS)
    (result,) = on_npu([case], tmp_path, memory_bytes=ROOM)
    assert result["tokens"] == on_cpu(shapes("eager", FEW_PICTURES))["tokens"]
    assert_graphs_are_whole(result, FEW_BUCKETS)


@pytest.mark.full("more pictures, and a graph for one row; fewer of both stay")
@emulated
def test_more_of_shapes_vl(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    (result,) = on_npu([shapes("reduce-overhead")], tmp_path, memory_bytes=ROOM)
    assert result["tokens"] == shapes_on_cpu["tokens"]
    assert_graphs_are_whole(result, BUCKETS)


@pytest.mark.full("prefills run eagerly with graphs, too; eager decode steps stay with tiny models")
@emulated
def test_shapes_vl_without_graphs(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    (result,) = on_npu([shapes("eager")], tmp_path, memory_bytes=ROOM)
    assert result["tokens"] == shapes_on_cpu["tokens"]


@pytest.mark.full("compiles the embedded model's graphs and loads them again; tiny models stay in this mode, kept "
                  "graphs have their own file")
@emulated
def test_shapes_vl_through_the_graph_engine_compiled_and_kept(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    case = shapes("max-autotune", graph_cache_dir=str(tmp_path / "graphs"))
    (compiled,) = on_npu([case], tmp_path, memory_bytes=ROOM)
    assert compiled["tokens"] == shapes_on_cpu["tokens"]
    assert_graphs_are_whole(compiled, BUCKETS)
    assert "kept" not in compiled["graphs"]
    (loaded,) = on_npu([case], tmp_path, memory_bytes=ROOM)
    assert loaded["tokens"] == shapes_on_cpu["tokens"]
    assert loaded["graphs"] == "1, 4, 16 (kept from an earlier run: 1, 4, 16)"
    assert loaded["after"]["traced"] == 0, "what is loaded is not traced again"


TINY: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 20},
    "qwen2": {"num_key_value_heads": 1},
    "qwen3": {"vocab_size": 321, "head_dim": 64},
    "qwen3_vl": {"tie_word_embeddings": True},
    "qwen2_5_vl": {},
}


def tiny(model_type: str, checkpoint: Any, mode: str, **settings: Any) -> Case:
    graphs = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    prompts, count = ("pictures", 6) if model_type in VISION_OF else ("texts", 7)
    path = checkpoint(model_type, **TINY[model_type])
    return Case(str(path), {"graph_mode": mode, **SMALL, **FLOAT32, **graphs, **settings}, prompts, count)


# One of texts, one with pictures.
FAST = ("qwen3", "qwen3_vl")


@emulated
@pytest.mark.parametrize("mode", MODES)
def test_tiny_models(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_tokens_equal_cpu(FAST, mode, checkpoint, tmp_path)


@emulated
@pytest.mark.full("four more families in each mode; two stay, one of them with pictures")
@pytest.mark.parametrize("mode", MODES)
def test_other_tiny_models(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_tokens_equal_cpu([name for name in TINY if name not in FAST], mode, checkpoint, tmp_path)


def assert_tokens_equal_cpu(model_types: Sequence[str], mode: str, checkpoint: Any, tmp_path: Path) -> None:
    """Batches of up to seven: the largest graph is for four, above it steps run eagerly."""
    cases = [tiny(model_type, checkpoint, mode) for model_type in model_types]
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"], case.model
        if mode != "eager":
            assert_graphs_are_whole(result, [4])


@pytest.mark.full("three modes of every model in another dtype; float32 stays; in bfloat16 tower and Gated DeltaNet")
def test_tiny_models_in_bfloat16(checkpoint: Any, tmp_path: Path) -> None:
    assert_close_in_bfloat16("reduce-overhead", checkpoint, tmp_path)


@pytest.mark.full("eager steps and the graph engine; captured graphs stay in this dtype, all modes in float32")
@pytest.mark.parametrize("mode", ["eager", "max-autotune"])
def test_other_modes_in_bfloat16(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_close_in_bfloat16(mode, checkpoint, tmp_path)


def assert_close_in_bfloat16(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    settings = {"dtype": "bfloat16", "attention_backend": "auto"}
    cases = [tiny(model_type, checkpoint, mode, **settings) for model_type in TINY]
    for case in cases:
        case.logprobs = 8
    results = on_npu(cases, tmp_path, allow_fp32_attention=False)
    for case, result in zip(cases, results, strict=True):
        assert_close_at_the_first_divergence(result, on_cpu(case))
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"


def assert_close_at_the_first_divergence(ours: dict[str, Any], reference: dict[str, Any], most: float = 0.25) -> None:
    """Up to and at the first different token the most probable ones have nearly the same log probabilities."""
    for mine, theirs, my_top, their_top in zip(ours["tokens"], reference["tokens"], ours["logprobs"],
                                               reference["logprobs"], strict=True):
        for place in range(len(mine)):
            shared = set(my_top[place]) & set(their_top[place])
            assert len(shared) >= 4, (place, my_top[place], their_top[place])
            worst = max(abs(my_top[place][token] - their_top[place][token]) for token in shared)
            assert worst < most, (place, worst)
            if mine[place] != theirs[place]:
                gap = their_top[place][str(theirs[place])] - their_top[place].get(str(mine[place]), float("-inf"))
                assert gap < most, (place, gap)
                break


@emulated
def test_two_ranks(checkpoint: Any, tmp_path: Path) -> None:
    assert_two_ranks_equal_cpu(["qwen3"], "reduce-overhead", checkpoint, tmp_path)


@emulated
@pytest.mark.full("two ranks once more; of texts they stay here, with pictures on the cpu platform")
def test_two_ranks_with_pictures(checkpoint: Any, tmp_path: Path) -> None:
    assert_two_ranks_equal_cpu(["qwen3_vl"], "reduce-overhead", checkpoint, tmp_path)


@emulated
@pytest.mark.full("eager steps and the graph engine; two ranks stay with captured graphs, beside eager prefills")
@pytest.mark.parametrize("mode", ["eager", "max-autotune"])
def test_two_ranks_in_other_modes(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_two_ranks_equal_cpu(FAST, mode, checkpoint, tmp_path)


def assert_two_ranks_equal_cpu(model_types: Sequence[str], mode: str, checkpoint: Any, tmp_path: Path) -> None:
    cases = [tiny(model_type, checkpoint, mode, tensor_parallel_size=2) for model_type in model_types]
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"]
        assert mode == "eager" or result["graphs"] == "4"


@emulated
def test_a_device_that_lags_behind_and_a_null_block_full_of_nan(checkpoint: Any, tmp_path: Path) -> None:
    assert_lag_and_null_block_change_nothing(["qwen3_vl"], "reduce-overhead", checkpoint, tmp_path)


@emulated
@pytest.mark.full("captured graphs with pictures stay, whose prefills are eager")
@pytest.mark.parametrize(("model_types", "mode"), [(["qwen3"], "reduce-overhead"), (FAST, "eager")])
def test_other_steps_of_a_device_that_lags_behind(model_types: Sequence[str], mode: str, checkpoint: Any,
                                                  tmp_path: Path) -> None:
    assert_lag_and_null_block_change_nothing(model_types, mode, checkpoint, tmp_path)


def assert_lag_and_null_block_change_nothing(model_types: Sequence[str], mode: str, checkpoint: Any,
                                             tmp_path: Path) -> None:
    """Nothing runs before somebody waits: a host that refills a buffer too early shows. Chunks that sample nothing do
    not wait. Whoever reads the null block shows, too."""
    cases = [tiny(model_type, checkpoint, mode, max_num_batched_tokens=40) for model_type in model_types]
    for case in cases:
        case.is_null_block_poisoned = True
    for case, result in zip(cases, on_npu(cases, tmp_path, lazy=True), strict=True):
        assert result["tokens"] == on_cpu(dataclasses.replace(case, is_null_block_poisoned=False))["tokens"]


@emulated
@pytest.mark.full("an older torch_npu's way to captured graphs; that of newer ones stays")
def test_torch_npu_without_npugraph_ex_captures_through_torchair(checkpoint: Any, tmp_path: Path) -> None:
    case = dataclasses.replace(tiny("qwen3", checkpoint, "reduce-overhead"), has_npugraph_ex=False)
    (result,) = on_npu([case], tmp_path)
    assert result["tokens"] == on_cpu(dataclasses.replace(case, has_npugraph_ex=True))["tokens"]
    assert_graphs_are_whole(result, [4])
    assert '"reduce-overhead" mode configuration will be deprecated' in result["stderr"], "torchair says which it is"


@pytest.mark.full("four ranks on two cores; two ranks stay")
@emulated
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_four_ranks(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    case = tiny("qwen3", checkpoint, mode, tensor_parallel_size=4)
    (result,) = on_npu([case], tmp_path, num_devices=4)
    assert result["tokens"] == on_cpu(case)["tokens"]
