"""Sliding windows on the npu platform give the tokens of the cpu platform: every mode, contexts of several blocks."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.npu.family_cases import assert_close_at_the_first_divergence, emulated
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.oracle.sliding_configs import ALL_SLIDE, FULL, SLIDING

pytestmark = [pytest.mark.npu, pytest.mark.slow]

# Within a block, from one block to the next, and over blocks; layers of two kinds.
MODELS: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": 10, **ALL_SLIDE["mistral"]}),
    ("mistral", {"sliding_window": 130, **ALL_SLIDE["mistral"]}),
    ("qwen3", {"sliding_window": 37, "use_sliding_window": True, "num_hidden_layers": 2,
               "layer_types": [SLIDING, FULL]}),
]


def cases_of(mode: str, checkpoint: Any, models: Any = MODELS, **settings: Any) -> list[Case]:
    """Seven prompts of up to three blocks, in chunks; a chunk of a single token among them."""
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    common = {"graph_mode": mode, **SMALL, "max_num_batched_tokens": 101, **FLOAT32, **graphs, **settings}
    return [Case(str(checkpoint(model_type, **changes)), common, "long texts", 7) for model_type, changes in models]


@emulated
def test_tokens_equal_the_cpu_platform(checkpoint: Any, tmp_path: Path) -> None:
    """Layers of two kinds."""
    _compare("reduce-overhead", checkpoint, tmp_path, MODELS[2:])


@emulated
@pytest.mark.full("every layer slides, within a block and over blocks; layers of two kinds stay")
def test_tokens_where_every_layer_slides(checkpoint: Any, tmp_path: Path) -> None:
    _compare("reduce-overhead", checkpoint, tmp_path, MODELS[:2])


@emulated
@pytest.mark.full("eager steps and the graph engine; windows stay with captured graphs, all modes with dense models")
@pytest.mark.parametrize("mode", ["eager", "max-autotune"])
def test_tokens_in_other_modes(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    _compare(mode, checkpoint, tmp_path)


def _compare(mode: str, checkpoint: Any, tmp_path: Path, models: Any = MODELS) -> None:
    """Batches of up to seven: the largest graph is for four, above it steps run eagerly."""
    cases = cases_of(mode, checkpoint, models)
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"], case.model
        if mode != "eager":
            assert_graphs_are_whole(result, [4])


@pytest.mark.full("two modes; windows stay in float32, bfloat16 with dense models")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
def test_in_bfloat16(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    cases = cases_of(mode, checkpoint, dtype="bfloat16", attention_backend="auto")
    for case in cases:
        case.logprobs = 8
    for case, result in zip(cases, on_npu(cases, tmp_path, allow_fp32_attention=False), strict=True):
        assert_close_at_the_first_divergence(result, on_cpu(case))
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"


@emulated
@pytest.mark.full("two ranks on two cores; dense models stay with two, windows with one")
def test_two_ranks(checkpoint: Any, tmp_path: Path) -> None:
    cases = cases_of("reduce-overhead", checkpoint, tensor_parallel_size=2)[1:]
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"]


@emulated
@pytest.mark.full("both settings again, with windows; they stay for models without (test_npu_settings)")
@pytest.mark.parametrize("changes", [{"capture": "recorded"}, {"decode_attention": "unmasked"}], ids=str)
def test_the_other_ways(changes: dict[str, str], checkpoint: Any, tmp_path: Path) -> None:
    """Lengths that torch_npu is given call by call, and layers without a window whose decode has no mask."""
    cases = cases_of("reduce-overhead", checkpoint)
    variables = {f"NPU_RUNNER_ASCEND_{name.upper()}": value for name, value in changes.items()}
    for case, result in zip(cases, on_npu(cases, tmp_path, **variables), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"]


@emulated
@pytest.mark.full("prompts of one chunk, eagerly; a null block full of NaN stays where nothing slides")
def test_a_null_block_full_of_nan(checkpoint: Any, tmp_path: Path) -> None:
    """Decode reads nothing behind a window; prefill's band goes over it, so the prompts here are of one chunk."""
    cases = cases_of("eager", checkpoint, max_num_batched_tokens=2000)
    for case in cases:
        case.is_null_block_poisoned = True
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(dataclasses.replace(case, is_null_block_poisoned=False))["tokens"]
