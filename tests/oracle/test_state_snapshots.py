"""A prompt that goes on from a snapshot of the state has the tokens and logits of transformers, whatever was cached.

States begin as NaN: whoever reads one that nobody wrote shows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_runner import LLM
from npu_runner.request.prompt_inputs import PromptInputs
from tests.full_set import is_fast, only_full
from tests.oracle import reference
from tests.oracle.running import MAX_NEW_TOKENS, SMALL, assert_logits_equal, greedy, need_devices, runner_of
from tests.oracle.tiny_checkpoints import VOCAB_SIZE


@pytest.fixture
def path(checkpoint: Any) -> Path:
    made: Path = checkpoint("qwen3_5_text")
    return made


@contextmanager
def started(path: Path, platform_name: str, **settings: Any) -> Iterator[LLM]:
    with LLM(path, platform=platform_name, **{**SMALL, **settings}) as llm:
        states = runner_of(llm).states
        assert states is not None
        with torch.inference_mode():
            states.states.fill_(torch.nan)
            states.conv_states.fill_(torch.nan)
        yield llm


def prompt(*parts: tuple[int, int]) -> PromptInputs:
    """Tokens drawn with each (seed, length), one after the other: prompts with the same first parts begin alike."""
    return PromptInputs([random.Random(f"{seed} {place}").randrange(10, VOCAB_SIZE)
                         for seed, length in parts for place in range(length)])


@lru_cache(maxsize=64)
def expected_tokens(path: Path, token_ids: tuple[int, ...]) -> list[int]:
    return reference.generate(path, token_ids, max_new_tokens=MAX_NEW_TOKENS)[0]


def assert_tokens_equal(path: Path, llm: LLM, prompts: list[PromptInputs]) -> list[int]:
    """`prompts` together give transformers' tokens; returns how many tokens of each came from the prefix cache."""
    outputs = llm.generate(prompts, greedy())
    for index, (output, one) in enumerate(zip(outputs, prompts, strict=True)):
        assert output.token_ids == expected_tokens(path, tuple(one.token_ids)), f"prompt {index} of {len(prompts)}"
    return [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("num_tokens", [100, *only_full("chunks that end where snapshots are, and one chunk", 64, 512)])
def test_logits_behind_a_snapshot_are_those_of_transformers(num_tokens: int, path: Path, platform_name: str) -> None:
    with started(path, platform_name, max_num_batched_tokens=num_tokens) as llm:
        one = prompt((1, 201))
        assert assert_tokens_equal(path, llm, [one]) == [0]
        tokens, logits = reference.generate(path, one.token_ids, max_new_tokens=MAX_NEW_TOKENS)
        assert_logits_equal(llm, one, tokens, logits)
        assert llm.stats().prefix_cache_hits == 192


def test_prompts_that_part_go_on_from_where_they_do(path: Path, platform_name: str) -> None:
    with started(path, platform_name) as llm:
        assert assert_tokens_equal(path, llm, [prompt((1, 150), (2, 70))]) == [0]
        assert assert_tokens_equal(path, llm, [prompt((1, 150), (3, 60))]) == [0], "blocks, but no state"
        assert assert_tokens_equal(path, llm, [prompt((1, 150), (4, 50)), prompt((1, 150), (5, 5))]) == [128, 128]
        assert assert_tokens_equal(path, llm, [prompt((1, 150), (2, 75))]) == [192]
        stats = llm.stats()
    assert (stats.state_snapshots_used, stats.state_snapshots_evicted) == (3, 0)


def test_what_was_generated_can_be_the_beginning_of_a_prompt(path: Path, platform_name: str) -> None:
    """The state of generated tokens was made one by one, that of a prompt in chunks."""
    with started(path, platform_name) as llm:
        one = prompt((1, 120))
        (output,) = llm.generate([one], greedy(90))
        longer = PromptInputs([*one.token_ids, *output.token_ids, *prompt((2, 30)).token_ids])
        assert assert_tokens_equal(path, llm, [longer]) == [64], "snapshots are of prompts"
        assert assert_tokens_equal(path, llm, [longer]) == [192]


def test_completions_of_one_prompt_share_its_snapshot(path: Path, platform_name: str) -> None:
    with started(path, platform_name, max_num_batched_tokens=256) as llm:
        one = prompt((1, 250))
        (output,) = llm.generate([one], greedy().replace(n=4))
        tokens = expected_tokens(path, tuple(one.token_ids))
        assert [completion.token_ids for completion in output.completions] == [tokens] * 4
        assert llm.stats().prefix_cache_hits == 3 * 192


@pytest.mark.parametrize("num_snapshots", [1, *only_full("none, and more; one stays, which evicts", 0, 3)])
def test_few_snapshots_and_few_blocks_change_nothing(num_snapshots: int, path: Path, platform_name: str,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    per_block = 2 * 1 * 4 * 2 * 32 * 4  # k and v, layers that attend, block_size, kv heads, head_dim, bytes
    draw = random.Random(0)
    with started(path, platform_name, block_size=4, kv_cache_bytes=65 * per_block, max_model_len=200,
                 max_num_batched_tokens=130, max_state_snapshots=num_snapshots) as llm:
        for _ in range(2 if is_fast else 3):
            assert_tokens_equal(path, llm, [prompt((draw.randrange(2), 70), (draw.randrange(2), draw.choice((2, 60))),
                                                   (draw.randrange(3), draw.choice((1, 7, 40)))) for _ in range(5)])
        stats = llm.stats()
    assert stats.num_preemptions > 0, "the test must force preemption"
    assert (stats.prefix_cache_hits > 0) == (num_snapshots > 0)
    assert stats.state_snapshots_evicted > 0 or not num_snapshots
    assert ("there is no prefix cache" in caplog.text) == (num_snapshots == 0)
    assert stats.kv_blocks_used == 0


@pytest.mark.full("two ranks start; ranks stay without snapshots, which the scheduler chooses for all")
@pytest.mark.ranks
def test_two_ranks_keep_the_same_snapshots(path: Path, platform_name: str) -> None:
    need_devices(platform_name)
    with LLM(path, platform=platform_name, tensor_parallel_size=2, **SMALL) as llm:
        one = prompt((1, 150), (2, 20))
        assert assert_tokens_equal(path, llm, [one]) == [0]
        assert assert_tokens_equal(path, llm, [one]) == [128]


def test_a_step_that_fails_leaves_no_snapshot(path: Path, platform_name: str) -> None:
    """It ends before it has written a state; its prompts begin anew, one after the other."""
    with started(path, platform_name) as llm:
        model: Any = runner_of(llm).model
        embed, num_calls = model.embed, 0

        def fails_once(ids: torch.Tensor) -> torch.Tensor:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise ValueError("once")
            result: torch.Tensor = embed(ids)
            return result

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model, "embed", fails_once)
            found = assert_tokens_equal(path, llm, [prompt((1, 150), (2, 20)), prompt((1, 150), (3, 30))])
        assert num_calls > 1
        assert found == [0, 128]


def test_images_are_part_of_what_a_snapshot_stands_for(checkpoint: Any, platform_name: str) -> None:
    path: Path = checkpoint("qwen3_5")
    rng = np.random.default_rng(7)
    drawn = reference.random_image(rng, 250, 251)
    inverted = drawn.point(lambda value: 255 - value)
    with started(path, platform_name) as llm:
        for image, least, most in [(drawn, 0, 0), (drawn, 64, 192), (inverted, 0, 0), (inverted, 64, 192)]:
            one = llm.engine.processor([{"role": "user", "content": [
                {"type": "image", "image": image}, {"type": "text", "text": "which picture shows a circle " * 4}]}])
            tokens, _ = reference.generate(path, one.token_ids, [image], max_new_tokens=MAX_NEW_TOKENS)
            (output,) = llm.generate([one], greedy())
            assert output.token_ids == tokens
            assert least <= output.num_cached_tokens <= most


def test_neighbouring_images_never_go_through_the_tower_together_where_each_fills_a_step(
        checkpoint: Any, platform_name: str) -> None:
    """Both begin before the first boundary, so one chunk shows both."""
    path: Path = checkpoint("qwen3_5")
    rng = np.random.default_rng(8)
    images = [reference.random_image(rng, *size) for size in ((190, 190), (3600, 20))]
    with started(path, platform_name, max_num_batched_tokens=64, vision_cache_bytes=0, max_state_snapshots=1) as llm:
        one = llm.engine.processor([{"role": "user", "content": [
            *({"type": "image", "image": image} for image in images), {"type": "text", "text": "which"}]}])
        assert one.spans[1].start < 64
        runner = runner_of(llm)
        assert runner.max_image_tokens < sum(span.num_tokens for span in one.spans)
        sizes: list[int] = []
        encode_images = runner.strategy.encode_images
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(runner.strategy, "encode_images", lambda model, images: (
                sizes.append(sum(image.num_tokens for image in images)), encode_images(model, images))[1])
            (output,) = llm.generate([one], greedy())
        tokens, _ = reference.generate(path, one.token_ids, images, max_new_tokens=MAX_NEW_TOKENS)
    assert output.token_ids == tokens
    assert sizes == [36, 107]
