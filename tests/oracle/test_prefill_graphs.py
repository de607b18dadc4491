"""Recorded prefills give the tokens of transformers, whatever is padded and whatever lies in the cache.

On cuda these are captured graphs. On the cpu platform a stand-in runs the same function over the same buffers, so what
is under test is what surrounds a graph.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner import LLM, PoolingParams
from npu_runner.errors import ConfigError
from npu_runner.layers.parallel import TensorParallel
from npu_runner.platforms.cpu.devices import CpuMemory
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.graphs import GraphResourceError, Recorder
from npu_runner.runner.dummy import dummy_prefill
from npu_runner.runner.prefill_graphs import PrefillBucket
from tests.full_set import only_full
from tests.oracle import reference
from tests.oracle.embedding_checkpoints import assert_same, expected_vector
from tests.oracle.image_prompts import LAYOUTS, make_prompts
from tests.oracle.returned_states import assert_states
from tests.oracle.running import SMALL, UncompiledGraphs, assert_equals_reference, greedy, runner_of
from tests.oracle.scheduled_prompts import text_prompts
from tests.oracle.sliding_configs import SOME_SLIDE
from tests.oracle.tiled_attention import TiledAttention

GRAPHS: dict[str, Any] = {"graph_mode": "reduce-overhead", "graph_batch_sizes": (2, 8)}
SLIDES = {"sliding_window": 10, **SOME_SLIDE["qwen3"]}


class Repeating(UncompiledGraphs):
    """There is no memory for the graphs of prefills with these numbers, the largest one's is 0."""

    def __init__(self, refused: Sequence[int] = ()):
        self.refused = refused
        self.count = 0

    def recorder(self) -> Recorder:
        return self._record

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.count += 1
        if self.count - 1 in self.refused:
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


@pytest.mark.parametrize(("refused", "recorded", "instead"), [
    ((2,), "12, 40", {4: "are padded to 12 tokens"}), ((0,), "4, 12", {40: "run eagerly"}),
    ((0, 1, 2), "none", dict.fromkeys((4, 12, 40), "run eagerly"))], ids=["smallest", "largest", "all"])
def test_a_size_without_memory_leaves_the_others(
        refused: tuple[int, ...], recorded: str, instead: dict[int, str], checkpoint: Any, platform_name: str,
        used: Counter[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if platform_name != "cpu":
        pytest.skip("a device has room for all of them")
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: Repeating(refused))
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, graph_prefill_sizes=(4, 12, 40), **GRAPHS, **SMALL) as llm:
        assert llm.engine.info.graphs == f"2, 8; prefills of {recorded} tokens"
        for size, what in instead.items():
            assert f"without the graph of prefills of {size} tokens (no room for one more): such prefills {what}" in (
                caplog.text)
        assert_equals_reference(path, llm, text_prompts(llm)[:2])


def test_graphs_hold_no_more_tokens_or_prompts_than_they_have_room_for(checkpoint: Any, platform_name: str,
                                                                       used: Counter[int]) -> None:
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, graph_prefill_sizes=(12, 40), **GRAPHS, **SMALL) as llm:
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


LONG: dict[str, Any] = {**GRAPHS, "max_num_batched_tokens": 1400, "max_num_seqs": 100, "max_model_len": 256,
                        "dtype": "float32", "enable_prefix_caching": False}


def many_prompts(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(5, 290, length).tolist() for length in rng.integers(8, 22, count)]


def test_a_long_graph_has_room_for_all_prompts_of_a_step(checkpoint: Any, platform_name: str,
                                                         used: Counter[int]) -> None:
    """More than the 64 of a short one; the ledger names sizes, bytes and seconds."""
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, **LONG) as llm:
        info = llm.engine.info
        assert info.graphs.endswith("896, 1024, 1280, 1400 tokens")
        assert re.search(r"graphs of prefills of 1280, 1400 tokens took .*B, and [\d.]+ s of the start: launching one "
                         r"of 1400 takes [\d.]+ of [\d.]+ ms", info.ledger)
        assert ("graphs of long prefills" in info.ledger) == (platform_name == "cuda"), "where memory is measured"
        prefills: Any = runner_of(llm).steps.prefills
        assert prefills.long_cost[1] > 0
        spoil_the_null_block(llm)
        used.clear()
        prompts = many_prompts(90)
        outputs = llm.generate(prompts, greedy(2))
        assert set(used) & {1280, 1400}
        for prompt, output in zip(prompts[:70], outputs, strict=False):
            assert output.token_ids == reference.generate(path, prompt, [], max_new_tokens=2)[0]


@pytest.mark.parametrize(("name", "value", "sizes", "reason", "said"), [
    ("_LEAST_SHARE", 1.5, "", "no graphs of long prefills: launching one of 1280 takes", "none (launching one of 1280"),
    ("MOST_BYTES", 20 << 20, ", 1280", "1280 tokens took .*: launching one of 1280 takes",
     "none (those of up to 1400 tokens would need 32.0 MiB)")], ids=["launches", "bytes"])
def test_prefills_that_are_launched_fast_or_need_much_memory_stay_eager(
        name: str, value: float, sizes: str, reason: str, said: str, checkpoint: Any, platform_name: str,
        used: Counter[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    if platform_name != "cpu":
        pytest.skip("the bytes are those of graphs alone, without what a step holds")
    caplog.set_level("INFO")
    monkeypatch.setattr(f"npu_runner.runner.long_prefills.{name}", value)
    with LLM(checkpoint("qwen3"), platform=platform_name, **LONG) as llm:
        assert llm.engine.info.graphs.endswith(f"896, 1024{sizes} tokens")
        assert re.search(reason, llm.engine.info.ledger)
        llm.generate(many_prompts(90), greedy(1))
        assert bool(used[1280]) == bool(sizes)
    assert f"long prefills to record: {said}" in caplog.text


@pytest.mark.parametrize(("free_bytes", "sizes"), [(125 << 20, ", 1280"), (120 << 20, "")])
def test_without_memory_for_a_long_graph_those_are_tried_that_may_fit(
        free_bytes: int, sizes: str, checkpoint: Any, platform_name: str, used: Counter[int],
        monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A graph needs at least what an eager prefill held: here 135 MiB for 1400 tokens. Short ones are always tried."""
    if platform_name != "cpu":
        pytest.skip("a device has room for all of them")
    graphs = Repeating([0])
    monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: graphs)
    monkeypatch.setattr("npu_runner.runner.long_prefills._measure", lambda *given, **settings: (1.0, 1.0, 135 << 20))
    whole = CpuMemory.free_bytes
    monkeypatch.setattr(CpuMemory, "free_bytes", lambda self: free_bytes if graphs.count else whole(self))
    with LLM(checkpoint("qwen3"), platform=platform_name, **LONG) as llm:
        assert llm.engine.info.graphs.endswith(f"896, 1024{sizes} tokens")
        tried = graphs.count
    assert ("1280 tokens (less than it needs is free)" in caplog.text) == (not sizes)
    assert tried == 1 + len(llm.engine.info.graphs.split("prefills of ")[1].split(","))


def test_ranks_record_the_same_long_prefills(checkpoint: Any, platform_name: str, used: Counter[int],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """A size that another rank is not for is left out here, too."""
    others = iter([1, 0, 1])

    def minimum(self: TensorParallel, value: int, device: torch.device) -> int:
        return min(value, next(others)) if value == 1 else value

    monkeypatch.setattr(TensorParallel, "minimum", minimum)
    with LLM(checkpoint("qwen3"), platform=platform_name, **{**LONG, "max_num_batched_tokens": 1600}) as llm:
        assert llm.engine.info.graphs.endswith("1024, 1280, 1536 tokens")


def test_pooled_prompts_are_recorded(checkpoint: Any, platform_name: str, used: Counter[int]) -> None:
    """The vectors are transformers', also cut ones, chunks and states of all tokens, which go without. Settings that an
    output compares are those of an eager run: outputs begun eagerly go on."""
    path: Path = checkpoint("qwen3")
    settings = {"runner": "pooling", "block_size": 4, "max_num_batched_tokens": 48, "platform": platform_name, **SMALL}
    with LLM(path, enforce_eager=True, **settings) as llm:
        assert llm.engine.info.graphs == "eager"
        eager = llm.engine.describe()
    with LLM(path, graph_mode="reduce-overhead", graph_prefill_sizes=(16, 48), **settings) as llm:
        assert llm.engine.info.graphs == "none; prefills of 16, 48 tokens"
        assert llm.engine.describe() == eager
        spoil_the_null_block(llm)
        used.clear()
        prompts = [prompt[:length] for prompt, length in zip(many_prompts(8), (5, 1, 20, 12, 7, 17, 9, 3), strict=True)]
        prompts.append([*prompts[2], *prompts[5], *prompts[3]] * 2)
        asked = [None, 1, 7, 64, 32, None, 5, 63, None]
        for _ in ("cold", "warm"):
            results = llm.embed(prompts, [PoolingParams(dimensions=dimensions) for dimensions in asked])
            for result, prompt, dimensions in zip(results, prompts, asked, strict=True):
                assert_same(result.embedding, expected_vector(path, prompt, dimensions=dimensions))
        assert set(used) == {16, 48}
        assert llm.stats().num_decode_steps == 0


@pytest.mark.parametrize(("settings", "problem"), [
    ({"graph_mode": "eager"}, "has no use in eager mode"),
    ({**GRAPHS, "max_num_batched_tokens": 32}, "no step has more than 32 tokens, by max_num_batched_tokens"),
    ({**GRAPHS, "graph_batch_sizes": (1,), "max_num_seqs": 1, "max_model_len": 32}, "no step has more than 32 tokens"),
    ({**GRAPHS, "attention_backend": "other"}, "attention_backend 'other'"),
    ({**GRAPHS, "runner": "pooling"}, r"graph_batch_sizes \(2, 8\): the model pools its prompts, nothing is decoded"),
])
def test_sizes_that_nothing_records_are_refused(settings: dict[str, Any], problem: str, checkpoint: Any,
                                                platform_name: str, used: Counter[int]) -> None:
    with pytest.raises(ConfigError, match=problem):
        LLM(checkpoint("qwen3"), platform=platform_name, graph_prefill_sizes=(40,), **settings)


def test_models_with_states_and_other_platforms_have_none(checkpoint: Any, platform_name: str) -> None:
    settings = {"platform": platform_name, "graph_mode": "reduce-overhead", "graph_prefill_sizes": (40,)}
    with pytest.raises(ConfigError, match=r"graph_prefill_sizes \(40,\): .*are not recorded|records no prefills"):
        LLM(checkpoint("qwen3_5_text"), **settings)
