"""Random traffic through scheduler and block manager: no block leaked, shared wrongly or freed twice."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from npu_runner.core.scheduler import SchedulerLimits
from tests.core.traffic import MAX_LEN, World, next_token, tokens_of


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), block_size=st.sampled_from([1, 3, 4, 16]), spare=st.integers(0, 30),
       max_num_seqs=st.integers(1, 8), num_tokens=st.integers(1, 50), caching=st.booleans(),
       failing=st.sampled_from([0.0, 0.2]), most_tokens=st.sampled_from([1, 3]))
@example(seed=242, block_size=1, spare=0, max_num_seqs=2, num_tokens=1, caching=False, failing=0.0, most_tokens=3)
def test_random_traffic_keeps_every_block_accounted_for(seed: int, block_size: int, spare: int, max_num_seqs: int,
                                                        num_tokens: int, caching: bool, failing: float,
                                                        most_tokens: int) -> None:
    rng = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, max_model_len=MAX_LEN,
                             max_image_tokens=rng.randint(5, 12))
    world = World(rng, block_size, -(-MAX_LEN // block_size) + 1 + spare, limits, caching)
    world.failing, world.most_tokens = failing, most_tokens
    world.run()
    assert world.scheduler._table.num_free_slots == max_num_seqs
    assert not world.scheduler.has_unfinished()


def test_first_come_first_served() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=100, max_model_len=MAX_LEN, max_image_tokens=10)
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
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=MAX_LEN, max_image_tokens=10)
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
        assert tokens_of(sequence) == tokens
