"""What is drawn, against the definition: inverse CDF in float64, kept sets by sorting, chi-square over many draws."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from npu_runner.request.sampling_params import SamplingParams
from tests.full_set import only_full
from tests.runner.sampler_steps import draw_many, make_sampler, sample_one, step, tokens_over_unit_interval

COMBINATIONS = [
    SamplingParams(),
    SamplingParams(temperature=0.5),
    SamplingParams(temperature=2.5),
    SamplingParams(top_k=7),
    SamplingParams(top_p=0.6),
    SamplingParams(top_p=0.999),
    SamplingParams(top_p=0.05),
    SamplingParams(min_p=0.1),
    SamplingParams(top_k=10, top_p=0.7),
    SamplingParams(top_k=12, min_p=0.15, temperature=1.5),
    SamplingParams(top_p=0.8, min_p=0.05, temperature=0.8),
    SamplingParams(top_k=20, top_p=0.9, min_p=0.02, temperature=1.7),
    SamplingParams(top_k=1000, top_p=0.9),
]
IDS = [f"t{p.temperature}-k{p.top_k}-p{p.top_p}-m{p.min_p}" for p in COMBINATIONS]


def reference_probabilities(params: SamplingParams, logits_V: Tensor) -> np.ndarray:
    """By sorting, in float64; equals rank by token id. top_k, then top_p of what is left, then min_p."""
    scaled = logits_V.double().numpy() / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities /= probabilities.sum()
    order = np.lexsort((np.arange(len(scaled)), -probabilities))
    ranked = probabilities[order]
    num_kept = params.top_k or len(ranked)
    if params.top_p < 1.0:
        mass_before = np.cumsum(ranked[:num_kept]) - ranked[:num_kept]
        num_kept = int((mass_before < params.top_p * ranked[:num_kept].sum() - 1e-7).sum())
    ranked[num_kept:] = 0.0
    ranked[ranked < params.min_p * ranked[0] * (1 - 1e-7)] = 0.0
    probabilities[order] = ranked / ranked.sum()
    return probabilities


@pytest.mark.parametrize("params", COMBINATIONS, ids=IDS)
def test_many_draws_follow_the_distribution(params):
    logits_V = torch.randn(41, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = reference_probabilities(params, logits_V)
    counts = draw_many(params, logits_V)
    assert counts[expected == 0.0].sum() == 0
    common = expected * counts.sum() >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum()) * counts.sum()
    if wanted[-1] < 5:
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    assert chisquare(observed, wanted).pvalue > 1e-3 or len(observed) == 1


@pytest.mark.parametrize("params", COMBINATIONS, ids=IDS)
@pytest.mark.parametrize("vocab_size", [128, *only_full("other sizes; ties are there in this one", 3, 1000)])
def test_exactly_the_kept_set_can_be_drawn(params, vocab_size):
    """Coarse logits, as bfloat16 gives them, so that many tokens tie just where the sets end."""
    logits_V = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3).round() / 2
    expected = reference_probabilities(params, logits_V)
    drawn = np.bincount(tokens_over_unit_interval(params, logits_V), minlength=vocab_size)
    assert drawn[expected == 0.0].sum() == 0
    assert (drawn[expected > 2 / 1024] > 0).all()
    np.testing.assert_allclose(drawn / drawn.sum(), expected, atol=2.5 / 1024)


@pytest.mark.parametrize("vocab_size", [64, 200, 4096, 16003])
def test_draw_is_the_inverse_of_the_cumulative_distribution(vocab_size):
    generator = torch.Generator().manual_seed(1)
    logits_V = torch.randn(vocab_size, generator=generator) * 2
    cumulative = np.cumsum(reference_probabilities(SamplingParams(temperature=0.7), logits_V))
    uniforms = np.linspace(0.0, 1.0 - 2.0**-24, 256).astype(np.float32)
    sampler = make_sampler(vocab_size, 256)
    for slot in range(256):
        sampler.add(slot, SamplingParams(temperature=0.7), [0], seed=0)
    tokens = step(sampler, logits_V.expand(256, -1), range(256), uniforms.tolist()).token_ids_B.numpy()
    below = np.where(tokens > 0, cumulative[tokens - 1], 0.0)
    assert (below <= uniforms + 1e-5).all()
    assert (uniforms <= cumulative[tokens] + 1e-5).all()


@pytest.mark.parametrize("params", COMBINATIONS, ids=IDS)
def test_a_token_of_probability_zero_is_never_drawn(params):
    """-inf and underflow at both ends of the vocabulary, at every place of the unit interval."""
    logits_V = torch.full((700,), -torch.inf)
    logits_V[[5, 130, 131, 400]] = torch.tensor([0.0, 0.5, -200.0, 0.25])
    tokens = tokens_over_unit_interval(params.replace(temperature=0.5), logits_V, 256)
    assert set(tokens.tolist()) <= {5, 130, 400}


@pytest.mark.parametrize("params", COMBINATIONS, ids=IDS)
def test_one_possible_token_is_drawn(params):
    logits_V = torch.full((300,), -torch.inf)
    logits_V[299] = -1e30
    assert set(tokens_over_unit_interval(params, logits_V, 64).tolist()) == {299}


def test_flat_distribution_keeps_as_many_as_asked():
    logits_V = torch.zeros(100)
    assert set(tokens_over_unit_interval(SamplingParams(top_k=30), logits_V)) == set(range(30))
    assert set(tokens_over_unit_interval(SamplingParams(top_p=0.3), logits_V)) == set(range(30))
    assert set(tokens_over_unit_interval(SamplingParams(top_k=50, top_p=0.3), logits_V)) == set(range(15))
    assert set(tokens_over_unit_interval(SamplingParams(min_p=1.0), logits_V)) == set(range(100))


@pytest.mark.parametrize("params", [
    SamplingParams(top_p=0.9), SamplingParams(top_k=40), SamplingParams(top_p=0.9, min_p=0.02),
    SamplingParams(top_k=300, top_p=0.7),
], ids=range(4))
def test_rounding_never_leads_beyond_the_kept_set(params):
    """The last uniform below 1, where sums rounded differently would pass the end of the set."""
    logits_BV = torch.randn(200, 1500, generator=torch.Generator().manual_seed(8)) * 2
    sampler = make_sampler(1500, 200)
    for slot in range(200):
        sampler.add(slot, params, [0], seed=0)
    tokens = step(sampler, logits_BV, range(200), [1.0 - 2.0**-24] * 200).token_ids_B.tolist()
    for row, token in enumerate(tokens):
        assert reference_probabilities(params, logits_BV[row])[token] > 0.0


def test_greedy_takes_the_first_of_the_most_probable():
    logits_V = torch.tensor([0.0, 3.0, 1.0, 3.0])
    assert sample_one(SamplingParams(temperature=0.0), logits_V) == 1
    for changes in ({"top_k": 1}, {"top_p": 1e-9}, {"top_k": 3, "top_p": 1e-9}):
        assert set(tokens_over_unit_interval(SamplingParams(**changes), logits_V, 64)) == {1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_is_argmax_in_every_precision(dtype):
    logits_BV = torch.randn(6, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    sampler = make_sampler(1000)
    for slot in range(6):
        sampler.add(slot, SamplingParams(temperature=0.0, top_p=0.5, top_k=9, seed=3), [0], seed=3)
    assert step(sampler, logits_BV, range(6)).token_ids_B.tolist() == logits_BV.argmax(-1).tolist()


def test_lowest_temperature_is_all_but_greedy():
    logits_V = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 100
    assert set(tokens_over_unit_interval(SamplingParams(temperature=1e-300), logits_V, 64)) == {int(logits_V.argmax())}


def test_greedy_and_drawing_rows_share_a_batch():
    logits_V = torch.randn(200, generator=torch.Generator().manual_seed(2))
    several = [SamplingParams(temperature=0.0), *COMBINATIONS]
    sampler = make_sampler(200, len(several))
    for slot, params in enumerate(several):
        sampler.add(slot, params, [0], seed=slot)
    together = step(sampler, logits_V.expand(len(several), -1), range(len(several))).token_ids_B.tolist()
    assert together == [sample_one(params, logits_V, seed=slot) for slot, params in enumerate(several)]


# -- uniforms ------------------------------------------------------------------------------------------------------


@functools.cache
def uniform_table(num_seqs: int, num_steps: int, first_seed: int = 0) -> np.ndarray:
    sampler = make_sampler(4, num_seqs)
    rows = []
    for num_generated in range(num_steps):
        for slot in range(num_seqs):
            sampler.add(slot, SamplingParams(), [0], [0] * num_generated, seed=first_seed + slot)
        rows.append(sampler.host_inputs(np.arange(num_seqs)))
    return np.stack(rows, axis=1)


def test_uniforms_fill_the_unit_interval_evenly():
    uniforms = uniform_table(200, 40)
    assert uniforms.dtype == np.float32
    assert 0.0 <= uniforms.min() < uniforms.max() < 1.0
    assert chisquare(np.histogram(uniforms, 100, (0, 1))[0]).pvalue > 1e-3


def test_neighbouring_seeds_and_steps_are_independent():
    uniforms = uniform_table(200, 40)
    for before, after in ((uniforms[:-1], uniforms[1:]), (uniforms[:, :-1], uniforms[:, 1:])):
        pairs, *_ = np.histogram2d(before.ravel(), after.ravel(), 8, [[0, 1], [0, 1]])
        assert chisquare(pairs.ravel()).pvalue > 1e-3


def test_any_64_bit_seed_is_its_own():
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 2**32, 2**63 + 5]
    firsts = [uniform_table(1, 8, first_seed=seed)[0].tolist() for seed in seeds]
    assert len({tuple(first) for first in firsts}) == len(seeds)
