"""Rows of one prefill step share what it computes: n answers of one prompt, and prompts that begin alike."""

from __future__ import annotations

import random

import pytest

from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from tests.core.traffic import World


def make_world(block_size: int = 4, *, num_tokens: int = 100, num_blocks: int = 200, caching: bool = True,
               window: int | None = None, depth: int = 1) -> World:
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=num_tokens, max_image_tokens=20)
    return World(random.Random(0), block_size, num_blocks, limits, caching, window=window, depth=depth)


def planned(world: World, *prompts: list[int] | PromptInputs) -> list[list[int]]:
    """Query lengths of every prefill, until all prompts have ended. What rows read is compared by the world."""
    for prompt in prompts:
        world.add_prompt(prompt if isinstance(prompt, PromptInputs) else PromptInputs(prompt), 38)
    world.run_to_the_end()
    return [lens for _, lens in world.planned if max(lens) > 1]


@pytest.mark.parametrize(("block_size", "lens"), [(1, [20, 1, 1]), (4, [20, 4, 4]), (16, [20, 4, 4]), (32, [20] * 3)])
def test_a_copy_computes_what_follows_the_last_full_block_before_its_last_token(block_size: int,
                                                                                lens: list[int]) -> None:
    assert planned(make_world(block_size), *[list(range(20))] * 3) == [lens]


def test_prompts_that_begin_alike_share_their_beginning() -> None:
    common = list(range(10))
    assert planned(make_world(), [*common, 20], [*common, 30, 31], common[:9]) == [[11, 4, 1]]


def test_images_are_part_of_what_is_shared() -> None:
    def prompt(name: int) -> PromptInputs:
        image = ImageInput(bytes([name]) * 16, None, (1, 2, 12), 6)  # type: ignore[arg-type]
        return PromptInputs([9] * 12, [image], [ImageSpan(5, 6, 0)])

    assert planned(make_world(), prompt(1), prompt(1), prompt(2)) == [[12, 4, 8]], "the first block has no image"


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    assert planned(make_world(caching=False), *[list(range(20))] * 2) == [[20, 20]]


def test_a_prompt_whose_log_probabilities_are_wanted_is_computed_whole_and_others_share_it() -> None:
    world = make_world()
    for scores in (False, True, False):
        sequence = world.add_prompt(PromptInputs(list(range(20))), 38)
        sequence.scores_prompt, sequence.params = scores, SamplingParams(prompt_logprobs=0 if scores else None)
    batch = world.scheduler.schedule()
    assert batch is not None
    assert batch.query_lens_B.tolist() == [20, 20, 4]


def test_windows_share_and_give_back_what_lies_behind_them() -> None:
    world = make_world(window=6)
    assert planned(world, *[list(range(20))] * 3) == [[20, 4, 4]]


def test_copies_of_a_prompt_of_several_steps_share_its_last_chunk() -> None:
    assert planned(make_world(num_tokens=16), *[list(range(20))] * 3) == [[16], [4, 4, 4]]


def test_copies_find_what_is_left_of_a_full_cache() -> None:
    """Nine blocks: the first takes five, and each copy one of its own."""
    world = make_world(num_blocks=10)
    for _ in range(4):
        world.add_prompt(PromptInputs(list(range(20))), 21)
    batch = world.scheduler.schedule()
    assert batch is not None
    assert batch.query_lens_B.tolist() == [20, 4, 4]
    world.scheduler.rollback()
    world.run_to_the_end()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_is_rolled_back_offers_nothing(depth: int) -> None:
    world = make_world(depth=depth)
    for _ in range(3):
        world.add_prompt(PromptInputs(list(range(20))), 38)
    assert world.scheduler.schedule() is not None
    world.scheduler.rollback()
    assert not world.blocks._block_of_hash
    world.run_to_the_end()
    assert [lens for _, lens in world.planned if max(lens) > 1] == [[20, 4, 4]]


def test_what_a_failed_row_computed_is_offered_to_nobody_and_who_shares_it_goes_on() -> None:
    world = make_world()
    first, copy = (world.add_prompt(PromptInputs(list(range(20))), 38) for _ in range(2))
    world.step()
    world.scheduler.finish(first, "error")
    del world.live[first.seq_id]
    assert not world.blocks._block_of_hash
    while world.live:
        world.step()
    assert copy.num_tokens == 38
    again = world.add_prompt(PromptInputs(list(range(20))), 38)
    world.run_to_the_end()
    assert again.num_cached_tokens == 0, "the copy had not computed its beginning"


def test_a_row_that_fails_leaves_what_others_had_computed() -> None:
    world = make_world()
    first: Sequence = world.add_prompt(PromptInputs(list(range(20))), 21)
    while world.live:
        world.step()
    failing = world.add_prompt(PromptInputs([*range(20), 1, 2, 3, 4, 5]), 38)
    world.step()
    assert failing.num_cached_tokens == 20
    world.scheduler.finish(failing, "error")
    del world.live[failing.seq_id]
    assert first.is_finished
    again = world.add_prompt(PromptInputs([*range(20), 1, 2, 3, 4, 5]), 38)
    world.run_to_the_end()
    assert again.num_cached_tokens == 20
