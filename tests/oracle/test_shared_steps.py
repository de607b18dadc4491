"""Prompts that begin alike and n answers of one prompt, all in one step: the tokens are transformers', and each shared
block is computed once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.families import FAMILIES, sees_images
from tests.full_set import only_full
from tests.oracle.image_prompts import make_prompts
from tests.oracle.running import SMALL, assert_equals_reference, need_devices, runner_of
from tests.oracle.tiny_checkpoints import VOCAB_SIZE
from tests.runner.failing_steps import failing, failing_behind_the_forward, poison_of, raise_at_poison

# Of each family, but for the decoders that others have within them.
MODELS: dict[str, dict[str, Any]] = {
    **{name: {} for name in FAMILIES if not name.endswith("_text")}, "mistral": {"sliding_window": 10}}
SHARING = ("mistral", "qwen3_5")
"""Blocks, windows; images, states."""
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=8, ignore_eos=True, n=3)


def alike(llm: LLM, model_type: str) -> tuple[list[PromptInputs], list[list[Any]]]:
    """The same prompt three times, then prompts that part from it at several places."""
    if sees_images(model_type):
        return make_prompts(llm, ["t4t1t", "t4t1t", "t4t1t", "t4t", "t4t2", "t", "t43t"])
    words = "which of the pictures shows a circle and what colour is it " * 4
    texts = [words] * 3 + [words + "or not", words + "and why", words[:100], words[:40] + "b"]
    return [llm.engine.processor.from_text(text) for text in texts], [[] for _ in texts]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.completions] for output in outputs]


@pytest.mark.parametrize("model_type", [
    *SHARING, *only_full("what is shared are blocks and states: a family of each kind stays",
                         *(name for name in MODELS if name not in SHARING))])
def test_prompts_that_begin_alike_and_arrive_together(model_type: str, checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint(model_type, **MODELS[model_type])
    with LLM(path, platform=platform_name, block_size=4, max_num_batched_tokens=1024, **SMALL) as llm:
        prompts, images = alike(llm, model_type)
        before = llm.stats()
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1))
        after = llm.stats()
        all_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        assert after.num_prefill_tokens - before.num_prefill_tokens <= all_tokens * 0.6
        assert after.num_prefill_steps - before.num_prefill_steps == (2 if FAMILIES[model_type].has_states else 1)
    with LLM(path, platform=platform_name, block_size=4, max_num_batched_tokens=1024, **SMALL) as llm:
        assert_equals_reference(path, llm, prompts, images)


@pytest.mark.parametrize("model_type", ["qwen3_5", *only_full(
    "blocks, windows and images by themselves; all but windows are in one that stays", "qwen3", "mistral", "qwen3_vl")])
def test_drawn_answers_of_one_prompt_are_those_of_prompts_computed_apart(model_type: str, checkpoint: Any,
                                                                         platform_name: str) -> None:
    path: Path = checkpoint(model_type, **MODELS[model_type])
    found = []
    for is_shared in (False, True):
        with LLM(path, platform=platform_name, block_size=4, enable_prefix_caching=is_shared,
                 max_num_batched_tokens=1024, **SMALL) as llm:
            prompts, _ = alike(llm, model_type)
            found.append(tokens_of(llm.generate(prompts, DRAWN)))
    assert found[0] == found[1]


def test_eight_answers_of_a_prompt_compute_it_once_and_one_token_each(checkpoint: Any, platform_name: str) -> None:
    settings = {**SMALL, "max_model_len": 640, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    with LLM(checkpoint("qwen3"), platform=platform_name, block_size=64, **settings) as llm:
        prompts = [PromptInputs([10 + number] * 512) for number in range(32)]
        llm.generate(prompts, SamplingParams(n=8, max_tokens=2, temperature=1.0))
        assert llm.stats().num_prefill_tokens == 32 * (512 + 7) <= 16700


@pytest.mark.parametrize("model_type", ["mistral", *only_full(
    "blocks without windows; both are in one that stays", "qwen3")])
@pytest.mark.parametrize("block_size", [16, *only_full("the least and the usual size", 2, 64)])
def test_answers_that_copy_blocks_are_those_of_prompts_computed_apart(model_type: str, block_size: int,
                                                                      checkpoint: Any, platform_name: str) -> None:
    """Three answers in a step of their prompt, then prompts that part from it within a block, or end there."""
    path: Path = checkpoint(model_type, **MODELS[model_type])
    found, num_computed = [], []
    for is_shared in (False, True):
        with LLM(path, platform=platform_name, block_size=block_size, enable_prefix_caching=is_shared,
                 max_num_batched_tokens=1024, **SMALL) as llm:
            prompts, _ = alike(llm, model_type)
            first, outputs = prompts[0], llm.generate(prompts[:1], DRAWN)
            for cut in (1, 3, 9):
                ids = first.token_ids[:-cut]
                parted = [PromptInputs([*ids, *range(20, 20 + more)]) for more in (0, 2)]
                outputs += llm.generate(parted, DRAWN)
            found.append(tokens_of(outputs))
            num_computed.append(llm.stats().num_prefill_tokens)
            assert llm.stats().kv_blocks_used == 0
    assert found[0] == found[1]
    assert num_computed[1] * 3 < num_computed[0]


def test_eight_answers_of_a_hybrid_go_on_from_the_firsts_snapshot(checkpoint: Any, platform_name: str) -> None:
    settings = {**SMALL, "max_num_seqs": 32, "max_num_batched_tokens": 2048}
    with LLM(checkpoint("qwen3_5_text"), platform=platform_name, block_size=16, **settings) as llm:
        prompts = [PromptInputs([10 + number] * 128) for number in range(4)]
        llm.generate(prompts, SamplingParams(n=8, max_tokens=2, temperature=1.0))
        stats = llm.stats()
    assert (stats.num_prefill_tokens, stats.num_prefill_steps) == (4 * (128 + 7 * 64), 2)


def with_last_token(prompt: PromptInputs, token: int) -> PromptInputs:
    return PromptInputs([*prompt.token_ids, token, *prompt.token_ids[-3:]])


@pytest.mark.parametrize("place", ["behind what is shared", "in what is shared"])
def test_a_row_without_numbers_spoils_nobody_who_shares_what_it_computed(place: str, checkpoint: Any,
                                                                         platform_name: str) -> None:
    """As apart: where the token that makes NaN is shared, all of them fail; where it is the first row's own, it does.
    Afterwards nothing of that is found in the cache: with a token that does no harm any more all are answered."""
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, block_size=4, **SMALL) as llm:
        prompts, _ = alike(llm, "qwen3")
        bad = next(token for token in range(10, VOCAB_SIZE) if token not in prompts[0].token_ids)
        params = DRAWN.replace(logit_bias={bad: -100.0})  # no answer has it
        spoilt = [with_last_token(prompts[0], bad), *prompts[1:3]]
        if place == "in what is shared":
            spoilt = [with_last_token(spoilt[0], bad + 1)] * 3
        expected = tokens_of(llm.generate(spoilt, params))
    with LLM(path, platform=platform_name, block_size=4, enforce_eager=True, **SMALL) as llm:
        model: Any = runner_of(llm).model
        embed = model.embed

        def nan_at_bad(ids_T: torch.Tensor) -> torch.Tensor:
            x_TD: torch.Tensor = embed(ids_T)
            return x_TD.masked_fill((ids_T == bad)[:, None], torch.nan)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "embed", nan_at_bad)
            outputs = llm.generate(spoilt, params)
        failed = [output.finish_reason == "error" for output in outputs]
        assert failed == ([True] * 3 if place == "in what is shared" else [True, False, False])
        assert all(tokens == wanted for tokens, wanted, has_failed in
                   zip(tokens_of(outputs), expected, failed, strict=True) if not has_failed)
        assert tokens_of(llm.generate(spoilt, params)) == expected


def test_a_row_that_makes_its_steps_fail_is_found_among_those_that_share_its_blocks(checkpoint: Any) -> None:
    with LLM(checkpoint("qwen3"), platform="cpu", block_size=4, **SMALL) as llm:
        prompts, _ = alike(llm, "qwen3")
        poison = poison_of(llm)
        spoilt = [prompts[0], with_last_token(prompts[0], poison), *prompts[1:5]]
        params = DRAWN.replace(logit_bias={poison: -100.0})
        expected = tokens_of(llm.generate(spoilt, params))
    with LLM(checkpoint("qwen3"), platform="cpu", block_size=4, **SMALL) as llm:
        with failing(llm, raise_at_poison(llm, ValueError("not for me"))):
            outputs = llm.generate(spoilt, params)
        assert [output.finish_reason == "error" for output in outputs] == [False, True, False, False, False, False]
        found = tokens_of(outputs)
        assert [found[0], *found[2:]] == [expected[0], *expected[2:]]
        assert llm.stats().kv_blocks_used == 0


@pytest.mark.parametrize("model_type", ["qwen3_5_text", *only_full("blocks alone; blocks and states stay", "qwen3")])
def test_memory_that_runs_out_behind_a_shared_step_changes_no_answer(model_type: str, checkpoint: Any) -> None:
    with LLM(checkpoint(model_type), platform="cpu", block_size=4, **SMALL) as llm:
        prompts, _ = alike(llm, model_type)
        expected = tokens_of(llm.generate(prompts, DRAWN))
    for at_operator in (1, 4):
        with LLM(checkpoint(model_type), platform="cpu", block_size=4, **SMALL) as llm:
            failing_behind_the_forward(runner_of(llm).steps, 1, at_operator)
            assert tokens_of(llm.generate(prompts, DRAWN)) == expected
            # A state cannot be written twice: there the step is given up, and its sequences begin anew.
            assert runner_of(llm).guard.num_retries == (1 if model_type == "qwen3" else 0)


@pytest.mark.full("two ranks start; what is shared is decided before them")
@pytest.mark.ranks
def test_two_ranks_share_as_one(checkpoint: Any, platform_name: str) -> None:
    """About 4 seconds: two processes start."""
    need_devices(platform_name)
    found = []
    for size in (1, 2):
        with LLM(checkpoint("qwen3"), platform=platform_name, block_size=4, tensor_parallel_size=size, **SMALL) as llm:
            prompts, _ = alike(llm, "qwen3")
            found.append((tokens_of(llm.generate(prompts, DRAWN)), llm.stats().num_prefill_tokens))
    assert found[0] == found[1]
