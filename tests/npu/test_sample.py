"""A draw at once from the whole vocabulary, against its definition in float64; on the CPU, which has its operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.platforms.npu.sample import sample_from_softmax

LAST = 1.0 - 2.0**-24  # the largest uniform there is


def draw_all(logits_V: Tensor, temperature: float, uniforms: np.ndarray) -> np.ndarray:
    """The token at each uniform, (B,)."""
    count = len(uniforms)
    temperatures_B1 = torch.full((count, 1), temperature)
    uniforms_B1 = torch.from_numpy(uniforms.astype(np.float32))[:, None]
    drawn_B1 = sample_from_softmax(logits_V.expand(count, -1), temperatures_B1, uniforms_B1)
    assert drawn_B1.dtype == torch.int32
    assert drawn_B1.shape == (count, 1)
    return drawn_B1[:, 0].numpy()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [0.01, 0.7, 3.0])
@pytest.mark.parametrize("vocab_size", [3, 1000, 151_936])
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(vocab_size: int, temperature: float,
                                                              dtype: torch.dtype) -> None:
    logits_V = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3).to(dtype)
    scaled = logits_V.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    cumulative = np.cumsum(weights / weights.sum())
    uniforms = np.linspace(0.0, LAST, 24)
    tokens = draw_all(logits_V, temperature, uniforms)
    below = np.where(tokens > 0, cumulative[tokens - 1], 0.0)
    # Of 151,936 tokens each may lose a unit, 2^-30; a quotient is off by half a rounding of itself.
    assert (below <= uniforms + 2e-4).all()
    assert (uniforms <= cumulative[tokens] + 2e-4).all()


def test_a_token_that_weighs_nothing_is_never_drawn() -> None:
    """Also where a parallel sum of floats would pass the target a token too late: at both ends and beside the heavy."""
    logits_V = torch.full((4096,), -torch.inf)
    logits_V[[5, 130, 131, 4000]] = torch.tensor([0.0, 0.5, -200.0, 0.25])
    tokens = draw_all(logits_V, 0.5, np.append(np.linspace(0.0, LAST, 2048), LAST))
    assert set(tokens.tolist()) == {5, 130, 4000}


def test_the_last_uniform_stays_within_the_vocabulary() -> None:
    for seed in range(50):
        logits_V = torch.randn(777, generator=torch.Generator().manual_seed(seed))
        assert draw_all(logits_V, 1.0, np.array([LAST])) < 777
    assert draw_all(torch.zeros(64), 1.0, np.array([LAST])) == 63


def test_equal_logits_are_drawn_equally_often() -> None:
    tokens = draw_all(torch.full((16,), 7.25), 0.3, np.linspace(0.0, LAST, 1600))
    assert np.abs(np.bincount(tokens, minlength=16) - 100).max() <= 1


@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 500, 999])
def test_a_row_without_a_token_says_so_and_its_neighbours_draw(spoilt: float, place: int) -> None:
    logits_BV = torch.randn(3, 1000, generator=torch.Generator().manual_seed(1))
    arguments = torch.ones(3, 1), torch.full((3, 1), 0.4)
    wanted_B1 = sample_from_softmax(logits_BV, *arguments)
    logits_BV[1, place] = spoilt
    assert sample_from_softmax(logits_BV, *arguments).tolist() == [wanted_B1[0].tolist(), [-1], wanted_B1[2].tolist()]


def test_a_row_whose_tokens_are_all_impossible_has_none() -> None:
    assert draw_all(torch.full((300,), -torch.inf), 1.0, np.array([0.0, 0.5, LAST])).tolist() == [-1, -1, -1]
