"""The same distributions and bans as Hugging Face's logits processors, for what both have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.request.sampling_params import SamplingParams
from tests.runner.sampler_steps import EOS, Conversation, generate, spell, tokens_over_unit_interval

transformers = pytest.importorskip("transformers")

VOCAB = 97


@pytest.mark.parametrize("params", [
    SamplingParams(temperature=0.6),
    SamplingParams(top_k=9),
    SamplingParams(top_p=0.75),
    SamplingParams(min_p=0.08),
    SamplingParams(temperature=1.8, top_k=30, top_p=0.85, min_p=0.04),
    SamplingParams(temperature=0.7, top_p=0.95, min_p=0.01),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.5),
], ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_distribution_is_that_of_the_warpers(params):
    logits_BV = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3)) * 2
    warpers = [transformers.TemperatureLogitsWarper(params.temperature)]
    if params.top_k:
        warpers.append(transformers.TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(transformers.TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(transformers.MinPLogitsWarper(params.min_p))
    warped_BV = logits_BV
    for warper in warpers:
        warped_BV = warper(None, warped_BV)
    expected = warped_BV[0].softmax(-1).numpy()
    tokens = tokens_over_unit_interval(params, logits_BV[0])
    np.testing.assert_allclose(np.bincount(tokens, minlength=VOCAB) / len(tokens), expected, atol=2.5 / len(tokens))


def generate_with(processors: list, table_VV: Tensor, conversation: Conversation, num_steps: int, *,
                  sees_prompt: bool) -> list[int]:
    output: list[int] = []
    for _ in range(num_steps):
        scores_BV = Conversation(conversation.params, conversation.prompt, 0, output).logits(table_VV)[None]
        seen = torch.tensor([conversation.prompt + output if sees_prompt else output], dtype=torch.int64)
        for processor in processors:
            scores_BV = processor(seen, scores_BV)
        output.append(int(scores_BV.argmax()))
    return output


@pytest.fixture
def table_VV() -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(9)) * 2


@pytest.mark.parametrize("penalty", [0.5, 1.05, 1.3, 2.0])
def test_repetition_penalty_is_theirs(penalty, table_VV):
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    conversation = Conversation(params, [5, 6, 7, 90, 5], 0)
    expected = generate_with([transformers.RepetitionPenaltyLogitsProcessor(penalty)], table_VV, conversation, 60,
                             sees_prompt=True)
    assert generate(table_VV, conversation, 60) == expected


@pytest.mark.parametrize("bad_words", [["ab"], ["a", "bcd"], ["abab", "ba", "cc"], ["abcabc", "cab", "b a"]])
def test_bad_words_are_banned_as_theirs(bad_words, table_VV):
    bias = {token: 6.0 for token in range(9, 14)}
    params = SamplingParams(temperature=0.0, bad_words=bad_words, logit_bias=bias)
    conversation = Conversation(params, [5], 0)
    ids = [spell(space + word) for word in bad_words for space in ("", " ")]
    processors = [
        transformers.SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()]),
        transformers.NoBadWordsLogitsProcessor(ids, eos_token_id=EOS),
    ]
    expected = generate_with(processors, table_VV, conversation, 60, sees_prompt=False)
    assert generate(table_VV, conversation, 60, encode=spell) == expected


def test_min_tokens_bans_as_theirs(table_VV):
    table_VV[:, EOS] += 6.0
    params = SamplingParams(temperature=0.0, min_tokens=11)
    conversation = Conversation(params, [5], 0)
    processor = transformers.MinNewTokensLengthLogitsProcessor(0, 11, EOS)
    expected = generate_with([processor], table_VV, conversation, 20, sees_prompt=False)
    assert EOS in expected[11:]
    assert generate(table_VV, conversation, 20) == expected
