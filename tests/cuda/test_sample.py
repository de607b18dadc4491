"""The sampling kernels against its definition in float64, and against the sampler's plain operators."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from npu_runner.request.sampling_params import SamplingParams
from npu_runner.sampling.sampler import NO_TOKEN
from tests.runner.sampler_steps import SpellingSampler, make_sampler

LAST = 1.0 - 2.0**-24  # the largest uniform there is
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Below one block, a whole number of blocks, one logit more; and as wide as a model's.
VOCABULARIES = [3, 1000, 8192, 8193, 151_936]


def draw_rows(device: torch.device, logits_BV: Tensor, temperatures: list[float], uniforms: list[float]) -> list[int]:
    from npu_runner.platforms.cuda.sampling.sample import sample_from_softmax

    columns = (torch.tensor(values, dtype=torch.float32, device=device)[:, None] for values in (temperatures, uniforms))
    sampled_B1 = sample_from_softmax(logits_BV.to(device), *columns)
    assert sampled_B1.dtype == torch.int32
    assert sampled_B1.shape == (len(logits_BV), 1)
    return sampled_B1[:, 0].tolist()


def draw_all(device: torch.device, logits_V: Tensor, temperature: float, uniforms: np.ndarray) -> np.ndarray:
    """The token at each uniform, (B,)."""
    logits_BV = logits_V.to(device).expand(len(uniforms), -1)
    return np.array(draw_rows(device, logits_BV, [temperature] * len(uniforms), uniforms.tolist()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("temperature", [0.01, 0.7, 3.0])
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_a_draw_is_the_inverse_of_the_cumulative_distribution(device: torch.device, vocab_size: int,
                                                              temperature: float, dtype: torch.dtype) -> None:
    logits_V = (torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3).to(dtype)
    scaled = logits_V.double().numpy() / temperature
    weights = np.exp(scaled - scaled.max())
    cumulative = np.cumsum(weights / weights.sum())
    uniforms = np.append(np.linspace(0.0, LAST, 12), LAST)
    tokens = draw_all(device, logits_V, temperature, uniforms)
    below = np.where(tokens > 0, cumulative[tokens - 1], 0.0)
    assert (below <= uniforms + 1e-5).all()
    assert (uniforms <= cumulative[tokens] + 1e-5).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_temperature_0_is_the_first_of_the_most_probable(device: torch.device, vocab_size: int,
                                                         dtype: torch.dtype) -> None:
    logits_BV = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits_BV[1] = 2.5  # all alike
    logits_BV[2, [vocab_size - 1, vocab_size // 2]] = 9.0
    logits_BV[3, vocab_size - 1] = 9.0
    found = draw_rows(device, logits_BV, [0.0] * 4, [0.0, LAST, LAST, 0.5])
    assert found == [int(logits_BV[0].float().argmax()), 0, vocab_size // 2, vocab_size - 1]


def test_a_token_that_weighs_nothing_is_never_drawn(device: torch.device) -> None:
    """Blocks of impossible tokens before, between and behind the possible ones, and one that underflows."""
    logits_V = torch.full((40_000,), -torch.inf)
    places = [5, 130, 131, 20_000, 38_000]
    logits_V[places] = torch.tensor([0.0, 0.5, -200.0, 0.25, 0.1])
    tokens = draw_all(device, logits_V, 0.5, np.append(np.linspace(0.0, LAST, 200), LAST))
    assert set(tokens.tolist()) == set(places) - {131}


def test_one_possible_token_is_drawn(device: torch.device) -> None:
    logits_V = torch.full((9000,), -torch.inf)
    logits_V[8999] = -1e30
    for temperature in (0.0, 1e-5, 1.0):
        assert set(draw_all(device, logits_V, temperature, np.linspace(0.0, LAST, 5)).tolist()) == {8999}


def test_equal_logits_are_drawn_equally_often(device: torch.device) -> None:
    tokens = draw_all(device, torch.full((16,), 7.25), 0.3, np.linspace(0.0, LAST, 400))
    assert np.abs(np.bincount(tokens, minlength=16) - 25).max() <= 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 5000, 8999])
def test_a_row_without_a_token_says_so_and_its_neighbours_draw(device: torch.device, spoilt: float, place: int,
                                                               temperature: float) -> None:
    logits_BV = torch.randn(4, 9000, generator=torch.Generator().manual_seed(1))
    others = [temperature] * 4, [0.4] * 4
    wanted = draw_rows(device, logits_BV, *others)
    logits_BV[1, place] = spoilt
    logits_BV[2] = -torch.inf
    assert draw_rows(device, logits_BV, *others) == [wanted[0], NO_TOKEN, NO_TOKEN, wanted[3]]


def test_a_row_is_drawn_alike_alone_among_others_and_from_a_wider_tensor(device: torch.device) -> None:
    logits_BV = torch.randn(6, 9003, generator=torch.Generator().manual_seed(2)).bfloat16()
    temperatures, uniforms = [0.0, 0.5, 1.0, 1.0, 2.0, 0.0], [0.1, 0.3, 0.99, LAST, 0.0, 0.5]
    together = draw_rows(device, logits_BV, temperatures, uniforms)
    alone = [draw_rows(device, logits_BV[row:row + 1], temperatures[row:row + 1], uniforms[row:row + 1])[0]
             for row in range(6)]
    wider = torch.cat((logits_BV, torch.full((6, 5), 50.0).bfloat16()), dim=1).to(device)[:, :9003]
    assert together == alone == draw_rows(device, wider, temperatures, uniforms)


def misplaced(rows: int, vocab_size: int, row_width: int, first: int, dtype: torch.dtype) -> Tensor:
    """Random logits, of which each row begins `first` logits into one of `row_width`."""
    wide = torch.randn(rows, row_width, generator=torch.Generator().manual_seed(5)).to(dtype)
    return wide[:, first : first + vocab_size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("row_width", "first"), [(9007, 0), (9008, 0), (9016, 8), (9016, 1)])
def test_logits_may_lie_anywhere(device: torch.device, row_width: int, first: int, dtype: torch.dtype) -> None:
    logits_BV = misplaced(3, 9000, row_width, first, dtype)
    found = draw_rows(device, logits_BV, [0.0] * 3, [0.5] * 3)
    assert found == logits_BV.float().argmax(dim=1).tolist()


@pytest.mark.parametrize("vocab_size", [4096, 5003])
def test_nothing_is_compiled_after_the_first_draw(device: torch.device, vocab_size: int,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, dtypes and places of logits that come with adjusted rows and with parts of a vocabulary."""
    from npu_runner.platforms.cuda.ops import TritonOps
    from npu_runner.platforms.cuda.sampling import sample

    variants = []
    sum_blocks = sample._sum_blocks

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            def launch(logits_BV: Tensor, *arguments: object, **constants: object) -> None:
                variants.append((logits_BV.dtype, constants["IS_ALIGNED"]))
                sum_blocks[grid](logits_BV, *arguments, **constants)
            return launch

    monkeypatch.setattr(sample, "_sum_blocks", Recorder())
    sample_from_softmax = TritonOps().softmax_sampler(greedy=True)
    assert sample_from_softmax is not None
    half_B1 = torch.full((2, 1), 0.5, device=device)
    sample_from_softmax(torch.zeros(1, vocab_size, dtype=torch.bfloat16, device=device), half_B1[:1], half_B1[:1])
    compiled = set(variants)
    for dtype in DTYPES:
        for width, first, rows in ((vocab_size, 0, 1), (vocab_size, 0, 2), (vocab_size + 13, 1, 1)):
            logits_BV = misplaced(rows, vocab_size, width, first, dtype).to(device)
            sample_from_softmax(logits_BV, half_B1[:rows], half_B1[:rows])
    assert set(variants) == compiled == {(dtype, is_aligned) for dtype in DTYPES for is_aligned in (True, False)}


# -- in the sampler ------------------------------------------------------------------------------------------------

PLAIN = [SamplingParams(temperature=temperature) for temperature in (0.0, 0.3, 0.7, 1.0, 1.0, 3.0)]
OTHERS = [SamplingParams(min_p=0.05), SamplingParams(top_p=0.7), SamplingParams(repetition_penalty=1.3),
          SamplingParams(temperature=0.0, logprobs=2), SamplingParams(logit_bias={3: 2.0})]


def sample(sampler: SpellingSampler, device: torch.device, logits_BV: Tensor, several: list[SamplingParams],
           num_steps: int = 4) -> list[list[int]]:
    """By step, the token of each row."""
    for slot, params in enumerate(several):
        sampler.add(slot, params, [1, 2], seed=slot)
    slots, found = np.arange(len(several), dtype=np.int32), []
    for _ in range(num_steps):
        uniforms_B, slots_B = (torch.from_numpy(array).to(device) for array in (sampler.host_inputs(slots), slots))
        found.append(sampler(logits_BV[:len(several)].to(device), slots_B, uniforms_B, torch.zeros_like(slots_B),
                             slots).to_host().token_ids_B.tolist())
    return found


def make(device: torch.device, *, by_kernels: bool) -> SpellingSampler:
    from npu_runner.platforms.cuda.ops import TritonOps

    ops = TritonOps()
    hooks = {"softmax_sampler": ops.softmax_sampler(greedy=True), "samples_greedily": True} if by_kernels else {}
    return make_sampler(5000, 12, device=device, **hooks)


@pytest.fixture
def logits_BV() -> Tensor:
    return (torch.randn(12, 5000, generator=torch.Generator().manual_seed(3)) * 3).bfloat16()


def test_plain_rows_have_the_tokens_of_the_plain_operators(device: torch.device, logits_BV: Tensor) -> None:
    """The same uniforms through the same distribution: they could differ where one lies within rounding of an edge."""
    for several in (PLAIN, PLAIN[:1] * 3, PLAIN[1:], PLAIN + OTHERS):
        expected = sample(make(device, by_kernels=False), device, logits_BV, several)
        assert sample(make(device, by_kernels=True), device, logits_BV, several) == expected


def test_a_plain_row_draws_by_the_kernels_whatever_its_neighbours_ask_for(device: torch.device, logits_BV: Tensor,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """A sampler that answers row by row shows which rows use it. Rows with a penalty or bias do so from their own
    logits; min_p, top_p and greedy rows among others do not."""
    sampler = make(device, by_kernels=True)
    monkeypatch.setattr(sampler, "_softmax_sampler",
                        lambda logits_BV, *_: torch.arange(4000, 4000 + len(logits_BV), dtype=torch.int32,
                                                           device=logits_BV.device)[:, None])
    for tokens in sample(sampler, device, logits_BV, PLAIN + OTHERS):
        assert tokens[1:6] == [4001, 4002, 4003, 4004, 4005]
        assert (tokens[8], tokens[10]) == (4000, 4001)
        assert not {tokens[6], tokens[7], tokens[9]} & set(range(4000, 4012))
    for tokens in sample(sampler, device, logits_BV, PLAIN):
        assert tokens == [4000, 4001, 4002, 4003, 4004, 4005]


@pytest.mark.parametrize("several", [PLAIN, PLAIN + OTHERS], ids=["plain", "among others"])
def test_a_spoilt_row_has_no_token_and_a_valid_next_input(device: torch.device, logits_BV: Tensor,
                                                          several: list[SamplingParams]) -> None:
    logits_BV[[0, 3], 4321] = torch.nan
    sampler = make(device, by_kernels=True)
    for tokens in sample(sampler, device, logits_BV, several):
        assert [row for row, token in enumerate(tokens) if token == NO_TOKEN] == [0, 3]


def test_a_recorded_draw_follows_what_changes_in_its_memory(device: torch.device, logits_BV: Tensor) -> None:
    """Captured once, it has the tokens of the sampler launched by itself: for other logits, slots, temperatures and
    uniforms, and for rows that come later."""
    if device.type != "cuda":
        pytest.skip("a GPU captures")
    from npu_runner.platforms.cuda.graphs import CudaGraphCompiler

    sampler, other = make(device, by_kernels=True), make(device, by_kernels=True)
    logits_BV = logits_BV.to(device)
    arrays = {"slots": torch.zeros(8, dtype=torch.int64, device=device), "uniforms": torch.zeros(8, device=device),
              "receipts": torch.zeros(8, dtype=torch.int32, device=device)}
    graph_BV = torch.zeros(8, logits_BV.shape[1], dtype=torch.bfloat16, device=device)
    sampler.record(graph_BV, arrays, CudaGraphCompiler(with_inductor=False).recorder())
    for number in range(12):
        several = PLAIN[number % 3 :]
        slots = np.roll(np.arange(12, dtype=np.int32), number)[: len(several)]
        for slot, params in zip(slots.tolist(), several, strict=True):
            for each in (sampler, other):
                each.add(slot, params, [1, 2], seed=number)
        rows, count = logits_BV.roll(number, 0)[: len(slots)], len(slots)
        graph_BV[:count] = rows
        for name, values in (("slots", slots), ("uniforms", sampler.host_inputs(slots)),
                             ("receipts", np.full(count, number))):
            arrays[name][:count] = torch.from_numpy(values).to(device)
        inputs = [array[:count] for array in arrays.values()]
        found = sampler(graph_BV[:count], *inputs, slots, graph_size=8)
        assert found.num_flat_rows == 8, "replayed"
        expected = other(rows, *inputs, slots).to_host()
        assert found.to_host().token_ids_B.tolist() == expected.token_ids_B.tolist()
        assert found.to_host().receipts_B.tolist() == [number] * count
