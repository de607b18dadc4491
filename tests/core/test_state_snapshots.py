"""Random traffic for a model with state: whatever a step reads as a sequence's state is that of all its tokens so far.

The device is a table of states by slot: a state is the list of the tokens, and rows of images, that it has seen.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from npu_runner.core.batch import ScheduledBatch
from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.core.sequence import Sequence
from npu_runner.core.state_snapshots import STATE_CHUNK, SnapshotCounters, StateSnapshots, state_alignment
from npu_runner.platforms.gated_delta import CHUNK_SIZE
from npu_runner.request.prompt_inputs import ImageInput, ImageSpan, PromptInputs
from tests.core.traffic import MAX_LEN, World
from tests.full_set import examples

MAX_SEQS = 8
FIRST_SPARE = 50
FIRST_SNAPSHOT = 100


class StateWorld(World):
    """Every row goes on from what lies in its slot, or from nothing where it is the first of its sequence. Behind each
    draft its state is left in a slot of its own."""

    def __init__(self, rng: random.Random, block_size: int, num_blocks: int, limits: SchedulerLimits,
                 num_snapshots: int, depth: int, drafts: int):
        assert limits.state_alignment is not None
        snapshots = StateSnapshots(num_snapshots, FIRST_SNAPSHOT, limits.state_alignment)
        super().__init__(rng, block_size, num_blocks, limits, True, snapshots, depth=depth, drafts=drafts)
        self.snapshots, self.alignment = snapshots, limits.state_alignment
        self.states: dict[int, list[Any]] = {}

    def add(self) -> None:
        super().add()
        if self.rng.random() < 0.3:
            prompt = next(reversed(self.live.values())).prompt
            for _ in range(self.rng.randint(1, 3)):
                self.add_prompt(prompt)

    def _seen(self, sequence: Sequence, end: int, drafts: list[int]) -> list[Any]:
        """What a state sees of the first `end` tokens, of which the last ones are `drafts`."""
        seen: list[Any] = [*self.tokens_of(sequence, end - len(drafts)), *drafts]
        for span in sequence.prompt.spans:
            for place in range(span.start, min(span.start + span.num_tokens, end)):
                seen[place] = sequence.prompt.images[span.image_index].content_hash, place - span.start
        return seen

    def _state_slots(self, batch: ScheduledBatch) -> list[list[int]]:
        """Of each row: one, or where there are drafts one of each token."""
        if batch.state_slots is None:
            return [[slot] for slot in batch.slots_B.tolist()]
        slots = batch.state_slots.tolist()
        assert len(set(slots)) == len(slots), "two tokens leave their states in one slot"
        allowed = {*range(MAX_SEQS), *range(FIRST_SPARE, FIRST_SPARE + self.num_spares)}
        assert set(slots) <= allowed
        if not batch.has_drafts:
            assert len(slots) == batch.batch_size
            return [[slot] for slot in slots]
        assert len(slots) == batch.num_tokens
        return [part.tolist() for part in np.split(batch.state_slots, np.cumsum(batch.query_lens_B)[:-1])]

    @property
    def num_spares(self) -> int:
        return len(self.limits.state_spares or ())

    def _load_states(self, batch: ScheduledBatch) -> None:
        self._check_plan(batch)
        for source, slot in batch.state_loads:
            self.states[slot] = list(self.states[source])

    def _check_plan(self, batch: ScheduledBatch) -> None:
        loaded = {source for source, _ in batch.state_loads}
        saved = [slot for _, _, slot in batch.state_saves]
        assert len(set(saved)) == len(saved)
        assert loaded.isdisjoint(saved)
        assert loaded | set(saved) <= set(range(FIRST_SNAPSHOT, FIRST_SNAPSHOT + self.snapshots.num_snapshots))
        targets = [slot for _, slot in batch.state_loads]
        assert len(set(targets)) == len(targets)
        assert set(targets) <= {slots[0] for slots in self._state_slots(batch)}
        assert batch.is_prefill or not (loaded or saved)

    def _write_and_read(self, batch: ScheduledBatch, row: int, sequence: Sequence, drafts: list[int]) -> None:
        super()._write_and_read(batch, row, sequence, drafts)
        slots, end = self._state_slots(batch)[row], int(batch.context_lens_B[row])
        start, seen = end - int(batch.query_lens_B[row]), self._seen(sequence, end, drafts)
        state = [] if start == 0 else list(self.states[slots[0]])
        assert state == seen[:start], "somebody else's state"
        for place in range(start, end):
            state.append(seen[place])
            self.states[slots[place - start if batch.has_drafts else 0]] = list(state)
            for _, offset, snapshot in (save for save in batch.state_saves if save[:2] == (row, place + 1 - start)):
                assert offset % self.alignment == 0
                self.states[snapshot] = list(state)
        assert all(offset <= end - start for number, offset, _ in batch.state_saves if number == row)
        if batch.is_prefill:
            assert start % self.alignment == 0, "warm and cold split alike"
            assert end % self.alignment == 0 or batch.samples_B[row]

    def _check_blocks(self) -> None:
        super()._check_blocks()
        snapshots = self.snapshots
        slots = [*snapshots._free, *snapshots._slot_of_key.values(), *snapshots._saving.values()]
        assert sorted(slots) == list(range(FIRST_SNAPSHOT, FIRST_SNAPSHOT + snapshots.num_snapshots))
        assert not snapshots._saving
        held = self.scheduler._table.states
        if held is not None and not self.steps:
            every = [*held._slot_of_row.tolist(), *held._free]
            assert sorted(every) == [*range(MAX_SEQS), *range(FIRST_SPARE, FIRST_SPARE + self.num_spares)]
        assert set(snapshots._slot_of_key) <= set(self.blocks._block_of_hash), "nobody finds the way to it"


def make_world(*, block_size: int = 2, alignment: int = 4, num_blocks: int = 200, num_tokens: int = 100,
               num_snapshots: int = 8, seed: int = 0, max_image_tokens: int = 20,
               depth: int = 1, drafts: int = 0, num_spares: int = 0) -> StateWorld:
    spares = range(FIRST_SPARE, FIRST_SPARE + num_spares) if drafts else None
    limits = SchedulerLimits(max_num_seqs=MAX_SEQS, max_num_batched_tokens=num_tokens,
                             max_image_tokens=max_image_tokens, state_alignment=alignment, state_spares=spares)
    return StateWorld(random.Random(seed), block_size, num_blocks, limits, num_snapshots, depth, drafts)


def serve(world: StateWorld, *prompts: PromptInputs, length: int | None = None) -> list[Sequence]:
    sequences = [world.add_prompt(prompt, length) for prompt in prompts]
    while world.live:
        world.step()
    return sequences


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(1, 3), (2, 4), (4, 4), (3, 6), (4, 12), (8, 8)]),
       spare=st.integers(0, 30), num_tokens=st.integers(0, 40), num_snapshots=st.integers(1, 9),
       failing=st.sampled_from([0.0, 0.2]), unusable=st.sampled_from([0.0, 0.2]), depth=st.integers(1, 2))
def test_every_state_is_that_of_its_tokens(seed: int, sizes: tuple[int, int], spare: int, num_tokens: int,
                                           num_snapshots: int, failing: float, unusable: float,
                                           depth: int) -> None:
    block_size, alignment = sizes
    world = make_world(block_size=block_size, alignment=alignment, num_blocks=-(-MAX_LEN // block_size) + 1 + spare,
                       num_tokens=alignment + num_tokens, num_snapshots=num_snapshots, seed=seed,
                       max_image_tokens=seed % 8 + 5, depth=depth)
    world.failing, world.unusable = failing, unusable
    world.run(restarts=True)
    assert world.scheduler._table.num_free_slots == MAX_SEQS


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32), sizes=st.sampled_from([(1, 3), (2, 4), (4, 12)]), spare=st.integers(0, 30),
       failing=st.sampled_from([0.0, 0.2]), unusable=st.sampled_from([0.0, 0.2]), drafts=st.integers(1, 5),
       num_spares=st.integers(1, 40))
def test_every_state_behind_drafts_is_that_of_the_tokens_that_were_kept(
        seed: int, sizes: tuple[int, int], spare: int, failing: float, unusable: float, drafts: int,
        num_spares: int) -> None:
    block_size, alignment = sizes
    world = make_world(block_size=block_size, alignment=alignment, num_blocks=-(-MAX_LEN // block_size) + 1 + spare,
                       num_tokens=alignment + 30, num_snapshots=4, seed=seed, drafts=drafts, num_spares=num_spares)
    world.failing, world.unusable = failing, unusable
    world.run(restarts=True)
    assert world.scheduler._table.num_free_slots == MAX_SEQS


def test_no_step_has_more_drafts_than_there_are_spare_states() -> None:
    world = make_world(drafts=4, num_spares=3)
    serve(world, *[PromptInputs([1, 2, 3])] * 4, length=30)
    drafted = [sum(lens) - len(lens) for _, lens in world.planned[1:]]
    assert max(drafted) == 3


def test_a_repeated_prompt_goes_on_from_its_last_boundary() -> None:
    world = make_world()
    prompt = PromptInputs(list(range(18)))
    serve(world, prompt)
    assert world.snapshots.counters == SnapshotCounters(taken=1)
    [again] = serve(world, prompt)
    assert again.num_cached_tokens == 16
    assert world.snapshots.counters == SnapshotCounters(taken=1, used=1)


def test_a_prompt_that_ends_at_a_boundary_leaves_its_last_token_to_compute() -> None:
    world = make_world()
    prompt = PromptInputs(list(range(16)))
    serve(world, prompt)
    [again] = serve(world, prompt)
    assert again.num_cached_tokens == 12


def test_snapshots_are_taken_where_prompts_part() -> None:
    world = make_world()
    common = [7] * 9
    serve(world, PromptInputs([*common, *range(20, 31)]))
    [second] = serve(world, PromptInputs([*common, *range(40, 51)]))
    assert second.num_cached_tokens == 0, "blocks, but no state"
    assert second.snapshot_positions == (8, 16)
    [third] = serve(world, PromptInputs([*common, *range(60, 71)]))
    assert third.num_cached_tokens == 8
    assert world.snapshots.counters == SnapshotCounters(taken=4, used=1)


def test_completions_of_a_prompt_that_fills_a_step_go_on_from_the_first() -> None:
    world = make_world(num_tokens=32)
    first, *others = serve(world, *[PromptInputs(list(range(22)))] * 4)
    assert first.num_cached_tokens == 0
    assert [seq.num_cached_tokens for seq in others] == [20] * 3


def planned(world: StateWorld) -> list[tuple[list[str], list[int]]]:
    """Requests and query lengths of every prefill, until all have ended."""
    while world.live:
        world.step()
    return [(names, lens) for names, lens in world.planned if max(lens) > 1]


def test_copies_wait_one_step_for_the_snapshot_that_it_takes_and_others_join_meanwhile() -> None:
    world = make_world()
    for prompt in ([1] * 11, [1] * 11, [2] * 11, [1] * 11, [2] * 11):
        world.add_prompt(PromptInputs(prompt))
    assert planned(world) == [(["0", "2"], [11, 11]), (["1", "3", "4"], [3, 3, 3])]
    assert world.snapshots.counters == SnapshotCounters(taken=2, used=3)


def test_prompts_that_begin_alike_wait_for_the_second_which_takes_the_snapshot_where_they_part() -> None:
    world = make_world()
    for last in range(4):
        world.add_prompt(PromptInputs([*range(9), *[20 + last] * 9]))
    assert planned(world) == [(["0", "1"], [18, 18]), (["2", "3"], [10, 10])]
    assert world.snapshots.counters == SnapshotCounters(taken=5, used=2)


def test_without_room_for_a_snapshot_copies_are_computed_at_once() -> None:
    world = make_world(num_snapshots=1)
    for prompt in ([1] * 11, [2] * 11, [2] * 11, [1] * 11):
        world.add_prompt(PromptInputs(prompt))
    assert planned(world) == [(["0", "1", "2"], [11, 11, 11]), (["3"], [3])]


def test_a_copy_does_not_wait_a_second_time() -> None:
    """Its snapshot is gone by the next step: another prompt's takes the one slot. It is computed then, whole."""
    world = make_world(num_snapshots=1)
    first, copy = (world.add_prompt(PromptInputs([1] * 11)) for _ in range(2))
    world.step()
    assert (first.slot is not None, copy.slot) == (True, None)
    world.snapshots.free(next(iter(world.snapshots._slot_of_key)))
    assert world.scheduler.schedule() is not None
    assert copy.slot is not None
    assert copy.num_cached_tokens == 0


def test_nothing_is_cut_behind_a_copy_that_waits() -> None:
    world = make_world(num_tokens=16)
    for prompt in ([1] * 11, [1] * 11, [2] * 30):
        world.add_prompt(PromptInputs(prompt))
    assert planned(world)[:2] == [(["0"], [11]), (["1", "2"], [3, 12])]


def test_the_least_recently_used_snapshot_goes_first() -> None:
    world = make_world(num_snapshots=2)
    prompts = [PromptInputs([n] * 6) for n in range(3)]
    serve(world, prompts[0])
    serve(world, prompts[1])
    serve(world, prompts[0])
    serve(world, prompts[2])
    assert world.snapshots.counters == SnapshotCounters(taken=3, used=1, evicted=1)
    assert serve(world, prompts[0])[0].num_cached_tokens == 4
    assert serve(world, prompts[1])[0].num_cached_tokens == 0


def test_a_snapshot_goes_with_the_block_that_it_follows() -> None:
    world = make_world(num_blocks=MAX_LEN // 2 + 1)
    prompt = PromptInputs([1] * 6)
    serve(world, prompt)
    serve(world, *[PromptInputs([n] * (MAX_LEN - 4)) for n in range(2, 5)])
    assert serve(world, prompt)[0].num_cached_tokens == 0
    assert world.snapshots.counters.evicted > 0


def test_a_prefix_computed_again_lives_as_long_as_its_new_blocks() -> None:
    world = make_world(num_blocks=29)
    common = [7] * 8
    serve(world, PromptInputs([*common, *range(20, 26)]), length=15)
    again = world.add_prompt(PromptInputs([*common, *range(30, 36)]), MAX_LEN)
    world.step()
    other = world.add_prompt(PromptInputs([1] * 36), 37)
    while other.seq_id in world.live:
        world.step()
    assert again.seq_id in world.live, "it holds the prefix, and the first copy is gone"
    third = world.add_prompt(PromptInputs([*common, 40, 41]))
    while world.live:
        world.step()
    assert third.num_cached_tokens == 8
    assert world.scheduler.num_preemptions == 0


def test_a_step_that_is_rolled_back_leaves_no_snapshot() -> None:
    world = make_world()
    prompt = PromptInputs(list(range(18)))
    sequence = world.add_prompt(prompt)
    batch = world.scheduler.schedule()
    assert batch is not None
    assert [save[:2] for save in batch.state_saves] == [(0, 16)]
    world.scheduler.rollback()
    world.step()
    assert sequence.num_cached_tokens == 0
    assert world.snapshots.counters == SnapshotCounters(taken=1)


def test_images_that_fill_a_step_do_not_stop_a_chunk_before_its_boundary() -> None:
    """Between the two lies no boundary, and together they are more than a step may show to the tower."""
    images = [ImageInput(bytes([n]) * 16, None, (1, 2, 16), 8) for n in range(2)]  # type: ignore[arg-type]
    prompt = PromptInputs([9] * 20, images, [ImageSpan(1, 8, 0), ImageSpan(10, 8, 1)])
    world = make_world(alignment=12, max_image_tokens=8)
    [sequence] = serve(world, prompt)
    assert sequence.num_computed_tokens == 0, "it has ended"


def test_limits_are_never_lowered_below_what_a_chunk_needs() -> None:
    world = make_world(alignment=12)
    world.scheduler.lower_limits(is_prefill=True, num_tokens=3, num_seqs=1)
    assert world.scheduler.limits.max_num_batched_tokens == 12


@pytest.mark.parametrize(("block_size", "alignment"), [(16, 64), (128, 128), (48, 192), (64, 64)])
def test_alignment_suits_blocks_and_kernels(block_size: int, alignment: int) -> None:
    assert state_alignment(block_size) == alignment
    assert STATE_CHUNK == CHUNK_SIZE, "what kernels can hand out"
