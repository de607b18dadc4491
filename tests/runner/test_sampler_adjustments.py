"""Penalties, bias and bans against plain loops over the definition, bad rows, and log probabilities."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.errors import RequestError
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import ALL_BANNED
from tests.runner.sampler_steps import (
    EOS,
    Conversation,
    generate,
    make_sampler,
    run_together,
    sample_one,
    spell,
    step,
    tokens_over_unit_interval,
)

GREEDY = SamplingParams(temperature=0.0)
VOCAB = 60


@pytest.fixture
def table_VV() -> Tensor:
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(7)) * 2


def expected_greedy(params: SamplingParams, conversation: Conversation, table_VV: Tensor) -> list[int]:
    """One token after the other in Python, each rule as its definition reads."""
    output: list[int] = []
    for _ in range(30):
        scores = Conversation(params, conversation.prompt, 0, output).logits(table_VV).tolist()
        for token in range(VOCAB):
            if token in conversation.prompt + output:
                factor = params.repetition_penalty
                scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
            if token in output:
                scores[token] -= output.count(token) * params.frequency_penalty + params.presence_penalty
            scores[token] += params.logit_bias.get(token, 0.0)
            if len(output) < params.min_tokens and token in (EOS, *params.stop_token_ids):
                scores[token] = -np.inf
            for word in params.bad_words:
                for ids in (spell(word), spell(" " + word)):
                    if ids[-1] == token and [*output, token][-len(ids):] == ids:
                        scores[token] = -np.inf
        output.append(int(np.argmax(scores)))
    return output


@pytest.mark.parametrize("changes", [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"frequency_penalty": 0.8},
    {"frequency_penalty": -2.0},
    {"presence_penalty": 1.5},
    {"presence_penalty": -0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.1},
    {"logit_bias": {5: 3.0, 17: -100.0, 31: 2.5}},
    {"min_tokens": 12, "stop_token_ids": [11, 30], "logit_bias": {EOS: 9.0, 30: 8.0}},
    {"bad_words": ["ab", "c", "def"], "logit_bias": {i: 4.0 for i in range(9, 16)}},
    {"bad_words": ["abcabca", "bb"], "frequency_penalty": 0.2, "logit_bias": {10: 6.0, 11: 6.0, 12: 6.0},
     "min_tokens": 5, "repetition_penalty": 1.2, "presence_penalty": 0.1},
], ids=lambda changes: "-".join(changes))
def test_rules_follow_their_definition(changes, table_VV):
    params = GREEDY.replace(**changes)
    conversation = Conversation(params, [4, 8, 15, 16, 23, 42, 15], 0)
    output = generate(table_VV, conversation, 30, encode=spell)
    assert output == expected_greedy(params, conversation, table_VV)
    assert output != expected_greedy(GREEDY, conversation, table_VV), "the case shows nothing"


def test_penalties_of_one_row_leave_the_others_alone(table_VV):
    several = [GREEDY, GREEDY.replace(repetition_penalty=1.5), GREEDY.replace(presence_penalty=1.0),
               GREEDY.replace(bad_words=["ab"], logit_bias={10: 5.0, 11: 5.0}), GREEDY.replace(min_tokens=9),
               SamplingParams(top_p=0.9), SamplingParams(frequency_penalty=0.5, top_k=9)]
    sampler = make_sampler(VOCAB, 20, spell)
    together = {}
    for number, params in enumerate(several):
        together[2 * number + 3] = Conversation(params, [number, 40], seed=number)
    for slot, conversation in together.items():
        sampler.add(slot, conversation.params, conversation.prompt, seed=conversation.seed)
    run_together(sampler, table_VV, together, 25)
    for number, conversation in enumerate(together.values()):
        alone = Conversation(conversation.params, [number, 40], seed=number)
        assert conversation.output == generate(table_VV, alone, 25, encode=spell)


def test_min_tokens_bans_eos_until_then():
    logits_V = torch.zeros(VOCAB)
    logits_V[EOS] = 50.0
    params = SamplingParams(min_tokens=3)
    chosen = [sample_one(params, logits_V, output=[7] * n, seed=1) for n in range(5)]
    assert EOS not in chosen[:3]
    assert chosen[3:] == [EOS, EOS]


def test_ignored_eos_may_be_sampled_at_any_time():
    logits_V = torch.zeros(VOCAB)
    logits_V[EOS] = 50.0
    assert sample_one(SamplingParams(min_tokens=3, ignore_eos=True), logits_V) == EOS


def test_bad_word_does_not_match_the_prompt():
    logits_V = torch.zeros(VOCAB)
    logits_V[11] = 5.0
    params = GREEDY.replace(bad_words=["ab"])
    assert sample_one(params, logits_V, prompt=spell("a"), encode=spell) == 11
    assert sample_one(params, logits_V, prompt=spell("b"), output=spell("a"), encode=spell) != 11


def test_longer_bad_words_may_join_later(table_VV):
    """The record of last tokens grows while shorter words are already being watched."""
    params = [GREEDY.replace(bad_words=["ab", "ba"], logit_bias={10: 9.0, 11: 9.0, 12: 8.0}),
              GREEDY.replace(bad_words=["aaaa", "bab"], logit_bias={10: 9.0, 11: 8.5})]
    together = {slot: Conversation(each, [3, 4], seed=0) for slot, each in enumerate(params)}
    sampler = make_sampler(VOCAB, 2, spell)
    sampler.add(0, params[0], [3, 4], seed=0)
    run_together(sampler, table_VV, {0: together[0]}, 5)
    sampler.add(1, params[1], [3, 4], seed=0)
    run_together(sampler, table_VV, together, 20)
    for conversation in together.values():
        expected = expected_greedy(conversation.params, conversation, table_VV)[: len(conversation.output)]
        assert conversation.output == expected


def test_token_ids_beyond_the_vocabulary_are_refused():
    sampler = make_sampler(VOCAB)
    with pytest.raises(RequestError, match="60"):
        sampler.add(0, SamplingParams(logit_bias={60: 1.0}), [1], seed=0)
    with pytest.raises(AssertionError, match="resolved"):  # what the engine does before it queues a request
        sampler.add(0, SamplingParams(bad_words=["a"]), [1], seed=0)
    sampler.add(0, GREEDY, [1], seed=0)
    assert step(sampler, torch.zeros(1, VOCAB), [0]).token_ids_B.tolist() == [0]


# -- rows without a token ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [
    GREEDY, SamplingParams(), SamplingParams(top_p=0.9, min_p=0.1), SamplingParams(top_k=5),
    SamplingParams(repetition_penalty=1.1, logprobs=2, logit_bias={1: 1.0})], ids=range(5))
def test_bad_rows_are_reported_and_harm_nobody(params):
    logits_BV = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    logits_BV[1, 77] = torch.nan
    logits_BV[2, 5] = torch.inf
    logits_BV[3] = -torch.inf
    logits_BV[4, 9:] = -torch.inf
    sampler = make_sampler(300)
    for slot in range(6):
        sampler.add(slot, params, [0], seed=slot)
    tokens = step(sampler, logits_BV, range(6)).token_ids_B.tolist()
    assert tokens[1:4] == [-1, -1, -1]
    for row in (0, 4, 5):
        assert tokens[row] == sample_one(params, logits_BV[row], prompt=[0], seed=row)


def test_a_row_with_everything_banned_has_no_token():
    params = SamplingParams(bad_words=list("abcdef"))
    logits_V = torch.full((VOCAB,), -torch.inf)
    logits_V[10:16] = 1.0
    assert sample_one(params, logits_V, encode=spell) == ALL_BANNED


# -- log probabilities ---------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_model_itself():
    """Neither penalties nor temperature nor bans show in them."""
    logits_BV = torch.randn(4, 200, generator=torch.Generator().manual_seed(3)) * 4
    sampler = make_sampler(200)
    several = [GREEDY.replace(logprobs=3), SamplingParams(temperature=2.0, logprobs=0, presence_penalty=2.0),
               SamplingParams(logit_bias={7: 100.0}, logprobs=5), GREEDY]
    for slot, params in enumerate(several):
        sampler.add(slot, params, [1], [2, 3], seed=slot)
    output = step(sampler, logits_BV, range(4))
    expected_BV = logits_BV.double().log_softmax(-1)
    assert output.logprobs is not None
    assert output.token_ids_B[2] == 7
    assert output.logprob_rows.tolist() == [0, 1, 2], "the last one did not ask"
    sampled_B = expected_BV.gather(-1, output.token_ids_B[:, None].long())[:, 0]
    np.testing.assert_allclose(output.logprobs.sampled_L, sampled_B[:3], atol=1e-5, rtol=1e-5)
    ranks = (expected_BV > sampled_B[:, None]).sum(-1) + 1
    assert output.logprobs.ranks_L.tolist() == ranks[:3].tolist()
    top = expected_BV[:3].topk(5, dim=-1)
    assert output.logprobs.top_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(output.logprobs.top_logprobs, top.values, atol=1e-5, rtol=1e-5)


def test_host_copy_holds_the_same():
    sampler = make_sampler(50)
    sampler.add(0, GREEDY, [1], seed=0)
    sampler.add(1, GREEDY.replace(logprobs=4), [1], seed=0)
    logits_BV = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    logits_BV[0, 3] = torch.nan
    output = step(sampler, logits_BV, [0, 1], receipt=7)
    host = output.to_host()
    assert host.receipts_B.tolist() == [7, 7]
    assert output.logprobs is not None
    assert host.token_ids_B.tolist() == output.token_ids_B.tolist() == [-1, int(logits_BV[1].argmax())]
    assert host.logprob_rows.tolist() == [1]
    assert host.records_LC is not None
    (record,) = host.records_LC
    assert record[:1].view(np.float32) == output.logprobs.sampled_L[0]
    assert record[1] == output.logprobs.ranks_L[0] == 1
    assert record[2:6].tolist() == output.logprobs.top_ids[0].tolist()
    assert record[6:].view(np.float32).tolist() == output.logprobs.top_logprobs[0].tolist()
    sampler.add(1, GREEDY, [1], seed=0)
    without = step(sampler, logits_BV, [0, 1]).to_host()
    assert without.records_LC is None


def test_no_logprobs_unless_asked():
    sampler = make_sampler(VOCAB)
    sampler.add(0, GREEDY, [1], seed=0)
    assert step(sampler, torch.zeros(1, VOCAB), [0]).logprobs is None


def test_kept_sets_are_taken_after_penalties_and_bias():
    logits_V = torch.tensor([3.0, 2.0, 1.0, 0.0])
    assert set(tokens_over_unit_interval(SamplingParams(top_k=2, logit_bias={3: 10.0}), logits_V)) <= {0, 3}
