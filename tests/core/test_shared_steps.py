"""Rows of one prefill step share what it computes: n answers of one prompt, and prompts that begin alike."""

from __future__ import annotations

import random

import pytest

from npu_runner.core.block_manager import BlockManager
from npu_runner.core.partial_blocks import Found, PartialBlock, PartialBlocks
from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.core.state_snapshots import StateSnapshots
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


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_each_further_answer_computes_one_token(block_size: int) -> None:
    world = make_world(block_size)
    assert planned(world, *[list(range(20))] * 3) == [[20, 1, 1]]
    assert world.num_copies == (0 if block_size == 1 else 2)


def test_a_prompt_that_parts_within_a_block_copies_what_an_earlier_step_has_computed() -> None:
    """Beside its source it shares whole blocks; a step later it copies. Neither changes what the source's owner has."""
    world = make_world(8)
    assert planned(world, list(range(20)), [*range(19), 30, 31]) == [[20, 5]]
    assert planned(world, [*range(19), 40, 41]) == [[20, 5], [2]]
    assert world.num_copies == 1


def test_a_source_is_held_until_its_copy_is_launched() -> None:
    """Its owner ends with the step that computes it. The next step launches the copy, and the source is free."""
    world = make_world(8)
    first, copy = (world.add_prompt(PromptInputs(list(range(20))), 38) for _ in range(2))
    batch = world.scheduler.schedule()
    assert batch is not None
    source, target = first.block_table[2], copy.block_table[2]
    assert (batch.copies, batch.rows_on_shared_blocks) == ([], [1])
    assert [1, 2, source] not in batch.new_blocks_N3.tolist()[:3]
    assert batch.new_blocks_N3.tolist()[-1][1:] == [2, source], "it is read where it is"
    for seq in world.scheduler.complete():
        assert seq is not None
        seq.append(0)
    world.scheduler.finish(first, "stop")
    assert world.blocks._ref_counts[source] == 1
    assert source not in world.blocks._free
    batch = world.scheduler.schedule()
    assert batch is not None
    assert batch.copies == [(source, target)]
    assert batch.new_blocks_N3.tolist()[0][1:] == [2, target]
    assert world.blocks._ref_counts[source] == 0


def test_copies_for_a_sequence_that_ends_or_a_step_that_is_rolled_back_are_withdrawn() -> None:
    for ends in ("finish", "rollback"):
        world = make_world(8)
        first, copy = (world.add_prompt(PromptInputs(list(range(20))), 38) for _ in range(2))
        assert world.scheduler.schedule() is not None
        assert world.blocks.copies
        if ends == "finish":
            world.scheduler.finish(copy, "abort")
            assert world.blocks.num_used == len(first.block_table)
        else:
            world.scheduler.rollback()
            assert world.blocks.num_used == 0
        assert not world.blocks.copies
        assert world.blocks._partial_blocks is not None
        assert bool(world.blocks._partial_blocks._parent_of) == (ends == "finish")


def test_a_source_that_is_the_last_free_block_is_not_copied() -> None:
    """Three blocks, all of which the second prompt needs: held for a copy, one of them would be missing for ever."""
    world = make_world(8, num_blocks=4)
    world.add_prompt(PromptInputs(list(range(9))), 10)
    world.run_to_the_end()
    second = world.add_prompt(PromptInputs([*range(7), *[21] * 13]), 24)
    world.run_to_the_end()
    assert [lens for _, lens in world.planned if max(lens) > 1] == [[9], [20]]
    assert (world.num_copies, second.num_preemptions) == (0, 0)


def test_a_row_with_more_than_one_token_left_reads_no_block_of_its_step_in_part() -> None:
    """A label behind the prompt writes its tokens. A step later the prompt's last block is copied."""
    world = make_world()
    for number in range(3):
        seq = Sequence(number, number, str(number), 0, PromptInputs(list(range(20))), SamplingParams(), 0,
                       scored_ends=(1,), output_token_ids=[30 + number, 40])
        world.scheduler.add(seq)
        if number:
            batch = world.scheduler.schedule()
            assert batch is not None
            assert batch.rows_on_shared_blocks == []
            assert batch.query_lens_B.tolist() == ([22, 6] if number == 1 else [3])
    assert len(batch.copies) == 1


def test_nothing_is_copied_into_the_null_block_or_from_it() -> None:
    world = make_world(4, window=1)
    assert planned(world, *[list(range(20))] * 3) == [[4, 1, 1]]
    assert world.num_copies == 0, "the next token sees itself alone: their last blocks were given back at once"


@pytest.mark.parametrize("cause", ["states", "look-ahead", "no cache"])
def test_nothing_is_copied_where_a_block_is_not_all_of_a_prefix(cause: str) -> None:
    snapshots = StateSnapshots(4, 8, alignment=64) if cause == "states" else None
    blocks = BlockManager(20, 8, enable_prefix_caching=cause != "no cache", snapshots=snapshots,
                          keys_look_ahead=cause == "look-ahead")
    for number in range(2):
        seq = Sequence(number, number, str(number), 0, PromptInputs(list(range(20))), SamplingParams(), 0)
        blocks.match_prefix(seq)
        assert blocks.allocate(seq, 20)
        blocks.start_copy(seq)
        blocks.commit(seq, 20 - seq.num_computed_tokens)
        assert seq.num_cached_tokens == (16 if number and cause == "look-ahead" else 0)
        blocks.launch_step()
    assert not blocks.copies


def test_prompts_that_begin_alike_share_their_beginning() -> None:
    common = list(range(10))
    assert planned(make_world(), [*common, 20], [*common, 30, 31], common[:9]) == [[11, 4, 1]]
    assert planned(make_world(), [*common, 20], [*common, 30, 31], common) == [[11, 4, 1]], "it ends within a block"


def test_images_are_part_of_what_is_shared() -> None:
    def prompt(name: int) -> PromptInputs:
        image = ImageInput(bytes([name]) * 16, None, (1, 2, 12), 6)  # type: ignore[arg-type]
        return PromptInputs([9] * 12, [image], [ImageSpan(5, 6, 0)])

    assert planned(make_world(), prompt(1), prompt(1), prompt(2)) == [[12, 1, 8]], "the first block has no image"


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    assert planned(make_world(caching=False), *[list(range(20))] * 2) == [[20, 20]]


@pytest.mark.parametrize("wanted", ["prompt logprobs", "hidden states", "nothing of others"])
def test_a_prompt_whose_tokens_are_all_wanted_is_computed_whole_and_others_share_it(wanted: str) -> None:
    world = make_world()
    for is_whole in (False, True, False):
        sequence = world.add_prompt(PromptInputs(list(range(20))), 38)
        if is_whole and wanted == "prompt logprobs":
            sequence.scores_prompt, sequence.params = True, SamplingParams(prompt_logprobs=0)
        elif is_whole:
            sequence.is_apart = wanted == "nothing of others"
            sequence.params = SamplingParams(return_hidden_states=wanted == "hidden states")
    batch = world.scheduler.schedule()
    assert batch is not None
    assert batch.query_lens_B.tolist() == [20, 20, 1]
    assert batch.rows_on_shared_blocks == [2]


def test_windows_share_and_give_back_what_lies_behind_them() -> None:
    world = make_world(window=6)
    assert planned(world, *[list(range(20))] * 3) == [[20, 1, 1]]


def test_copies_of_a_prompt_of_several_steps_share_its_last_chunk() -> None:
    assert planned(make_world(num_tokens=16), *[list(range(20))] * 3) == [[16], [4, 1, 1]]


def test_copies_find_what_is_left_of_a_full_cache() -> None:
    """Nine blocks: the first takes five, and each copy one of its own."""
    world = make_world(num_blocks=10)
    for _ in range(4):
        world.add_prompt(PromptInputs(list(range(20))), 21)
    batch = world.scheduler.schedule()
    assert batch is not None
    assert batch.query_lens_B.tolist() == [20, 1, 1]
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
    assert [lens for _, lens in world.planned if max(lens) > 1] == [[20, 1, 1]]


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


def partial_block(tokens: list[int] | range) -> PartialBlock:
    seq = Sequence(0, 0, "r", 0, PromptInputs(list(tokens)), SamplingParams(), 0)
    return PartialBlock.from_sequence(seq, 0, len(tokens))


def test_the_tokens_that_two_partial_blocks_have_in_common_are_counted_one_by_one() -> None:
    rng = random.Random(4)
    largest = 2**31 - 1
    for _ in range(500):
        first = [rng.choice((0, 1, 255, 65_536, largest)) for _ in range(rng.randint(1, 12))]
        second = first[: rng.randint(0, len(first))] + [rng.choice((0, 1, largest)) for _ in range(rng.randint(1, 6))]
        pairs = zip(first, second, strict=False)
        most = min(len(first), len(second))
        expected = next((place for place, (one, other) in enumerate(pairs) if one != other), most)
        assert partial_block(first).num_common(partial_block(second)) == expected, (first, second)


def test_few_tokens_of_a_block_are_computed_unless_they_are_all_that_is_left() -> None:
    partial = PartialBlocks(64)
    assert partial.offer(b"parent", 7, partial_block(range(64)))
    partial.launch()
    for num_equal, most, found in ((15, 63, None), (16, 63, 16), (15, 15, 15), (3, 3, 3), (2, 3, None)):
        wanted = partial_block([*range(num_equal), *[99] * (64 - num_equal)])
        place = partial.find(b"parent", wanted, most, can_be_new=False)
        assert place == (None if found is None else Found(7, found, is_new=False)), (num_equal, most)
