"""Random traffic through scheduler and block manager: no block leaked, shared wrongly or freed twice."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.request.prompt_inputs import PromptInputs
from tests.core.traffic import MAX_LEN, World, next_token
from tests.full_set import examples


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 16]), spare=st.integers(0, 30),
       max_num_seqs=st.integers(1, 8), num_tokens=st.integers(1, 50), caching=st.booleans(),
       failing=st.sampled_from([0.0, 0.2]), unusable=st.sampled_from([0.0, 0.2]), drafts=st.sampled_from([0, 1, 5]),
       depth=st.integers(1, 2))
@example(seed=242, block_size=1, spare=0, max_num_seqs=2, num_tokens=1, caching=False, failing=0.0, unusable=0.0,
         drafts=5, depth=1)
def test_random_traffic_keeps_every_block_accounted_for(seed: int, block_size: int, spare: int, max_num_seqs: int,
                                                        num_tokens: int, caching: bool, failing: float,
                                                        unusable: float, drafts: int, depth: int) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens,
                             max_image_tokens=rng.randint(5, 12))
    world = World(rng, block_size, -(-MAX_LEN // block_size) + 1 + spare, limits, caching, depth=depth, drafts=drafts)
    world.failing, world.unusable = failing, unusable
    world.run()
    assert world.scheduler._table.num_free_slots == max_num_seqs
    assert not world.scheduler.has_unfinished()


def test_first_come_first_served() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=100, max_image_tokens=10)
    world = World(random.Random(1), 4, 40, limits, caching=False)
    for _ in range(6):
        world.add()
    order: list[int] = []
    while world.live:
        before = set(world.live)
        world.step()
        started = [seq.seq_id for seq in world.live.values() if seq.slot is not None]
        order += [number for number in sorted(started) if number not in order]
        assert len(before - set(world.live)) <= 2
    assert order == sorted(order)


def test_the_newest_is_preempted_and_ends_with_the_same_tokens() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=100, max_image_tokens=10)
    world = World(random.Random(3), 4, 16, limits, caching=True)
    for _ in range(4):
        world.add()
    sequences = list(world.live.values())
    while world.live:
        world.step()
    assert world.scheduler.num_preemptions > 0
    assert sequences[0].num_preemptions == 0
    for sequence in sequences:
        tokens = list(sequence.prompt.token_ids)
        while len(tokens) < sequence.num_tokens:
            tokens.append(next_token(tokens))
        assert sequence.tokens(0, sequence.num_tokens) == tokens


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 16]), spare=st.integers(0, 30),
       max_num_seqs=st.integers(1, 8), num_tokens=st.integers(1, 50))
def test_where_nothing_ends_early_two_steps_under_way_plan_as_one(seed: int, block_size: int, spare: int,
                                                                  max_num_seqs: int, num_tokens: int) -> None:
    """The same steps, of the same rows, with the same hits and preemptions. No prompt goes on with what another one's
    answer is: whether a token that has just been chosen is found depends on when it arrives."""
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, max_image_tokens=7)
    found = []
    for depth in (1, 2):
        world = World(random.Random(seed), block_size, -(-MAX_LEN // block_size) + 1 + spare, limits, True, depth=depth)
        for _ in range(12):
            start = [5] * world.rng.randint(1, MAX_LEN - 2)
            rest = world.rng.choices((6, 7), k=world.rng.randint(0, MAX_LEN - 2 - len(start)))
            sequence = world.add_prompt(PromptInputs([*start, *rest]))
            sequence.max_num_tokens = world.wanted_lens[sequence.seq_id]
        sequences = list(world.live.values())
        world.run_to_the_end()
        found.append((world.planned, [sequence.output_token_ids for sequence in sequences], world.blocks.counters,
                      world.scheduler.num_preemptions))
    assert found[0] == found[1]
