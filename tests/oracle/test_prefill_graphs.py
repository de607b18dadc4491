"""Recorded prefills give the tokens of transformers, whatever is padded and whatever lies in the cache.

On cuda these are captured graphs. On the cpu platform a stand-in runs the same function over the same buffers, so what
is under test is what surrounds a graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM
from npu_runner.errors import ConfigError
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.graphs import GraphResourceError, Recorder
from npu_runner.runner.dummy import dummy_prefill
from npu_runner.runner.prefill_graphs import PrefillBucket
from tests.full_set import only_full
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.returned_states import assert_states
from tests.oracle.running import SMALL, UncompiledGraphs, assert_equals_reference, greedy, runner_of
from tests.oracle.scheduled_prompts import text_prompts
from tests.oracle.sliding_configs import SOME_SLIDE
from tests.oracle.tiled_attention import TiledAttention

GRAPHS: dict[str, Any] = {"graph_mode": "reduce-overhead", "graph_batch_sizes": (2, 8)}
SLIDES = {"sliding_window": 10, **SOME_SLIDE["qwen3"]}


class Repeating(UncompiledGraphs):
    """`room`: for so many graphs of prefills."""

    def __init__(self, room: int = 100):
        self.room = room

    def recorder(self) -> Recorder:
        return self._record

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.room -= 1
        if self.room < 0:
            raise GraphResourceError("no room for one more")
        return run


@pytest.fixture
def used(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often a graph of each size has run."""
    if platform_name == "cpu":
        monkeypatch.setattr(CpuPlatform, "attention_backends", {"torch": AttentionFacts(records_prefills=True)})
        monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: Repeating())
        monkeypatch.setattr("npu_runner.platforms.cpu.attention.CpuAttention", TiledAttention)
    elif platform_name != "cuda":
        pytest.skip(f"{platform_name} records no prefills")
    counts: Counter[int] = Counter()
    run = PrefillBucket.run

    def counted(bucket: PrefillBucket) -> Tensor:
        counts[bucket.batch_size] += 1
        return run(bucket)

    monkeypatch.setattr(PrefillBucket, "run", counted)
    return counts


def spoil_the_null_block(llm: LLM) -> None:
    """What lets it count shows."""
    with torch.inference_mode():
        for cache in (runner_of(llm).k_cache, runner_of(llm).v_cache):
            cache[:, 0] = 1e4


@pytest.mark.parametrize(("model_type", "changes"), [("qwen3", SLIDES), *only_full(
    "text of a model that sees; pictures stay below", ("qwen3_vl", {}))], ids=["slides", "vl"])
def test_padded_prefills_equal_the_reference(model_type: str, changes: dict[str, Any], checkpoint: Any,
                                             platform_name: str, used: Counter[int]) -> None:
    """Several prompts in a step, chunks behind others, and what a cached prefix leaves of a prompt."""
    path: Path = checkpoint(model_type, **changes)
    with LLM(path, platform=platform_name, graph_prefill_sizes=(4, 24, 40), max_num_batched_tokens=40, block_size=4,
             **GRAPHS, **SMALL) as llm:
        assert llm.engine.info.graphs == "2, 8; prefills of 4, 24, 40 tokens"
        spoil_the_null_block(llm)
        used.clear()
        assert_equals_reference(path, llm, text_prompts(llm))
        together = llm.generate(text_prompts(llm), greedy())
        for prompt, output in zip(text_prompts(llm), together, strict=True):
            (alone,) = llm.generate([prompt], greedy())
            assert alone.num_cached_tokens == len(prompt.token_ids) - 1
            assert alone.token_ids == output.token_ids
        assert set(used) == {4, 24, 40}


def test_hidden_states_are_those_of_eager_prefills(checkpoint: Any, platform_name: str, used: Counter[int]) -> None:
    """Prefills whose states are wanted run eagerly, others in their graphs; decode graphs return states of every row.
    """
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, graph_prefill_sizes=(40,), hidden_state_layers=(1, -1), block_size=4,
             max_num_batched_tokens=40, **GRAPHS, **SMALL) as llm:
        prompts = text_prompts(llm)[:4]
        used.clear()
        plain = llm.generate(prompts, greedy())
        num_prefills = used.total()
        assert num_prefills
        asked = greedy().replace(return_hidden_states=True)
        for prompt, expected, result in zip(prompts, plain, llm.generate(prompts, asked), strict=True):
            assert result.token_ids == expected.token_ids
            assert_states(path, prompt.token_ids, result, (1, -1))
        assert used.total() == num_prefills


@pytest.mark.full("the prefill of experts is no other in a graph; the layers around it stay in the fast set")
def test_padded_prefills_of_experts(checkpoint: Any, platform_name: str, used: Counter[int]) -> None:
    test_padded_prefills_equal_the_reference("qwen3_moe", {}, checkpoint, platform_name, used)


def test_pictures_go_without_and_the_text_behind_them_has_three_positions(
        checkpoint: Any, platform_name: str, used: Counter[int]) -> None:
    """What a cached picture leaves of a prompt is text."""
    path: Path = checkpoint("qwen3_vl")
    with LLM(path, platform=platform_name, graph_prefill_sizes=(16, 64), block_size=4, **GRAPHS, **SMALL) as llm:
        prompts, images = make_prompts(llm, LAYOUTS[1:3])
        used.clear()
        llm.generate(prompts, greedy(1))
        assert not used
        assert_equals_reference(path, llm, prompts, images)
        assert used


def test_log_probabilities_of_prompts_are_those_of_eager_steps(checkpoint: Any, platform_name: str,
                                                               used: Counter[int]) -> None:
    path: Path = checkpoint("qwen3")
    found = []
    for sizes in ((64,), (0,)):
        with LLM(path, platform=platform_name, graph_prefill_sizes=sizes, **GRAPHS, **SMALL) as llm:
            params = replace(greedy(3), prompt_logprobs=1)
            outputs = llm.generate(text_prompts(llm)[:3], params)
            found.append([[list(each) for each in output.prompt_logprobs[1:]] for output in outputs])
    assert found[0] == found[1]


def test_without_room_for_all_those_that_fit_are_kept(checkpoint: Any, platform_name: str, used: Counter[int],
                                                      monkeypatch: pytest.MonkeyPatch,
                                                      caplog: pytest.LogCaptureFixture) -> None:
    if platform_name != "cpu":
        pytest.skip("a device has room for all of them")
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: Repeating(room=2))
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, graph_prefill_sizes=(4, 12, 40), **GRAPHS, **SMALL) as llm:
        assert llm.engine.info.graphs == "2, 8; prefills of 12, 40 tokens"
        assert "without the graph of prefills of 4 tokens (no room for one more)" in caplog.text
        prefills = runner_of(llm).steps.prefills
        assert prefills is not None
        settings = {"block_size": 16, "uses_mrope": False}
        fits, longer, more = (prefills.find(dummy_prefill(*size, **settings)) for size in ((3, 1), (41, 1), (12, 9)))
        assert fits is not None
        assert fits.batch_size == 12
        assert longer is None
        assert more is None, "8 sequences run at most"


def test_no_default_size_is_above_what_prompts_can_have(checkpoint: Any, platform_name: str,
                                                        used: Counter[int]) -> None:
    path: Path = checkpoint("qwen3")
    settings = {**GRAPHS, **SMALL, "graph_batch_sizes": (1,), "max_num_seqs": 1, "max_model_len": 72}
    with LLM(path, platform=platform_name, **settings) as llm:
        prefills: Any = runner_of(llm).steps.prefills
        assert prefills.describe() == "16, 32, 64"
        assert_equals_reference(path, llm, text_prompts(llm)[:2])


@pytest.mark.parametrize(("settings", "problem"), [
    ({"graph_mode": "eager"}, "has no use in eager mode"),
    ({**GRAPHS, "max_num_batched_tokens": 32}, "no step has more than 32 tokens, by max_num_batched_tokens"),
    ({**GRAPHS, "graph_batch_sizes": (1,), "max_num_seqs": 1, "max_model_len": 32}, "no step has more than 32 tokens"),
    ({**GRAPHS, "attention_backend": "other"}, "attention_backend 'other'"),
])
def test_sizes_that_nothing_records_are_refused(settings: dict[str, Any], problem: str, checkpoint: Any,
                                                platform_name: str, used: Counter[int]) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(checkpoint("qwen3"), platform=platform_name, graph_prefill_sizes=(40,), **settings)


def test_models_with_states_and_other_platforms_have_none(checkpoint: Any, platform_name: str) -> None:
    settings = {"platform": platform_name, "graph_mode": "reduce-overhead", "graph_prefill_sizes": (40,)}
    with pytest.raises(ConfigError, match=r"graph_prefill_sizes \(40,\): .*are not recorded|records no prefills"):
        LLM(checkpoint("qwen3_5_text"), **settings)
