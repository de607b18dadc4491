"""A draw that is recorded with its decode graph against one that is not, over random traffic: every token is the same.

The recorder here runs again what it was given, over the same memory, as a device's does. In tests/cuda/test_sample.py a
GPU records it.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.platforms.transfers import Download
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import NO_TOKEN, Sampler, SamplerOutput
from tests.full_set import only_full
from tests.runner.sampler_steps import EOS

SLOTS, SIZE, VOCABULARY = 6, 4, 50


def draw(logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor) -> Tensor:
    """The definition of Ops.softmax_sampler in float64, temperature 0 included."""
    logits_BV = logits_BV.double()
    shares_BV = (logits_BV / torch.where(temperature_B1 == 0, 1, temperature_B1)).softmax(-1)
    sampled_B1 = (shares_BV.cumsum(-1) <= uniform_B1.double()).sum(-1, keepdim=True)
    tokens_B1 = torch.where(temperature_B1 == 0, logits_BV.argmax(-1, keepdim=True), sampled_B1)
    return torch.where(shares_BV[:, :1].isnan(), -1, tokens_B1).int()


class Graph:
    """The memory of a decode graph of SIZE rows, and what was recorded over it."""

    def __init__(self, sampler: Sampler):
        self.sampler = sampler
        self.logits_PV = torch.zeros(SIZE, VOCABULARY)
        self.arrays = {"slots": torch.zeros(SIZE, dtype=torch.int64), "uniforms": torch.zeros(SIZE),
                       "receipts": torch.zeros(SIZE, dtype=torch.int32)}
        self.num_replays = 0
        sampler.record(self.logits_PV, self.arrays, self._record)

    def _record(self, run: Callable[[], None]) -> Callable[[], None]:
        run()

        def replay() -> None:
            self.num_replays += 1
            run()

        return replay

    def step(self, logits_BV: Tensor, slots: np.ndarray, receipt: int, *, at: Tensor | None = None) -> SamplerOutput:
        num_rows = len(slots)
        self.logits_PV[:num_rows] = logits_BV
        self.logits_PV[num_rows:] = torch.nan  # padding is nobody's
        for name, values in {"slots": slots, "uniforms": self.sampler.host_inputs(slots),
                             "receipts": np.full(num_rows, receipt)}.items():
            self.arrays[name].zero_()
            self.arrays[name][:num_rows] = torch.from_numpy(values)
        inputs = (array[:num_rows] for array in self.arrays.values())
        return self.sampler((self.logits_PV if at is None else at)[:num_rows], *inputs, slots, graph_size=SIZE)


def sampler() -> Sampler:
    return Sampler(vocab_size=VOCABULARY, max_num_seqs=SLOTS, eos_token_ids=[EOS], device=torch.device("cpu"),
                   softmax_sampler=draw, samples_greedily=True, download=lambda x: Download(x.clone()))


def eager(sampler: Sampler, logits_BV: Tensor, slots: np.ndarray, receipt: int) -> SamplerOutput:
    receipts_B = torch.full((len(slots),), receipt, dtype=torch.int32)
    return sampler(logits_BV, torch.from_numpy(slots), torch.from_numpy(sampler.host_inputs(slots)), receipts_B, slots)


def some_params(random: Random) -> SamplingParams:
    plain = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 3.0}]
    others = [{"temperature": 0.0, "logprobs": 2}, {"temperature": 0.9, "repetition_penalty": 1.5},
              {"temperature": 1.0, "min_tokens": 3, "max_tokens": 9}, {"temperature": 1.0, "top_k": 3},
              {"temperature": 1.0, "max_thinking_tokens": 2}]
    return SamplingParams(**random.choice(others if random.random() < 0.05 else plain))  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", [0, *only_full("nineteen more seeds", *range(1, 20))])
def test_every_token_is_that_of_the_sampler_operator_by_operator(seed: int) -> None:
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    graph, other = Graph(sampler()), sampler()
    running: set[int] = set()
    under_way: list[tuple[SamplerOutput, SamplerOutput, int]] = []
    for number in range(300):
        for slot in range(SLOTS):
            if random.random() < 0.05:
                running.discard(slot)
                params = some_params(random)
                for each in (graph.sampler, other):
                    each.remove(slot)
                    each.add(slot, params, [1, 2], seed=100 * seed + slot)
                running.add(slot)
        if not running:
            continue
        slots = np.array(random.sample(sorted(running), min(len(running), random.randint(1, SIZE))), dtype=np.int32)
        logits_BV = torch.randn(len(slots), VOCABULARY, generator=generator) * 3
        if random.random() < 0.05:
            logits_BV[0, 7] = torch.nan
        recorded, expected = graph.step(logits_BV, slots, number), eager(other, logits_BV, slots, number)
        assert torch.equal(recorded.next_input_ids_B, expected.next_input_ids_B)
        under_way.append((recorded, expected, number))
        while len(under_way) > random.randint(0, 1):  # a step's tokens are fetched while the next one writes its own
            a, b, receipt = under_way.pop(0)
            a_host, b_host = a.to_host(), b.to_host()
            np.testing.assert_array_equal(a_host.token_ids_B, b_host.token_ids_B)
            assert (a_host.receipts_B == receipt).all()
            assert (a_host.records_LC is None) == (b_host.records_LC is None)
    assert 100 < graph.num_replays < 300, "plain steps are replayed, and no others"


def test_a_step_that_asks_for_more_is_not_replayed() -> None:
    graph = Graph(sampler())
    graph.sampler.add(0, SamplingParams(temperature=0.0), [1], seed=0)
    graph.sampler.add(1, SamplingParams(temperature=0.0, logprobs=1), [1], seed=0)
    for slots, replays in (([0], 1), ([0, 1], 1), ([1], 1), ([0], 2)):
        graph.step(torch.randn(len(slots), VOCABULARY), np.array(slots, dtype=np.int32), 0)
        assert graph.num_replays == replays


def test_a_row_that_is_no_number_has_no_token_and_a_valid_next_input() -> None:
    graph = Graph(sampler())
    for slot in range(2):
        graph.sampler.add(slot, SamplingParams(temperature=float(slot)), [1], seed=0)
    logits_BV = torch.zeros(2, VOCABULARY)
    logits_BV[:, 3] = torch.nan
    output = graph.step(logits_BV, np.arange(2, dtype=np.int32), 0)
    assert output.to_host().token_ids_B.tolist() == [NO_TOKEN] * 2
    assert (output.next_input_ids_B >= 0).all()
    assert graph.num_replays == 1


def test_logits_of_another_graph_are_refused() -> None:
    graph = Graph(sampler())
    graph.sampler.add(0, SamplingParams(temperature=0.0), [1], seed=0)
    with pytest.raises(AssertionError, match="its own graph's logits"):
        graph.step(torch.zeros(1, VOCABULARY), np.zeros(1, dtype=np.int32), 0, at=torch.zeros(SIZE, VOCABULARY))
