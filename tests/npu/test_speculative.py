"""Steps with drafts on the npu platform: the tokens of plain steps on cpu. A token is a row there, in graphs, too."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.families import FAMILIES
from tests.npu.family_cases import emulated
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.oracle.mtp_drafts import QUIET
from tests.oracle.mtp_reference import with_head
from tests.oracle.sliding_configs import SOME_SLIDE

pytestmark = [pytest.mark.npu, pytest.mark.slow]

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
SHAPE = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}, "is_new": {"type": "boolean"}},
         "required": ["colour", "is_new"], "additionalProperties": False}
# Graphs of 4 and 16 rows: up to seven sequences, each with three drafts. Where layers keep a state every step has one.
SIZES, SIZES_OF_STATES = [4, 16], ([4, 16, 32], [4, 16, 40])


def graphs_of(mode: str, sizes: list[int]) -> dict[str, Any]:
    """Settings of a case's decode graphs. Those of the graph engine are compiled anew in each."""
    if mode == "eager":
        return {}
    return {"graph_batch_sizes": sizes} | ({"use_graph_cache": False} if mode == "max-autotune" else {})


def cases_of(mode: str, checkpoint: Any, **settings: Any) -> list[Case]:
    """Looked-up drafts; forced ones; windows of one kind of layer."""
    common = {"graph_mode": mode, "speculative_config": NGRAM, **SMALL, **FLOAT32, **graphs_of(mode, SIZES), **settings}
    plain = str(checkpoint("qwen3", num_hidden_layers=1))
    slides = str(checkpoint("qwen3", sliding_window=37, **SOME_SLIDE["qwen3"]))
    return [
        Case(plain, common, "texts", 7),
        Case(plain, {**common, "speculative_config": {"method": "forced"}}, "texts", 5, max_tokens=40, ignore_eos=False,
             sampling={"structured_outputs": {"json": SHAPE, "disable_any_whitespace": True}}),
        Case(slides, common, "long texts", 5),
    ]


def with_states(mode: str, checkpoint: Any, **settings: Any) -> list[Case]:
    """Looked-up drafts, and those that a schema forces, of a layer with a state and one with attention."""
    of_attention = cases_of(mode, checkpoint, **settings)[:2]
    path = str(checkpoint("qwen3_5_text", **FAMILIES["qwen3_5"].npu[0]))
    cases = [dataclasses.replace(case, model=path, max_tokens=40, settings={**case.settings, **graphs_of(mode, sizes)})
             for case, sizes in zip(of_attention, SIZES_OF_STATES, strict=True)]
    cases[1].settings["speculative_config"] = {"method": "forced", "num_speculative_tokens": 7}
    return cases


def of_head(mode: str, checkpoint: Any, folder: Path, **settings: Any) -> Case:
    """A head that mostly agrees, also over prompts that are cut."""
    path = with_head(checkpoint("qwen3_5_text", **FAMILIES["qwen3_5"].npu[0]), folder / f"head {mode}", quiet=QUIET)
    speculative = {"method": "mtp", "num_speculative_tokens": 3}
    graphs = graphs_of(mode, SIZES)
    return Case(str(path), {"graph_mode": mode, "speculative_config": speculative, **SMALL,
                            "max_num_batched_tokens": 128, **FLOAT32, **graphs, **settings}, "long texts", 5)


def compare(cases: list[Case], tmp_path: Path) -> None:
    kept: Counter[str] = Counter()
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(dataclasses.replace(case))["tokens"], case.settings
        kept[case.model] += result["num_accepted_tokens"]
        if case.settings["graph_mode"] != "eager" and "tensor_parallel_size" not in case.settings:
            sizes = case.settings["graph_batch_sizes"]
            assert_graphs_are_whole(result, sizes)  # ranks count their own
            assert all(num > sizes[-1] for num in result["eager_drafts"]), result["eager_drafts"]
            assert sorted(result["eager_heads"]) == sorted(
                result["eager_drafts"] if case.settings["speculative_config"]["method"] == "mtp" else []), result
    assert all(kept[case.model] > 0 for case in cases), kept


@emulated
def test_tokens_equal_plain_steps_of_the_cpu_platform(checkpoint: Any, tmp_path: Path) -> None:
    """Of a layer with a state and one with attention, in one graph."""
    of_states = dataclasses.replace(with_states("reduce-overhead", checkpoint)[1], count=3)
    of_states.settings |= {"graph_batch_sizes": [12], "speculative_config": {"method": "forced",
                                                                             "num_speculative_tokens": 3}}
    compare([of_states], tmp_path)


@emulated
@pytest.mark.full("eager steps, the graph engine, windows, and drafts that are looked up; forced ones captured stay")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead", "max-autotune"])
def test_tokens_in_every_mode(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    compare([*cases_of(mode, checkpoint), *with_states(mode, checkpoint)], tmp_path)


@emulated
@pytest.mark.full("a head on npu, its own process; heads stay on cpu, and drafts of states on npu")
@pytest.mark.parametrize("mode", ["eager", "reduce-overhead", "max-autotune"])
def test_the_models_own_head(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    compare([of_head(mode, checkpoint, tmp_path)], tmp_path)


@emulated
@pytest.mark.full("two cases in bfloat16; the operator by itself stays (test_gated_delta)")
def test_the_fused_operator_takes_drafts_of_states(checkpoint: Any, tmp_path: Path) -> None:
    """In bfloat16, which rounds alike with and without drafts where a row is computed by itself."""
    drafted = [dataclasses.replace(case, settings={**case.settings, "dtype": "bfloat16", "attention_backend": "auto"})
               for case in with_states("reduce-overhead", checkpoint)]
    plain = [dataclasses.replace(case, settings={**case.settings, "speculative_config": None,
                                                 "graph_batch_sizes": [4, 8]}) for case in drafted]
    results = on_npu([*drafted, *plain], tmp_path, cann_version="9.2.0")
    for ours, theirs in zip(results[:2], results[2:], strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert ours["eager_drafts"] == [], "each ran in a graph"
    assert sum(result["num_accepted_tokens"] for result in results[:2]) > 0


@emulated
@pytest.mark.full("two ranks on two cores; one rank stays")
def test_two_ranks(checkpoint: Any, tmp_path: Path) -> None:
    of_both = (*cases_of("reduce-overhead", checkpoint, tensor_parallel_size=2)[:2],
               *with_states("reduce-overhead", checkpoint, tensor_parallel_size=2))
    compare(list(of_both), tmp_path)


@emulated
@pytest.mark.full("two ranks on two cores; drafts of states stay on one")
def test_two_ranks_with_the_models_own_head(checkpoint: Any, tmp_path: Path) -> None:
    compare([of_head("reduce-overhead", checkpoint, tmp_path, tensor_parallel_size=2)], tmp_path)
