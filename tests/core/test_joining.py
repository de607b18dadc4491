"""When prompts that wait interrupt those that decode: counted in steps and in admissions that were refused."""

from __future__ import annotations

import random

import pytest

from npu_runner.core.scheduler import SchedulerLimits
from npu_runner.request.prompt_inputs import PromptInputs
from tests.core.traffic import World
from tests.full_set import only_full


def make_world(*, max_num_seqs: int, num_tokens: int, num_blocks: int = 4000, block_size: int = 16,
               depth: int = 1) -> World:
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=num_tokens, max_image_tokens=num_tokens)
    return World(random.Random(0), block_size, num_blocks, limits, True, depth=depth)


def add(world: World, number: int, length: int, num_output: int) -> None:
    prompt = PromptInputs([number] * length)
    sequence = world.add_prompt(prompt, length + num_output)
    sequence.max_num_tokens = length + num_output


def decode_steps(world: World) -> int:
    world.run_to_the_end()
    return sum(max(lens) == 1 for _, lens in world.planned)


@pytest.mark.parametrize(("count", "length", "num_output", "wanted", "depth"), [
    (16, 128, 8, 7, 1), (16, 128, 8, 7, 2),
    *only_full("longer prompts; one length stays", (6, 512, 40, 39, 1), (6, 512, 40, 39, 2), (6, 500, 40, 39, 1),
               (6, 500, 40, 39, 2))])
def test_prompts_that_all_can_join_wait_for_nobody(count: int, length: int, num_output: int, wanted: int,
                                                   depth: int) -> None:
    world = make_world(max_num_seqs=256, num_tokens=512, depth=depth)
    for number in range(count):
        add(world, number, length, num_output)
    assert decode_steps(world) == wanted


def test_half_a_step_of_tokens_is_worth_a_prefill_however_many_wait() -> None:
    """Two slots come free for ten that wait: no eighth of the slots, and not all of the queue."""
    world = make_world(max_num_seqs=32, num_tokens=512)
    for number in range(32):
        add(world, number, 4, 4 if number < 2 else 40)
    for number in range(10):
        add(world, 100 + number, 128, 2)
    while not any(lens == [128, 128] for _, lens in world.planned):
        world.step()
    num_decode = sum(max(lens) == 1 for _, lens in world.planned)
    assert num_decode == 3, "as soon as the two have ended"
    world.run_to_the_end()


def test_what_the_cache_already_has_is_no_work() -> None:
    """The same half a step of tokens, all of them cached but one block each: they go on waiting for each other."""
    world = make_world(max_num_seqs=32, num_tokens=512)
    for number in range(32):
        add(world, number % 2, 128, 4 if number < 2 else 40)
    for _ in range(10):
        add(world, 0, 128, 2)
    for _ in range(12):
        world.step()
    assert sum(len(lens) == 2 for _, lens in world.planned) == 0


def fed_one_by_one(world: World, count: int) -> int:
    numbers = iter(range(count))
    for number in numbers:
        add(world, number, 20, 12)
        world.step()
    return decode_steps(world)


def test_a_feed_of_one_prompt_a_step_is_gathered() -> None:
    """Prefills of an eighth of 64 slots, until the last prompts have come, which wait for nobody then."""
    world = make_world(max_num_seqs=64, num_tokens=512)
    assert fed_one_by_one(world, 100) == 99
    assert sum(max(lens) > 1 for _, lens in world.planned) == 14


def test_a_feed_with_gaps_is_gathered_until_it_ends() -> None:
    """A prompt each third step: after the last one a prefill waits for twice that, and no longer."""
    world = make_world(max_num_seqs=256, num_tokens=512)
    for number in range(4):
        add(world, number, 20, 4 if number else 200)
        for _ in range(3):
            world.step()
    assert sum(max(lens) > 1 for _, lens in world.planned) == 1
    for _ in range(4):
        world.step()
    assert [len(lens) for _, lens in world.planned if max(lens) > 1] == [1, 3]
    world.run_to_the_end()


def test_a_full_cache_costs_no_admission_until_something_was_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 prompts on 80 slots, and blocks for about 20 of them."""
    world = make_world(max_num_seqs=80, num_tokens=2048, num_blocks=200)
    refusals: list[tuple[int, int]] = []
    allocate = world.scheduler._allocate_prefill

    def counted(*arguments: object) -> bool:
        is_given = allocate(*arguments)  # type: ignore[arg-type]
        if not is_given:
            refusals.append((world.blocks.num_given_back, len(world.scheduler.running)))
        return is_given

    monkeypatch.setattr(world.scheduler, "_allocate_prefill", counted)
    lengths = random.Random(1)
    for number in range(100):
        add(world, number, lengths.randint(60, 200), lengths.randint(5, 60))
    num_steps = decode_steps(world)
    assert len(set(refusals)) == len(refusals), "asked again, and nothing had been freed"
    prefills = [lens for _, lens in world.planned if max(lens) > 1]
    assert len(refusals) <= len(prefills), (len(refusals), len(prefills), num_steps)


def test_a_long_queue_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(max_num_seqs=64, num_tokens=512)
    for number in range(2000):
        add(world, number % 250, 20, 12)
    looked_at = 0
    num_findable = world.blocks.num_findable_tokens

    def counted(sequence: object) -> int:
        nonlocal looked_at
        looked_at += 1
        return num_findable(sequence)  # type: ignore[arg-type]

    monkeypatch.setattr(world.blocks, "num_findable_tokens", counted)
    for _ in range(60):
        world.step()
    assert looked_at <= 8 * 60, "an eighth of the slots a step, at most"
