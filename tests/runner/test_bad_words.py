"""Which tokens would complete a bad word, against the definition, and whose words are watched."""

from __future__ import annotations

import random

import pytest
import torch

from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.logit_rules import BadWords, Watch
from tests.runner.sampler_steps import make_sampler, step


@pytest.mark.parametrize("num_words", [1, 4, 5, 60])
def test_a_watch_bans_what_the_definition_bans(num_words: int) -> None:
    draw = random.Random(num_words)
    words = [tuple(draw.choices(range(4), k=draw.randint(2, 5))) for _ in range(num_words)]
    output = draw.choices(range(4), k=6)
    watch = Watch(BadWords(words), output)
    for _ in range(300):
        expected = {word[-1] for word in words if output[1 - len(word):] == list(word[:-1])}
        assert set(watch.banned) == expected
        output.append(draw.randrange(4))
        watch.observe(output[-1])


def test_a_slot_that_changes_hands_is_watched_for_its_new_owner() -> None:
    sampler = make_sampler(8)
    logits_BV = torch.tensor([[0.0, 0.0, 0.0, 5.0, 4.0, 3.0, 0.0, 0.0]])  # 3, then 4, then 5
    for banned, expected in ((4, [3, 3, 3]), (3, [3, 4, 3]), (None, [3, 3, 3])):
        words = [] if banned is None else [[3, banned]]
        params = SamplingParams(temperature=0.0).replace(bad_words=["x"] * len(words), bad_words_token_ids=words)
        sampler.add(0, params, [1], seed=0)
        assert [int(step(sampler, logits_BV, [0]).token_ids_B) for _ in range(3)] == expected
