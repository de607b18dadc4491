"""`logprobs` of all four modes are transformers' logits, of the whole vocabulary, before and behind its processors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from npu_runner import LLM, PoolingParams, SamplingParams
from npu_runner.errors import RequestError
from npu_runner.prompts.tasks import text_task
from npu_runner.request.logprobs import CompactLogprobs
from npu_runner.request.outputs import RequestOutput
from tests.oracle import reference
from tests.oracle.running import SMALL
from tests.runner.sampler_steps import make_sampler, step, tokens_over_unit_interval

Make = Callable[..., Path]
TOLERANCE = 2e-4
BIAS = {7: 4.0, 250: -3.0}
WHOLE = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=-1, prompt_logprobs=-1)
SAMPLED = WHOLE.replace(temperature=0.7, top_k=40, top_p=0.9, min_p=0.02, repetition_penalty=1.3, logit_bias=BIAS,
                        seed=3)
ALLOWED = WHOLE.replace(temperature=1.5, allowed_token_ids=[3, 50, 51, 200], seed=4)
GREEDY = WHOLE.replace(repetition_penalty=1.5, top_k=5)
REQUESTS = (WHOLE, SAMPLED, ALLOWED, GREEDY)
LENGTHS = (20, 33, 7, 12)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = np.random.default_rng(8)
    return [rng.integers(0, 290, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def path(checkpoint: Make) -> Path:
    return checkpoint("qwen3")


@torch.inference_mode()
def raw_logits(path: Path, token_ids: list[int]) -> Tensor:
    """(T, V)"""
    logits: Tensor = reference.load_model(path)(**reference.model_inputs(path, token_ids)).logits[0]
    return logits.float()


def processed(logits_V: Tensor, before: list[int], params: SamplingParams) -> Tensor:
    """transformers' processors and warpers, in the order in which it applies them."""
    ids, scores = torch.tensor([before]), logits_V[None]
    if params.repetition_penalty != 1.0:
        scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    if params.logit_bias:
        biases = [[[token], value] for token, value in params.logit_bias.items()]
        scores = transformers.SequenceBiasLogitsProcessor(biases)(ids, scores)
    if params.allowed_token_ids:
        allowed = list(params.allowed_token_ids)
        scores = torch.full_like(scores, -torch.inf).index_copy(1, torch.tensor(allowed), scores[:, allowed])
    if not params.is_greedy:
        warpers = [transformers.TemperatureLogitsWarper(params.temperature)]
        warpers += [transformers.TopKLogitsWarper(params.top_k)] if params.top_k else []
        warpers += [transformers.TopPLogitsWarper(params.top_p)] if params.top_p < 1.0 else []
        warpers += [transformers.MinPLogitsWarper(params.min_p)] if params.min_p else []
        for warper in warpers:
            scores = warper(ids, scores)
    return scores[0]


def assert_right(path: Path, mode: str, prompt: list[int], params: SamplingParams, result: RequestOutput) -> None:
    found = result.logprobs
    assert isinstance(found, CompactLogprobs)
    logits_TV = raw_logits(path, [*prompt, *result.token_ids])
    num_prompt, is_logits = len(prompt), mode.endswith("logits")
    answer_TV = logits_TV[num_prompt - 1 : -1]
    if mode.startswith("processed"):
        answer_TV = torch.stack([processed(answer_TV[place], [*prompt, *result.token_ids[:place]], params)
                                 for place in range(len(result.token_ids))])
    wanted_TV = answer_TV if is_logits else answer_TV.log_softmax(-1)
    values_TV = torch.from_numpy(found.by_token_id())
    torch.testing.assert_close(values_TV, wanted_TV, rtol=0, atol=TOLERANCE)
    for position, wanted_V, token in zip(found, wanted_TV, result.token_ids, strict=True):
        assert position.sampled.token_id == token
        assert position.sampled.logprob == pytest.approx(wanted_V[token].item(), abs=TOLERANCE)
        assert int((wanted_V > position.sampled.logprob + TOLERANCE).sum()) < (position.rank or 0)
        assert len(position) == len(wanted_V)
    assert result.prompt_logprobs is not None
    of_prompt_TV = logits_TV[: num_prompt - 1] if is_logits else logits_TV[: num_prompt - 1].log_softmax(-1)
    prompt_TV = torch.from_numpy(result.prompt_logprobs.positions.by_token_id())
    torch.testing.assert_close(prompt_TV, of_prompt_TV, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_each_mode_is_transformers(mode: str, path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """All requests in the same steps, cut into chunks, beside one that wants three tokens alone. The answers are those
    of the default mode."""
    with LLM(path, platform=platform_name, logprobs_mode=mode, max_num_batched_tokens=32, **SMALL) as llm:
        results = llm.generate([*prompts, prompts[0]], [*REQUESTS, WHOLE.replace(logprobs=3, prompt_logprobs=2)])
        settings = llm.engine.describe()
    assert settings.get("logprobs_mode") == (None if mode == "raw_logprobs" else mode)
    for prompt, params, result in zip(prompts, REQUESTS, results, strict=False):
        assert_right(path, mode, prompt, params, result)
    few, whole = results[-1], results[0]
    assert few.token_ids == whole.token_ids
    assert few.logprobs is not None
    assert whole.logprobs is not None
    for found, wanted in zip(few.logprobs, whole.logprobs, strict=True):
        assert [token.token_id for token in found.top] == [token.token_id for token in wanted.top[:3]]
        assert [token.logprob for token in found.top] == pytest.approx([t.logprob for t in wanted.top[:3]], abs=1e-5)
    with pytest.raises(ValueError, match="3 most probable tokens"):
        few.logprobs.by_token_id()  # type: ignore[attr-defined]


def test_drafts_bring_the_values_of_plain_steps(path: Path, platform_name: str) -> None:
    params = SAMPLED.replace(max_tokens=12, prompt_logprobs=None, logit_bias={9: 8.0})
    drafting = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}
    found = []
    for more in ({}, {"speculative_config": drafting}):
        with LLM(path, platform=platform_name, logprobs_mode="processed_logits", **more, **SMALL) as llm:
            found.append(llm.generate([[5, 9, 9, 9, 9]], params)[0])
            num_accepted = llm.stats().num_accepted_tokens
    assert num_accepted > 0
    plain, drafted = found
    assert plain.token_ids == drafted.token_ids
    np.testing.assert_allclose(plain.logprobs.by_token_id(), drafted.logprobs.by_token_id(),  # type: ignore[union-attr]
                               rtol=0, atol=TOLERANCE)


def test_labels_are_log_likelihoods_in_each_mode(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """Beside a prompt whose logits are wanted."""
    found = []
    for mode in ("raw_logprobs", "processed_logits"):
        with LLM(path, platform=platform_name, logprobs_mode=mode, **SMALL) as llm:
            labels = PoolingParams(labels=["a", "b c"])
            outputs = llm._run(prompts[:2], [labels, WHOLE.replace(logprobs=None, prompt_logprobs=0)], text_task,
                               False, False, False)
            found.append(outputs)
    (labels, scored), (of_logits, with_logits) = found
    np.testing.assert_allclose(of_logits.completions[0].pooled, labels.completions[0].pooled, rtol=0, atol=TOLERANCE)
    assert scored.prompt_logprobs[1].token.logprob < 0
    logits_TV = raw_logits(path, prompts[1])
    assert with_logits.prompt_logprobs[1].token.logprob == pytest.approx(
        logits_TV[0, prompts[1][1]].item(), abs=TOLERANCE)


def test_a_grammar_leaves_minus_infinity(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, structured_outputs={"choice": ["a", "b"]})
    with LLM(path, platform=platform_name, logprobs_mode="processed_logprobs", **SMALL) as llm:
        (result,) = llm.generate([prompts[0]], params)
        letters = [llm.processor.encode_plainly(letter)[0] for letter in "ab"]
    values_V = result.logprobs.by_token_id()[0]  # type: ignore[union-attr]
    assert np.flatnonzero(np.isfinite(values_V)).tolist() == sorted(letters)
    logits_2 = raw_logits(path, prompts[0])[-1][sorted(letters)]
    np.testing.assert_allclose(values_V[sorted(letters)], logits_2.log_softmax(-1).numpy(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("params", [
    SamplingParams(top_k=9), SamplingParams(top_p=0.6), SamplingParams(min_p=0.2), SamplingParams(top_k=1),
    SamplingParams(temperature=1.4, top_k=30, top_p=0.7, min_p=0.04),
], ids=lambda p: f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}")
def test_the_tokens_that_are_left_are_those_that_can_be_sampled(params: SamplingParams) -> None:
    """Of logits with many equal ones, where a token id decides."""
    logits_V = torch.randint(0, 6, (200,), generator=torch.Generator().manual_seed(2)).float()
    can_come = np.unique(tokens_over_unit_interval(params, logits_V, 4096))
    sampler = make_sampler(200, 2, logprobs_mode="processed_logits")
    sampler.add(0, params.replace(logprobs=-1), [0], seed=1)
    sampler.add(1, SamplingParams(temperature=0), [0], seed=1)
    output = step(sampler, logits_V.expand(2, -1), [0, 1])
    records_LC = output.to_host().records_LC
    assert records_LC is not None
    ids, values = np.split(records_LC[0, 2:], 2)
    kept = ids[np.isfinite(values.view(np.float32))]
    assert sorted(kept.tolist()) == can_come.tolist()


def test_values_of_the_whole_vocabulary_leave_the_device_in_slices() -> None:
    """Nine rows of which one asks: two rows at a time, and the values are those of log_softmax."""
    logits_BV = torch.randn(9, 200, generator=torch.Generator().manual_seed(3))
    sampler = make_sampler(200, 9)
    for row in range(9):
        sampler.add(row, SamplingParams(temperature=0, logprobs=-1 if row == 4 else 2), [0], seed=1)
    output = step(sampler, logits_BV, list(range(9)))
    assert [len(part.wait()) for part in output.slices] == [2, 2, 2, 2, 1]
    records_LC = output.to_host().records_LC
    assert records_LC is not None
    for logits_V, record in zip(logits_BV, records_LC, strict=True):
        ids, values = np.split(record[2:], 2)
        np.testing.assert_array_equal(ids, logits_V.argsort(descending=True).numpy())
        np.testing.assert_allclose(values.view(np.float32), logits_V.log_softmax(-1)[ids].numpy(), rtol=0, atol=1e-5)


def test_more_than_an_answer_may_hold_is_refused(path: Path, prompts: list[list[int]], platform_name: str) -> None:
    """The whole vocabulary counts as its size."""
    vocab_size = raw_logits(path, [1]).shape[1]
    settings: dict[str, Any] = {"max_logprobs_per_request": 3 * (vocab_size + 1), **SMALL}
    asked = SamplingParams(temperature=0, max_tokens=3, logprobs=-1, ignore_eos=True)
    with LLM(path, platform=platform_name, **settings) as llm:
        assert len(llm.generate([prompts[0]], asked)[0].logprobs or ()) == 3
        with pytest.raises(RequestError, match=rf"top_logprobs {vocab_size} . 1.*max_tokens 3 would fit") as caught:
            llm.generate([prompts[0]], asked.replace(max_tokens=4))
        assert caught.value.code == "too_many_logprobs"
        with pytest.raises(RequestError, match=rf"20 prompt tokens x .{vocab_size} most probable"):
            llm.generate([prompts[0]], asked.replace(prompt_logprobs=-1))
    with (LLM(path, platform=platform_name, max_logprobs_per_request=99, **SMALL) as small,
          pytest.raises(RequestError, match=r"at most 99 are allowed .max_logprobs_per_request.; raise that")):
        small.generate([prompts[0]], asked)
