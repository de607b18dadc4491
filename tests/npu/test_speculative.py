"""Steps with drafts on the npu platform: the tokens of plain steps on cpu. A token is a row there, in graphs, too."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.npu.test_families import emulated
from tests.oracle.test_sliding_window import SOME_SLIDE

pytestmark = [pytest.mark.npu, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SHAPE = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "is_new": {"type": "boolean"}},
         "required": ["colour", "is_new"], "additionalProperties": False}
# Graphs of 4 and 16 rows: up to seven sequences, each with three drafts.
SIZES = [4, 16]


def cases_of(mode: str, checkpoint: Any, **settings: Any) -> list[Case]:
    """Looked-up drafts; forced ones; windows of one kind of layer."""
    graphs: dict[str, Any] = {} if mode == "eager" else {"graph_batch_sizes": SIZES}
    if mode == "max-autotune":
        graphs["use_graph_cache"] = False
    common = {"graph_mode": mode, "speculative_config": NGRAM, **SMALL, **FLOAT32, **graphs, **settings}
    plain, slides = str(checkpoint("qwen3")), str(checkpoint("qwen3", sliding_window=37, **SOME_SLIDE["qwen3"]))
    return [
        Case(plain, common, "texts", 7),
        Case(plain, {**common, "speculative_config": {"method": "forced"}}, "texts", 5, max_tokens=40, ignore_eos=False,
             sampling={"structured_outputs": {"json": SHAPE, "disable_any_whitespace": True}}),
        Case(slides, common, "long texts", 5),
    ]


def compare(cases: list[Case], tmp_path: Path) -> None:
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(dataclasses.replace(case))["tokens"], case.settings
        assert result["num_accepted_tokens"] > 0, "drafts were kept"
        if case.settings["graph_mode"] != "eager" and "tensor_parallel_size" not in case.settings:
            assert_graphs_are_whole(result, SIZES)  # counted in this process; ranks have theirs


@emulated
def test_tokens_equal_plain_steps_of_the_cpu_platform(checkpoint: Any, tmp_path: Path) -> None:
    compare(cases_of("reduce-overhead", checkpoint)[:2], tmp_path)


@emulated
@pytest.mark.full("eager steps, the graph engine and windows; captured graphs stay")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead", "max-autotune"])
def test_tokens_in_every_mode(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    compare(cases_of(mode, checkpoint), tmp_path)


@emulated
@pytest.mark.full("two ranks on two cores; one rank stays")
def test_two_ranks(checkpoint: Any, tmp_path: Path) -> None:
    compare(cases_of("reduce-overhead", checkpoint, tensor_parallel_size=2)[:2], tmp_path)
