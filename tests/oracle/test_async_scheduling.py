"""A step planned while the one before runs brings what it brings alone: the oracle is one step at a time."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests import full_set
from tests.families import sees_images
from tests.full_set import only_full
from tests.oracle.running import greedy, need_devices, runner_of
from tests.oracle.test_qwen3_vl import LAYOUTS, make_prompts

BASE = SamplingParams(temperature=0.0, max_tokens=14)
DRAWN = BASE.replace(temperature=1.0, seed=11)
PARAMS = [
    BASE.replace(ignore_eos=True),
    DRAWN,
    DRAWN.replace(top_p=0.8, top_k=20, min_p=0.02, n=3),
    DRAWN.replace(repetition_penalty=1.4, frequency_penalty=0.5, presence_penalty=0.3),
    BASE.replace(min_tokens=6, stop_token_ids=[5, 9, 17, 40, 77]),
    DRAWN.replace(stop=["a", "e", "picture"], min_tokens=3),
    DRAWN.replace(bad_words=("a", "of the", "which")),
    DRAWN.replace(logit_bias={7: 6.0, 8: -50.0}),
    DRAWN.replace(logprobs=3),
    BASE.replace(max_tokens=1),
    BASE.replace(max_tokens=2, logprobs=0, repetition_penalty=1.2, bad_words=("the picture",)),
]
WORDS = ["a", "b c", "which of the pictures ", "the picture of a circle " * 4, "e f g " * 18, "which " * 30]
MOST_PROMPT_TOKENS = 220
MODELS = ["qwen3", "qwen3_vl", "qwen3_5", "qwen3_moe"]
# Few blocks and small steps: prompts are cut, through their images too, and sequences are preempted.
SETTINGS: dict[str, Any] = {"max_num_seqs": 6, "max_model_len": 256, "dtype": "float32", "max_num_batched_tokens": 64}


def prompts_of(llm: LLM, model_type: str) -> list[PromptInputs]:
    prompts = [llm.engine.processor.from_text(text) for text in WORDS]
    if sees_images(model_type):
        prompts += make_prompts(llm, LAYOUTS)[0]
    return [prompt for prompt in prompts if len(prompt.token_ids) < MOST_PROMPT_TOKENS][-6:]


def few_blocks(path: Path, platform_name: str) -> dict[str, Any]:
    """A cache that holds the longest sequence and not much more."""
    if platform_name != "cpu":
        return {}
    with LLM(path, platform=platform_name, block_size=16, kv_cache_bytes=1 << 20, **SETTINGS) as llm:
        per_block = (1 << 20) // llm.engine.info.num_blocks
    return {"block_size": 16, "kv_cache_bytes": 18 * per_block}


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


def without_logprobs(output: RequestOutput) -> list[Any]:
    return [replace(completion, logprobs=None) for completion in output.completions]


def assert_logprobs_equal(ours: RequestOutput, theirs: RequestOutput, tolerance: float = 2e-5) -> int:
    """Returns for how many positions there are any."""
    num = 0
    for mine, other in zip(ours.completions, theirs.completions, strict=True):
        assert (mine.logprobs is None) == (other.logprobs is None)
        if mine.logprobs is not None and other.logprobs is not None:
            for one, two in zip(mine.logprobs, other.logprobs, strict=True):
                assert one.sampled.token_id == two.sampled.token_id
                assert [top.token_id for top in one.top] == [top.token_id for top in two.top]
                values = [[each.logprob for each in (position.sampled, *position.top)] for position in (one, two)]
                assert values[0] == pytest.approx(values[1], abs=tolerance)
                num += 1
    return num


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


def failing_once(owner: Any, name: str, at_call: int) -> list[int]:
    """The call of that number runs out of memory; returns where the calls are counted."""
    real, num_calls = getattr(owner, name), [0]

    def call(*arguments: Any) -> Any:
        num_calls[0] += 1
        if num_calls[0] == at_call:
            raise MemoryError("can't allocate memory")
        return real(*arguments)

    setattr(owner, name, call)
    return num_calls


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
