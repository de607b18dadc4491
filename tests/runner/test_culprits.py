"""A request that makes steps fail ends alone, by name; the others answer as if it had never been there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.errors import EngineDeadError, OutOfMemoryError, RequestError
from npu_runner.request.outputs import RequestOutput
from tests.full_set import only_full
from tests.runner.failing_steps import POISON, failing, poison_of, raise_at_poison

SETTINGS: dict[str, Any] = {"platform": "cpu", "max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128,
                            "kv_cache_bytes": 1 << 20}
NUM_PROMPTS = 21


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, **SETTINGS) as llm:
        yield llm


def prompts_and_params(llm: LLM) -> tuple[list[str], list[SamplingParams]]:
    """Nobody generates the poison."""
    rng = random.Random(2)
    prompts = ["which colour " * rng.randint(1, 20) for _ in range(NUM_PROMPTS)]
    drawn = SamplingParams(temperature=1.0, seed=4, repetition_penalty=1.1, ignore_eos=True,
                           logit_bias={poison_of(llm): -100.0})
    return prompts, [drawn.replace(max_tokens=rng.randint(1, 12), n=rng.choice((1, 1, 3))) for _ in prompts]


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.completions] for output in outputs]


@pytest.mark.parametrize(("error", "code"), [
    (OutOfMemoryError("device memory ran out\nledger"), "out_of_memory"),
    *only_full("other errors, found in the same way", (RequestError("not for me", code="scripted"), "scripted"),
               (ValueError("this token is not for me"), "request_failed"), (MemoryError(), "out_of_memory")),
], ids=["memory-twice", "request", "any", "memory"])  # fmt: skip
def test_whoever_makes_steps_fail_is_found_and_nobody_else_is_harmed(error: Exception, code: str, llm: LLM) -> None:
    prompts, params = prompts_and_params(llm)
    expected = tokens_of(llm.generate(prompts, params))
    places = [0, 7, 8, NUM_PROMPTS]
    for place in reversed(places):
        prompts.insert(place, f"a {POISON} b")
        params.insert(place, params[0].replace(max_tokens=5, n=1 + place % 2))
    with failing(llm, raise_at_poison(llm, error)):
        outputs = llm.generate(prompts, params)
    bad = [output for output, prompt in zip(outputs, prompts, strict=True) if POISON in prompt]
    assert len(bad) == len(places)
    for completion in (completion for output in bad for completion in output.completions):
        assert (completion.finish_reason, completion.error_code) == ("error", code)
        assert "alone in its step, this request fails" in str(completion.error)
        assert "\n" not in str(completion.error)
    assert tokens_of([output for output in outputs if output not in bad]) == expected
    assert llm.stats().kv_blocks_used == 0
    assert tokens_of(llm.generate(prompts[1:3], params[1:3])) == expected[:2]


def test_a_culprit_is_found_in_the_middle_of_its_answer(llm: LLM) -> None:
    """The token that fails is one of those that are generated: not a prefill but a decode step fails."""
    prompts, params = prompts_and_params(llm)
    biased = params[0].replace(max_tokens=9, n=1)
    prompts, params = [*prompts, "which"], [*params, biased]
    expected = tokens_of(llm.generate(prompts, params))
    others = {token for tokens in expected[:-1] for completion in tokens for token in completion}
    last = next(token for token in expected[-1][0][2:6] if token not in others)

    def fault(ids: torch.Tensor) -> None:
        if (ids == last).any():
            raise ZeroDivisionError("by a token")

    with failing(llm, fault):
        outputs = llm.generate(prompts, params)
    assert outputs[-1].finish_reason == "error"
    num_good = len(outputs[-1].token_ids)
    assert 2 < num_good < 9
    assert outputs[-1].token_ids == expected[-1][0][:num_good]
    assert tokens_of(outputs[:-1]) == expected[:-1]


def test_a_step_that_only_its_size_drives_out_of_memory_is_made_smaller(llm: LLM) -> None:
    prompts, params = prompts_and_params(llm)
    expected = tokens_of(llm.generate(prompts, params))
    llm.engine.scheduler.reset()  # of what is cached too few tokens are left
    num_failures = 0

    def fault(ids: torch.Tensor) -> None:
        nonlocal num_failures
        if len(ids) > 40:
            num_failures += 1
            raise MemoryError

    prompts, params = zip(*[pair for pair in zip(prompts, params, strict=True) if len(pair[0]) < 200], strict=True)
    with failing(llm, fault):
        outputs = llm.generate(list(prompts), list(params))
    again = [item for item in tokens_of(outputs)]
    assert [output.finish_reason for output in outputs] == ["length"] * len(outputs)
    assert all(item in expected for item in again)
    assert llm.engine.scheduler.limits.max_num_batched_tokens <= 64
    assert num_failures <= 2 * 2 * 4, "not once a step"


def test_a_device_that_does_nothing_any_more_is_nobodys_fault(llm: LLM) -> None:
    prompts, params = prompts_and_params(llm)
    num_steps = 0

    def fault(ids: torch.Tensor) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 3:
            raise ValueError("everything fails")

    with failing(llm, fault), pytest.raises(EngineDeadError, match=r"a step of one token .* failed as well") as caught:
        llm.generate(prompts, params)
    assert caught.value.request_ids
    assert caught.value.blame is None


def test_an_aborted_suspect_holds_nobody_up(llm: LLM) -> None:
    engine = llm.engine
    prompts, params = prompts_and_params(llm)
    with failing(llm, raise_at_poison(llm, ValueError("no"))):
        for index, prompt in enumerate([POISON, *prompts[:5]]):
            engine.add_request(str(index), engine.processor.from_text(prompt), params[0])
        engine.step()
        for index in range(3):
            engine.abort_request(str(index))
        finished = {}
        while engine.has_unfinished_requests():
            finished.update((output.request_id, output.finish_reason) for output in engine.step())
    assert finished == {"0": "abort", "1": "abort", "2": "abort", "3": "length", "4": "length", "5": "length"}
