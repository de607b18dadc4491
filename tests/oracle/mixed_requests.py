"""Requests with every kind of parameter, caches that hold few of them, and how answers are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from tests.families import sees_images
from tests.oracle.image_prompts import LAYOUTS, make_prompts

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
