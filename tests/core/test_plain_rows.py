"""Rows that are booked at once against the same rows booked one by one: over random traffic nothing differs."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from npu_runner.checkpoint.files import resolve_checkpoint
from npu_runner.core.sequence import Sequence
from npu_runner.engine.generation import End, Generation, PlainRows
from npu_runner.prompts.text.tokenizer import read_tokenizer
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.runner.base import StepLogprobs
from npu_runner.sampling.sampler import ALL_BANNED, NO_TOKEN
from tests.full_set import only_full

SLOTS, VOCABULARY, STEPS = 6, 40, 400
TOKENIZER = read_tokenizer(resolve_checkpoint("shapes-vl"))


def generation(random: Random, seq_id: int) -> Generation:
    max_tokens = random.randint(1, 12)
    params = SamplingParams(
        max_tokens=max_tokens, min_tokens=random.randint(0, max_tokens), ignore_eos=random.random() < 0.3,
        stop_token_ids=random.sample(range(VOCABULARY), random.randint(0, 2)),
        stop=["5"] if random.random() < 0.2 else [], logprobs=1 if random.random() < 0.2 else None)
    prompt = PromptInputs([1, 2, 3])
    sequence = Sequence(seq_id, seq_id, str(seq_id), 0, prompt, params, seed=0, max_num_tokens=3 + max_tokens)
    return Generation(sequence, TOKENIZER, frozenset(params.stop_token_ids).union(() if params.ignore_eos else (0,)))


def launch(sequence: Sequence) -> None:
    """A step is under way that is to bring it a token."""
    sequence.num_expected += 1
    sequence.num_tokens += 1


class Running:
    """One engine's view: the generation of each slot, and how every one that is over has ended."""

    def __init__(self, *, at_once: bool):
        self.rows = PlainRows(SLOTS) if at_once else None
        self.by_slot: dict[int, Generation] = {}
        self.ended: list[tuple[int, End, list[int], int, bytes | None]] = []

    def step(self, slots: list[int], tokens: list[list[int]], *, is_prompt: bool, dropped: set[int]) -> None:
        lines = [[values[0], 1, slot, values[0]] for slot, values in zip(slots, tokens, strict=True)]
        records = np.array(lines, np.int32)
        logprobs = StepLogprobs(list(range(len(slots))), records)
        sequences = [None if slot in dropped else self.by_slot[slot].sequence for slot in slots]
        rows = range(len(slots))
        for sequence in sequences:
            if sequence is not None:
                launch(sequence)
        if self.rows is not None and not is_prompt:
            has_one_each = all(len(values) == 1 for values in tokens)
            brought = [values[0] for values in tokens] if has_one_each else tokens
            rows = self.rows.book(np.array(slots, dtype=np.int32), sequences, brought)
        for row in rows:
            if sequences[row] is None:
                continue
            one = self.by_slot[slots[row]]
            end = next((end for token in tokens[row] if (end := one.append(token, logprobs, row)) is not None), None)
            if end is not None:
                self.drop(slots[row], end)
            elif self.rows is not None:
                self.rows.record(slots[row], one)

    def drop(self, slot: int, end: End) -> None:
        one = self.by_slot.pop(slot)
        kept = None if one.logprobs is None else bytes(one.logprobs._packed)
        self.ended.append((one.sequence.seq_id, end, one.sequence.output_token_ids, one.sequence.num_tokens, kept))


@pytest.mark.parametrize("seed", [*range(14), *only_full("more seeds; a third of them stay", *range(14, 40))])
def test_what_ends_and_with_which_tokens_is_the_same(seed: int) -> None:
    random = Random(seed)
    both = Running(at_once=True), Running(at_once=False)
    started = 0
    for _ in range(STEPS):
        free = [slot for slot in range(SLOTS) if slot not in both[0].by_slot]
        if free and random.random() < 0.5:
            slots = random.sample(free, random.randint(1, len(free)))
            for slot in slots:
                state = random.getrandbits(64)
                for running in both:
                    running.by_slot[slot] = generation(Random(state), started)
                started += 1
            is_prompt, dropped = True, set()
        else:
            slots = random.sample(sorted(both[0].by_slot), len(both[0].by_slot))
            is_prompt = False
            dropped = {slot for slot in slots if random.random() < 0.02}
        tokens = [[random.choice([NO_TOKEN, ALL_BANNED]) if random.random() < 0.01 else random.randrange(VOCABULARY)]
                  for _ in slots]
        if tokens and not is_prompt and random.random() < 0.05:
            tokens[0] = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 3))]
        for running in both:
            running.step(slots, tokens, is_prompt=is_prompt, dropped=dropped)
            for slot in dropped:
                running.drop(slot, End("abort"))
        if both[0].rows is not None and random.random() < 0.01:
            both[0].rows.reset()
        assert both[0].ended == both[1].ended
        assert {slot: one.sequence.output_token_ids for slot, one in both[0].by_slot.items()} == {
            slot: one.sequence.output_token_ids for slot, one in both[1].by_slot.items()}
    assert {end.reason for _, end, *_ in both[0].ended} >= {"stop", "length", "abort"}


def test_a_plain_row_is_not_looked_at_by_itself() -> None:
    """The point of it: where nothing ends, no row is left to be booked one by one."""
    rows, running = PlainRows(SLOTS), []
    for slot in range(SLOTS):
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        sequence = Sequence(slot, slot, str(slot), 0, PromptInputs([1]), params, seed=0, max_num_tokens=11)
        running.append(Generation(sequence, TOKENIZER, frozenset({0})))
        running[-1].append(5, None, 0)
        rows.record(slot, running[-1])
    slots = np.arange(SLOTS, dtype=np.int32)
    sequences = [one.sequence for one in running]
    for _ in range(8):
        for sequence in sequences:
            launch(sequence)
        assert not rows.book(slots, sequences, [7] * SLOTS)
    assert rows.book(slots, sequences, [7] * SLOTS) == list(range(SLOTS)), "the last token is looked at"
    assert [(sequence.num_tokens, sequence.num_expected) for sequence in sequences] == [(10, 0)] * SLOTS
    assert [len(one.sequence.output_token_ids) for one in running] == [9] * SLOTS
