"""What the sampler bans is what transformers' processor bans of the output, and with a window what the definition bans;
wrong settings are errors by name."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoRepeatNGramLogitsProcessor

from npu_runner.errors import RequestError
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import ALL_BANNED
from tests.oracle.banned_ngrams import Ban
from tests.runner.sampler_steps import make_sampler, sample_one, step

VOCAB = 5


def rules(rng: random.Random) -> dict[str, Any]:
    size = rng.randint(2, 5)
    window = rng.choice([None, size, size + 1, size + 4, 70])
    return {"no_repeat_ngram_size": size, "no_repeat_ngram_window": window,
            "no_repeat_ngram_exempt_ids": rng.sample(range(VOCAB), rng.choice([0, 0, 1, 3]))}


@pytest.mark.parametrize("seed", range(6))
def test_bans_are_those_of_transformers_and_of_the_definition(seed: int) -> None:
    """Step by step, and for the same sequences when they return: tables grow, slots change hands, others stay away."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    sampler = make_sampler(VOCAB, 8)
    asked = {slot: rules(rng) for slot in range(0, 8, 2)}
    params = {slot: SamplingParams(temperature=0.0, **rule) for slot, rule in asked.items()}
    outputs: dict[int, list[int]] = {slot: [] for slot in asked}
    num_banned = 0
    for _ in range(150):
        for slot, output in outputs.items():
            if not output or rng.random() < 0.04:  # it begins, or was preempted and is back
                sampler.add(slot, params[slot], [0], list(output), seed=seed)
        running = rng.sample(sorted(asked), rng.randint(1, len(asked)))
        logits_BV = torch.randn(len(running), VOCAB, generator=generator)
        drawn = step(sampler, logits_BV, running).token_ids_B.tolist()
        for slot, token, logits_V in zip(running, drawn, logits_BV, strict=True):
            forbidden = bans(asked[slot], outputs[slot])
            num_banned += len(forbidden)
            logits_V[list(forbidden)] = -torch.inf
            assert token == (ALL_BANNED if len(forbidden) == VOCAB else int(logits_V.argmax()))
            # Where nothing is left the sequence ends, and another one begins.
            outputs[slot] = [] if token == ALL_BANNED else [*outputs[slot], token]
    assert num_banned > 20


def bans(rule: dict[str, Any], output: list[int]) -> set[int]:
    size, window = rule["no_repeat_ngram_size"], rule["no_repeat_ngram_window"]
    if window is not None:
        return Ban(size, window, rule["no_repeat_ngram_exempt_ids"]).banned(output) if len(output) >= size else set()
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([output], dtype=torch.int64), torch.zeros(1, VOCAB))
    return set(np.flatnonzero(scores[0].isneginf()).tolist()) - set(rule["no_repeat_ngram_exempt_ids"])


@pytest.mark.parametrize(("fields", "words"), [
    ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size: 1 lets no token come twice; say 2 or more"),
    ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size: -1 is outside 0 to 8192"),
    ({"no_repeat_ngram_size": 6, "no_repeat_ngram_window": 5},
     "no_repeat_ngram_window: 5 is shorter than no_repeat_ngram_size 6"),
    ({"no_repeat_ngram_size": 6, "no_repeat_ngram_window": 9000}, "no_repeat_ngram_window: 9000 is outside 1 to 8192"),
    ({"no_repeat_ngram_window": 5}, "no_repeat_ngram_window: 5 has no effect without no_repeat_ngram_size"),
    ({"no_repeat_ngram_exempt_ids": [5]}, "no_repeat_ngram_exempt_ids: .* has no effect without no_repeat_ngram_size"),
    ({"no_repeat_ngram_size": 2, "no_repeat_ngram_exempt_ids": [-5]}, "no_repeat_ngram_exempt_ids: -5 is outside 0"),
    ({"no_repeat_ngram_size": 2, "no_repeat_ngram_exempt_ids": range(65)}, "at most 64"),
])  # fmt: skip
def test_wrong_settings_are_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        SamplingParams(**fields)


def test_other_rules_of_a_row_hold_beside_it() -> None:
    logits_V = torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0])
    params = SamplingParams(temperature=0.0, no_repeat_ngram_size=2, logit_bias={1: -100.0}, logprobs=2,
                            frequency_penalty=2.0)
    assert sample_one(params, logits_V, output=[3, 0, 3]) == 2  # 0 would repeat itself, 1 is biased


def test_nothing_of_a_slots_last_owner_counts_for_its_next_one() -> None:
    sampler, logits_BV = make_sampler(VOCAB, 1), torch.tensor([[0.0, 1.0, 2.0, 9.0, 3.0]])
    params = SamplingParams(temperature=0.0, no_repeat_ngram_size=2, no_repeat_ngram_exempt_ids=[1])
    sampler.add(0, params, [0], [1] * 60, seed=0)
    step(sampler, logits_BV.roll(-2), [0])  # 1 once more: long runs everywhere
    sampler.add(0, params, [0], [3, 4, 2], seed=0)
    assert step(sampler, logits_BV, [0]).token_ids_B.tolist() == [3]


def test_a_table_is_made_when_it_is_asked_for_and_as_wide_as_that() -> None:
    sampler = make_sampler(VOCAB, 3)
    history = sampler._state.ngrams
    widths = []
    for params in (SamplingParams(), SamplingParams(no_repeat_ngram_size=2, no_repeat_ngram_window=9),
                   SamplingParams(no_repeat_ngram_size=2, no_repeat_ngram_window=90),
                   SamplingParams(no_repeat_ngram_size=2)):  # fmt: skip
        sampler.add(0, params, [0], seed=0)
        step(sampler, torch.zeros(1, VOCAB), [0])
        widths.append(history._tokens_SC.shape[1])
    assert widths == [0, 64, 128, 8192]
