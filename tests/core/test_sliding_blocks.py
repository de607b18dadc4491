"""Sliding windows: blocks behind them are free, what a token sees is there, a prefix is found by its last window."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.core.batch import RunningTable, decode_batch
from npu_runner.core.block_manager import BlockManager, first_needed_block, most_blocks
from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from tests.core.traffic import MAX_LEN, World
from tests.full_set import examples


def sequence_of(tokens: list[int], number: int = 0) -> Sequence:
    return Sequence(number, number, str(number), 0, PromptInputs(tokens), SamplingParams(), 0)


def compute(blocks: BlockManager, seq: Sequence, num_tokens: int) -> None:
    """What the scheduler does for a chunk of `num_tokens`."""
    assert blocks.allocate(seq, seq.num_computed_tokens + num_tokens)
    seq.num_computed_tokens += num_tokens
    blocks.commit(seq)
    blocks.free_behind_window([seq])


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 16]), spare=st.integers(0, 12),
       max_num_seqs=st.integers(1, 8), num_tokens=st.integers(1, 50), caching=st.booleans(),
       failing=st.sampled_from([0.0, 0.2]), window=st.integers(1, MAX_LEN + 5), depth=st.integers(1, 2))
def test_random_traffic_reads_only_what_it_holds(seed: int, block_size: int, spare: int, max_num_seqs: int,
                                                 num_tokens: int, caching: bool, failing: float, window: int,
                                                 depth: int) -> None:
    """In as few blocks as one sequence at its longest may need: every sequence ends, and none is leaked."""
    rng = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens,
                             max_image_tokens=rng.randint(5, 12))
    enough = most_blocks(MAX_LEN, window, num_tokens, block_size)
    world = World(rng, block_size, enough + 1 + spare, limits, caching, window=window, depth=depth)
    world.failing = failing
    world.run()


@given(computed=st.integers(0, 200), window=st.integers(1, 90), block_size=st.integers(1, 20))
def test_the_first_needed_block_is_the_one_that_the_next_token_sees_first(computed: int, window: int,
                                                                          block_size: int) -> None:
    seen = [place for place in range(computed + 1) if place > computed - window]
    assert first_needed_block(computed, window, block_size) == seen[0] // block_size
    assert first_needed_block(computed, None, block_size) == 0


@given(length=st.integers(1, 200), window=st.integers(1, 90), chunk=st.integers(1, 60), block_size=st.integers(1, 20))
def test_no_sequence_holds_more_blocks_than_was_said(length: int, window: int, chunk: int, block_size: int) -> None:
    enough = most_blocks(length, window, chunk, block_size)
    blocks = BlockManager(enough + 1, block_size, sliding_window=window)
    seq = sequence_of([0] * length)
    while seq.num_computed_tokens < length:
        compute(blocks, seq, min(chunk, length - seq.num_computed_tokens))
    assert blocks.peak_used <= enough


def test_a_long_decode_stays_within_its_window() -> None:
    blocks = BlockManager(100, 4, sliding_window=10)
    seq = sequence_of([7] * 6)
    compute(blocks, seq, 6)
    for token in range(200):
        seq.append(token)
        compute(blocks, seq, 1)
    assert blocks.num_used <= 4
    blocks.free(seq)
    assert blocks.num_used == 0


def test_a_prefix_is_found_by_its_last_window() -> None:
    """Blocks behind the window may be anybody's by now: the prompt goes on from those that it sees."""
    blocks = BlockManager(8, 4, sliding_window=6)
    prompt = list(range(21))
    first = sequence_of(prompt)
    for _ in range(3):
        compute(blocks, first, 7)
    blocks.free(first)
    greedy = sequence_of([99] * 8, 1)  # takes the blocks that were freed first: those behind the window
    compute(blocks, greedy, 8)
    again = sequence_of(prompt, 2)
    blocks.match_prefix(again)
    assert again.num_cached_tokens == 20
    assert again.num_null_blocks == 3
    assert again.block_table[:3] == [0, 0, 0]
    assert all(again.block_table[3:])
    blocks.free(again)
    blocks.free(greedy)
    assert blocks.num_used == 0


def test_a_prefix_whose_window_is_gone_is_not_found() -> None:
    blocks = BlockManager(8, 4, sliding_window=6)
    prompt = list(range(21))
    first = sequence_of(prompt)
    for _ in range(3):
        compute(blocks, first, 7)
    blocks.free(first)
    everything = sequence_of([99] * 28, 1)
    assert blocks.allocate(everything, 28)
    blocks.free(everything)
    again = sequence_of(prompt, 2)
    blocks.match_prefix(again)
    assert again.block_table == []
    assert again.num_cached_tokens == 0


def test_steps_tell_of_blocks_that_were_given_back_and_tell_nothing_twice() -> None:
    blocks = BlockManager(20, 4, sliding_window=6)
    table = RunningTable(2, 4, loses_blocks=True)
    on_device: dict[int, int] = {}
    seq = sequence_of([1] * 5)
    table.enter(seq)
    compute(blocks, seq, 5)
    for token in range(20):
        seq.append(token)
        assert blocks.allocate(seq, seq.num_tokens)
        for slot, column, block in decode_batch([seq], table).new_blocks_N3.tolist():
            assert slot == seq.slot
            assert on_device.get(column) != block, "told before"
            on_device[column] = block
        assert [on_device[column] for column in range(len(seq.block_table))] == seq.block_table
        compute(blocks, seq, 1)
    assert seq.num_null_blocks > 3
