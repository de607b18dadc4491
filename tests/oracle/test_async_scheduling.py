"""A step planned while the one before runs brings what it brings alone: the oracle is one step at a time."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import EngineStats, RequestOutput
from tests import full_set
from tests.full_set import only_full
from tests.oracle.mixed_requests import (
    DRAWN,
    PARAMS,
    SETTINGS,
    assert_logprobs_equal,
    failing_once,
    few_blocks,
    prompts_of,
    without_logprobs,
)
from tests.oracle.running import greedy, need_devices, runner_of

MODELS = ["qwen3", "qwen3_vl", "qwen3_5", "qwen3_moe"]


def run(path: Path, model_type: str, platform_name: str, ahead: bool, *,
        free: bool = True, **settings: Any) -> tuple[list[RequestOutput], EngineStats]:
    """Each prompt with several kinds of parameters; not `free`: all go on to their max_tokens."""
    with LLM(path, platform=platform_name, async_scheduling=ahead, **SETTINGS, **settings) as llm:
        prompts = prompts_of(llm, model_type)
        pairs = list(itertools.islice(itertools.product(PARAMS, prompts), 0, None, 4 if full_set.is_fast else 2))
        params = [each if free else greedy(4 + index % 9) for index, (each, _) in enumerate(pairs)]
        outputs = llm.generate([prompt for _, prompt in pairs], params)
        stats = llm.stats()
    assert stats.kv_blocks_used == 0
    return outputs, stats


@pytest.mark.parametrize("model_type", [
    "qwen3_5", *only_full("what differs is within a step; a model with images, states and attention stays", "qwen3",
                          "qwen3_vl", "qwen3_moe")])
def test_every_answer_is_that_of_one_step_at_a_time(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    settings = few_blocks(path, platform_name) | {"enable_prefix_caching": False}
    (expected, _), (found, stats) = (run(path, model_type, platform_name, ahead, **settings) for ahead in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert without_logprobs(ours) == without_logprobs(theirs)
        assert ours.num_prompt_tokens == theirs.num_prompt_tokens
    assert sum(assert_logprobs_equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)) > 20
    reasons = {completion.finish_reason for output in found for completion in output.completions}
    assert reasons == {"stop", "length"}
    assert stats.num_preemptions > 0 or platform_name != "cpu" or model_type == "qwen3_vl"


@pytest.mark.parametrize("model_type", ["qwen3_5", *only_full("images alone; images beside states stay", "qwen3_vl")])
def test_where_nothing_ends_early_hits_and_preemptions_are_the_same(model_type: str, checkpoint: Any,
                                                                    platform_name: str) -> None:
    path: Path = checkpoint(model_type)
    settings = few_blocks(path, platform_name)
    (expected, one), (found, two) = (run(path, model_type, platform_name, ahead, free=False, **settings)
                                     for ahead in (False, True))
    assert [without_logprobs(output) for output in found] == [without_logprobs(output) for output in expected]
    assert [output.num_cached_tokens for output in found] == [output.num_cached_tokens for output in expected]
    for name in ("num_preemptions", "prefix_cache_queries", "prefix_cache_hits", "num_prefill_steps",
                 "num_prefill_tokens", "num_decode_steps", "num_decode_tokens", "state_snapshots_taken",
                 "state_snapshots_used", "state_snapshots_evicted", "vision_cache_hits", "vision_cache_misses"):
        assert getattr(one, name) == getattr(two, name), name


@pytest.mark.slow
@pytest.mark.full("two ranks start; their prompts are scored with steps under way (test_prompt_logprobs.py)")
@pytest.mark.ranks
def test_two_ranks_with_steps_under_way_answer_as_one_without(checkpoint: Any, platform_name: str) -> None:
    need_devices(platform_name)
    path: Path = checkpoint("qwen3")
    expected, _ = run(path, "qwen3", platform_name, False)
    found, _ = run(path, "qwen3", platform_name, True, tensor_parallel_size=2)
    assert [without_logprobs(output) for output in found] == [without_logprobs(output) for output in expected]


@pytest.mark.parametrize("model_type", ["qwen3", *only_full(
    "layers with states; their steps are made again with drafts (tests/runner/test_drafts_of_states.py)",
    "qwen3_5_text")])
def test_memory_that_runs_out_while_a_step_is_under_way_changes_no_answer(model_type: str, checkpoint: Any,
                                                                          platform_name: str) -> None:
    """In the forward of a later step, in its sampler, and while a result is fetched."""
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, async_scheduling=True, **SETTINGS) as llm:
        prompts = prompts_of(llm, model_type)
        params = [DRAWN.replace(max_tokens=12, ignore_eos=True)] * len(prompts)
        expected = [output.token_ids for output in llm.generate(prompts, params)]
        for name in ("launch", "sample", "_output"):
            for at_call in (2, 9) if full_set.is_fast else (2, 3, 9):
                num_calls = failing_once(runner_of(llm).steps, name, at_call)
                assert [output.token_ids for output in llm.generate(prompts, params)] == expected
                assert num_calls[0] > at_call
                delattr(runner_of(llm).steps, name)
        assert llm.stats().kv_blocks_used == 0


def test_an_aborted_request_leaves_the_others_alone(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5_text")
    found: dict[bool, list[list[int]]] = {}
    for ahead in (False, True):
        with LLM(path, platform=platform_name, async_scheduling=ahead, **SETTINGS) as llm:
            engine = llm.engine
            for index in range(12):
                engine.add_request(str(index), prompts_of(llm, "qwen3_5_text")[index % 4], greedy(6 + index))
            done: dict[str, RequestOutput] = {}
            for number in itertools.count():
                if number in (2, 5, 7):
                    engine.abort_request(str(number))
                done |= {output.request_id: output for output in engine.step()}
                if not engine.has_unfinished_requests():
                    break
            assert {name for name, output in done.items() if output.finish_reason == "abort"} <= {"2", "5", "7"}
            found[ahead] = [done[str(index)].token_ids for index in range(12) if index not in (2, 5, 7)]
            assert engine.stats().kv_blocks_used == 0
    assert found[True] == found[False]


def test_logits_that_are_not_numbers_end_their_row_alone(checkpoint: Any, platform_name: str) -> None:
    """The step behind it has begun by then, with some token in that row."""
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, async_scheduling=True, **SETTINGS) as llm:
        prompts = prompts_of(llm, "qwen3")
        expected = llm.generate(prompts, greedy(10))
        steps: Any = runner_of(llm).steps
        sample, num_steps = steps.sample, itertools.count()

        def spoil(step: Any, logits_BV: torch.Tensor) -> Any:
            if next(num_steps) == 4:
                logits_BV[1] = torch.nan  # in their place: what was recorded over a graph's logits reads no others
            return sample(step, logits_BV)

        steps.sample = spoil
        found = llm.generate(prompts, greedy(10))
        reasons = [output.finish_reason for output in found]
        assert sorted(reasons) == ["error", *["length"] * (len(prompts) - 1)]
        spoilt = reasons.index("error")
        for index, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if index == spoilt:
                assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)]
                assert 0 < len(ours.token_ids) < 10
            else:
                assert ours.token_ids == theirs.token_ids


def test_the_setting_is_checked() -> None:
    with pytest.raises(ConfigError, match="async_scheduling: 2 is neither true nor false"):
        RunnerConfig.from_keywords(model="x", async_scheduling=2)
