"""Same seed, same tokens: whatever the slot, the neighbours or the interruptions. And what a step may cost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import Sampler
from npu_runner.sampling.sampling_state import _mixed, _mixed_seed
from tests.runner.sampler_steps import (
    SEVERAL,
    VOCAB,
    Conversation,
    MemoryRunsOut,
    conversation,
    generate,
    make_sampler,
    run_together,
    spell,
    step,
)


@pytest.fixture(scope="module")
def table_VV() -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(11)) * 2


def add(sampler: Sampler, slot: int, one: Conversation) -> None:
    sampler.add(slot, one.params, one.prompt, one.output, seed=one.seed)


@pytest.fixture(scope="module")
def alone(table_VV) -> list[list[int]]:
    """40 tokens of each conversation, undisturbed."""
    return [generate(table_VV, conversation(n), 40, encode=spell) for n in range(len(SEVERAL))]


def test_slot_makes_no_difference(table_VV, alone):
    for number, expected in enumerate(alone):
        assert generate(table_VV, conversation(number), 40, slot=5 + number, encode=spell) == expected


def test_seeds_are_mixed_as_published():
    """By the first output of SplitMix64 with seed 1234567, which its implementations share."""
    sampler = make_sampler(VOCAB)
    assert _mixed_seed(1234567) == 6457827717110365317
    assert _mixed(np.array([1234567], dtype=np.uint64))[0] == 6457827717110365317
    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 987654321987654321):
        sampler.add(3, SamplingParams(), [1], seed=seed)
        words = np.array([seed & 2**64 - 1], dtype=np.uint64)
        bits = int(_mixed(_mixed(words))[0])
        assert sampler.host_inputs(np.array([3]))[0] == np.float32((bits >> 40) * 2.0**-24), seed


def test_neighbours_make_no_difference(table_VV, alone):
    sampler = make_sampler(VOCAB, 16, spell)
    order = random.Random(0).sample(range(16), len(SEVERAL))
    together = {slot: conversation(number) for number, slot in enumerate(order)}
    for slot, one in together.items():
        add(sampler, slot, one)
    run_together(sampler, table_VV, together, 40)
    assert [one.output for one in together.values()] == alone


def test_coming_going_and_preemption_make_no_difference(table_VV, alone):
    """Random traffic: sequences join late, are preempted, return to other slots, and slots are reused."""
    rng = random.Random(4)
    sampler = make_sampler(VOCAB, 6, spell)
    waiting = [conversation(number) for number in range(len(SEVERAL))]
    everyone, running, free = list(waiting), {}, list(range(6))
    while waiting or running:
        while waiting and free and (not running or rng.random() < 0.6):
            slot = free.pop(rng.randrange(len(free)))
            running[slot] = waiting.pop(rng.randrange(len(waiting)))
            add(sampler, slot, running[slot])
        batch = dict(rng.sample(sorted(running.items(), key=lambda item: item[0]), rng.randint(1, len(running))))
        run_together(sampler, table_VV, batch, 1)
        for slot, one in list(running.items()):
            is_finished = len(one.output) == 40
            if is_finished or rng.random() < 0.05:
                sampler.remove(slot)
                free.append(slot)
                del running[slot]
                if not is_finished:
                    waiting.append(one)
    assert [one.output for one in everyone] == alone


def test_a_step_that_runs_out_of_memory_can_be_made_again(table_VV, alone):
    assert_steps_can_be_made_again(table_VV, alone, every=150)


@pytest.mark.full("every third operator that fails; one in a hundred and fifty stays")
def test_a_step_that_runs_out_of_memory_anywhere_can_be_made_again(table_VV, alone):
    assert_steps_can_be_made_again(table_VV, alone, every=3)


def assert_steps_can_be_made_again(table_VV, alone, every):
    """Whichever operator it is that fails, in steps that sequences join and in others."""
    most = 12  # tokens, of which memory runs out for the first five
    for at in itertools.count(1, every):
        sampler, failing = make_sampler(VOCAB, 16, spell), MemoryRunsOut(at)
        everyone = {number: conversation(number) for number in range(len(SEVERAL))}
        for number_step in range(most):
            for number in {0: range(6), 2: range(6, len(SEVERAL))}.get(number_step, ()):
                add(sampler, number, everyone[number])
            running = {slot: one for slot, one in everyone.items() if number_step >= 2 or slot < 6}
            if number_step >= 5:
                run_together(sampler, table_VV, running, 1)
                continue
            try:
                with failing:
                    run_together(sampler, table_VV, running, 1)
            except MemoryError:
                run_together(sampler, table_VV, running, 1)
        got = [one.output for one in everyone.values()]
        assert got == [tokens[: len(output)] for tokens, output in zip(alone, got, strict=True)], f"operator {at}"
        if failing.num_left > 0:
            break
    assert at > 200


def test_different_seeds_give_different_tokens(table_VV):
    outputs = {tuple(generate(table_VV, Conversation(SamplingParams(), [1], seed), 20)) for seed in range(50)}
    assert len(outputs) == 50


@pytest.mark.parametrize("num_threads", [1, 2])
def test_batch_size_makes_no_difference_over_a_large_vocabulary(num_threads):
    """Reductions over long rows must not be split differently for small batches."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        logits_V = torch.randn(40_001, generator=torch.Generator().manual_seed(0))
        for params in (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(top_k=2000, top_p=0.99)):
            uniforms = np.random.default_rng(0).random(16, dtype=np.float32).tolist()
            sampler = make_sampler(len(logits_V), 16)
            for slot in range(16):
                sampler.add(slot, params, [0], seed=0)
            together = step(sampler, logits_V.expand(16, -1), range(16), uniforms).token_ids_B.tolist()
            single = [int(step(sampler, logits_V[None], [slot], [uniforms[slot]]).token_ids_B) for slot in range(16)]
            assert together == single
    finally:
        torch.set_num_threads(before)


# -- cost ----------------------------------------------------------------------------------------------------------


class OperatorLog(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@contextmanager
def operators() -> Iterator[list[str]]:
    with OperatorLog() as log:
        yield log.names


WAITS_FOR_VALUES = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "is_nonzero", "equal",
                    "repeat_interleave", "index", "index_put_", "index_put"}


def test_no_step_reads_the_device_or_shapes_by_values(table_VV):
    """index and index_put are fine with integers, but nothing here needs them."""
    sampler = make_sampler(VOCAB, 16, spell)
    for number in range(len(SEVERAL)):
        add(sampler, number, conversation(number))
    with operators() as names:
        for _ in range(2):
            step(sampler, table_VV[: len(SEVERAL)], range(len(SEVERAL)))
    assert len(names) > 100
    assert not WAITS_FOR_VALUES & set(names)


def test_greedy_rows_cost_an_argmax_a_check_and_the_table_for_the_host():
    sampler = make_sampler(VOCAB)
    for slot in range(4):
        sampler.add(slot, SamplingParams(temperature=0.0), [1], seed=slot)
    logits_BV = torch.randn(4, VOCAB)
    step(sampler, logits_BV, range(4))
    with operators() as names:
        step(sampler, logits_BV, range(4))
    assert not {"exp_", "exp", "cumsum", "topk", "sort", "scatter_add_", "index_select", "clone"} & set(names)
    assert len(names) <= 21


def test_features_cost_nothing_in_steps_without_their_rows(table_VV):
    """A neighbour that is registered, but not in the step, has no part in it."""
    sampler = make_sampler(VOCAB, 16, spell)
    for number in range(len(SEVERAL)):
        add(sampler, number, conversation(number))
    step(sampler, table_VV[: len(SEVERAL)], range(len(SEVERAL)))
    with operators() as names:
        step(sampler, table_VV[:1], [0])
    assert len(names) <= 21


def test_min_tokens_costs_nothing_once_reached():
    sampler = make_sampler(VOCAB)
    sampler.add(0, SamplingParams(temperature=0.0, min_tokens=2), [1], seed=0)
    lengths = []
    for _ in range(4):
        with operators() as names:
            step(sampler, torch.zeros(1, VOCAB), [0])
        lengths.append(len(names))
    assert min(lengths[:2]) > max(lengths[2:])


def test_memory_for_counts_is_taken_when_first_needed():
    sampler = make_sampler(VOCAB)
    logits_BV = torch.zeros(1, VOCAB)
    sampler.add(0, SamplingParams(top_p=0.5, logit_bias={3: 1.0}), [1], seed=0)
    with operators() as names:
        step(sampler, logits_BV, [0])
    assert "zeros" not in names
    sampler.add(1, SamplingParams(presence_penalty=0.5), [1], seed=0)
    with operators() as names:
        step(sampler, logits_BV, [1])
    assert "zeros" in names


def test_logits_are_left_as_they_were(table_VV):
    sampler = make_sampler(VOCAB, 16, spell)
    for number in range(len(SEVERAL)):
        add(sampler, number, conversation(number))
    logits_BV = table_VV[: len(SEVERAL)].clone()
    step(sampler, logits_BV, range(len(SEVERAL)))
    assert torch.equal(logits_BV, table_VV[: len(SEVERAL)])
