"""Mixtures of experts on the npu platform give the tokens of the cpu platform: every mode, one rank and two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu

pytestmark = [
    pytest.mark.npu, pytest.mark.slow,
    pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32: compared in bfloat16"),
]

MODES = ["eager", "reduce-overhead", "max-autotune"]
FAMILIES = ("qwen3_moe", "qwen3_vl_moe")
VARIANTS: dict[str, dict[str, Any]] = {
    "renormalised": {},
    "as the softmax is, dense layers between": {"norm_topk_prob": False, "decoder_sparse_step": 2},
    "one expert": {"num_experts": 1, "num_experts_per_tok": 1},
}


def case(path: Path, mode: str, prompts: str = "texts", count: int = 7, **settings: Any) -> Case:
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    return Case(str(path), {"graph_mode": mode, **SMALL, **FLOAT32, **graphs, **settings}, prompts, count)


def test_tokens_equal_cpu(checkpoint: Any, tmp_path: Path) -> None:
    _compare("reduce-overhead", [], checkpoint, tmp_path)


@pytest.mark.full("three kinds of experts, of texts; experts with pictures stay")
def test_tokens_of_other_experts_equal_cpu(checkpoint: Any, tmp_path: Path) -> None:
    _compare("reduce-overhead", list(VARIANTS), checkpoint, tmp_path)


@pytest.mark.full("eager steps and the graph engine; experts stay with captured graphs, all modes with dense models")
@pytest.mark.parametrize("mode", ["eager", "max-autotune"])
def test_tokens_in_other_modes(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    _compare(mode, list(VARIANTS), checkpoint, tmp_path)


def _compare(mode: str, variants: list[str], checkpoint: Any, tmp_path: Path) -> None:
    cases = [case(checkpoint("qwen3_moe", head_dim=64, **VARIANTS[name]), mode) for name in variants]
    cases.append(case(checkpoint("qwen3_vl_moe"), mode, "pictures", 6))
    for name, one, result in zip([*variants, "pictures"], cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(one)["tokens"], name
        if mode != "eager":
            assert_graphs_are_whole(result, [4])


@pytest.mark.full("two ranks of every mode; dense models stay with two, experts with one")
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    one = case(checkpoint("qwen3_moe", head_dim=64), mode, tensor_parallel_size=2)
    (result,) = on_npu([one], tmp_path)
    assert result["tokens"] == on_cpu(one)["tokens"]
    assert mode == "eager" or result["graphs"] == "4"
