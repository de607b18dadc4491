"""Masks as bits against their definition in numpy: laid over logits by one kernel, and within the sampler."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.sampling.sampler import ALL_BANNED, NO_TOKEN
from tests.npu.programs.sampling import NUM_STEPS, draw_ruled

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Below a word, a whole number of words and not, below and above one block of tokens; and as wide as a model's.
VOCABULARIES = [3, 32, 1000, 4096, 4097, 8193, 151_936]
LAST = 1.0 - 2.0**-24


def random_words(num_masks: int, vocab_size: int, seed: int) -> np.ndarray:
    """int32 (C, W); with bits behind the vocabulary, which mean nothing."""
    generator = np.random.default_rng(seed)
    shares = generator.random((num_masks, 1, 1))
    bits = generator.random((num_masks, -(-vocab_size // 32), 32)) < shares
    return np.packbits(bits.reshape(num_masks, -1), axis=1, bitorder="little").view(np.int32)


def masked(logits_V: Tensor, words_W: np.ndarray) -> np.ndarray:
    """The definition, float32."""
    bits = [bool(int(words_W[token // 32]) >> (token % 32) & 1) for token in range(len(logits_V))]
    with np.errstate(invalid="ignore"):  # +inf without a bit is NaN
        return logits_V.float().numpy() + np.where(bits, np.float32(0.0), np.float32(-np.inf))


def laid_anywhere(rows: int, vocab_size: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random logits, whose rows begin at any place and have any stride."""
    first, excess = divmod(seed * 7, 5)
    wide = torch.randn(rows, first + vocab_size + excess, generator=torch.Generator().manual_seed(seed)) * 3
    return wide.to(dtype)[:, first : first + vocab_size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_logits_have_minus_infinity_where_there_is_no_bit(device: torch.device, vocab_size: int,
                                                          dtype: torch.dtype) -> None:
    from npu_runner.platforms.cuda.sampling.token_masks import allow_tokens

    for seed, rows in enumerate((None, [0, 2], [4], [3, 1, 0, 4, 2])):
        logits_BV = laid_anywhere(5, vocab_size, dtype, seed)
        logits_BV[0, 0], logits_BV[2, -1], logits_BV[4, vocab_size // 2] = torch.nan, torch.inf, -torch.inf
        chosen = list(range(5)) if rows is None else rows
        words_CW = random_words(len(chosen), vocab_size, seed)
        index = None if rows is None else torch.tensor(rows, device=device)
        found_CV = allow_tokens(logits_BV.to(device), index, torch.from_numpy(words_CW).to(device)).cpu().numpy()
        assert found_CV.dtype == np.float32
        wanted_CV = [masked(logits_BV[row], words_W) for row, words_W in zip(chosen, words_CW, strict=True)]
        np.testing.assert_array_equal(found_CV, np.stack(wanted_CV))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_draw_of_the_allowed_is_the_draw_from_masked_logits(device: torch.device, vocab_size: int,
                                                              dtype: torch.dtype) -> None:
    """Rows with masks and without, in any order; temperature 0 among them."""
    from npu_runner.platforms.cuda.sampling.sample import sample_allowed, sample_from_softmax

    masks = [1, -1, 0, 2, -1, 3]
    logits_BV = laid_anywhere(6, vocab_size, dtype, seed=3)
    words_CW = random_words(4, vocab_size, seed=4)
    words_CW[:, 0] |= 1  # somebody is left
    rows = [masked(logits_V, words_CW[mask]) if mask >= 0 else logits_V.float().numpy()
            for logits_V, mask in zip(logits_BV, masks, strict=True)]
    columns = [torch.tensor(values, dtype=torch.float32, device=device)[:, None]
               for values in ([0.0, 0.7, 1.0, 0.0, 0.0, 3.0], [0.5, 0.0, 0.3, 0.9, LAST, LAST])]
    found = sample_allowed(logits_BV.to(device), *columns, torch.from_numpy(words_CW).to(device),
                           torch.tensor(masks, dtype=torch.int32, device=device))
    wanted = sample_from_softmax(torch.from_numpy(np.stack(rows)).to(device), *columns)
    assert found.tolist() == wanted.tolist()
    for (token,), row in zip(found.tolist(), rows, strict=True):
        assert row[token] > -np.inf


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_token_says_why(device: torch.device, temperature: float) -> None:
    """Not a number where no bit hides it and where one does, nothing left to come, and neighbours that sample."""
    from npu_runner.platforms.cuda.sampling.sample import sample_allowed

    logits_BV = torch.zeros(6, 9000)
    words_CW = np.zeros((6, 282), dtype=np.int32)
    words_CW[:, 157] = 1  # token 5024
    words_CW[2] = 0
    logits_BV[0, 4], logits_BV[1, 5024], logits_BV[5, 8999] = torch.nan, torch.inf, torch.inf
    columns = [torch.full((6, 1), value, device=device) for value in (temperature, 0.5)]
    masks = torch.tensor([0, 1, 2, 3, -1, 5], dtype=torch.int32, device=device)
    found = sample_allowed(logits_BV.to(device), *columns, torch.from_numpy(words_CW).to(device), masks)
    assert found[[0, 1, 2, 3, 5], 0].tolist() == [NO_TOKEN, NO_TOKEN, ALL_BANNED, 5024, NO_TOKEN]
    assert found[4, 0] >= 0


def test_rows_with_rules_have_the_tokens_of_the_plain_operators(device: torch.device,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    """Real grammars through the whole sampler; every mask goes through one of the kernels."""
    from npu_runner.platforms.cuda.ops import TritonOps
    from npu_runner.platforms.cuda.sampling import sample, token_masks

    launched: list[str] = []

    def counted(module: Any, name: str) -> None:
        kernel = getattr(module, name)

        def call(*arguments: Any) -> Any:
            launched.append(name)
            return kernel(*arguments)

        monkeypatch.setattr(module, name, call)

    counted(token_masks, "allow_tokens")
    counted(sample, "sample_allowed")
    ops = TritonOps()
    hooks = {"samples_greedily": True, "allow_tokens": ops.allow_tokens, "masked_sampler": ops.masked_sampler()}
    expected = draw_ruled(torch.device("cpu"), None)
    assert draw_ruled(device, ops.softmax_sampler(greedy=True), **hooks) == expected
    for name in ("allow_tokens", "sample_allowed"):
        assert launched.count(name) >= NUM_STEPS, "and not when kernels are compiled alone"
