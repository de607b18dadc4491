"""Experts in int8 and FP8 on a GPU: no further from float64 than twice what the same formula in plain torch is.

T tokens, K experts a token, E experts, D hidden size, I width of an expert.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import FP8_EXPERTS, INT8_EXPERTS, QuantisedExperts, QuantisedOps
from tests.cuda.quantised_weights import quantised_ops
from tests.oracle.expert_reference import mixture

LIMIT = 2.0
FORMS = (INT8_EXPERTS, FP8_EXPERTS)


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("experts in 8 bits are tried on a GPU: triton's interpreter has no FP8 and takes minutes")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("quantised matmuls are for Hopper")


def weight_of(form: str, num_experts: int, num_outputs: int, num_inputs: int) -> QuantisedExperts:
    """As if it had been rounded: values over the type's whole range, scales of several sizes."""
    values = torch.randn(num_experts, num_outputs, num_inputs)
    if form == INT8_EXPERTS:
        scales = (torch.rand(num_experts, num_outputs) + 0.2) / 40 * num_inputs**-0.5
        return QuantisedExperts((values * 40).round().clamp(-127, 127).to(torch.int8), scales)
    scales = (torch.rand(num_experts, num_outputs // 128, num_inputs // 128) + 0.2) / 100 * num_inputs**-0.5
    return QuantisedExperts((values * 100).clamp(-448, 448).to(torch.float8_e4m3fn), scales)


def random_work(form: str, num_tokens: int, top_k: int, num_experts: int, hidden_size: int, width: int,
                dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    torch.manual_seed(num_tokens + width)
    x_TD = torch.randn(num_tokens, hidden_size + 16)[:, :hidden_size] * torch.logspace(-1, 1, num_tokens)[:, None]
    if num_tokens > 2:
        x_TD[1] = 0
    order_TE = torch.rand(num_tokens, num_experts).argsort(dim=1)
    return {"x_TD": x_TD.to(dtype), "weights_TK": torch.rand(num_tokens, top_k).to(dtype),
            "experts_TK": order_TE[:, :top_k].int().contiguous(),
            "gate_up": weight_of(form, num_experts, 2 * width, hidden_size),
            "down": weight_of(form, num_experts, hidden_size, width)}


def on_device(given: Any) -> Any:
    return type(given)(*(each.cuda() for each in given)) if isinstance(given, tuple) else given.cuda()


def run(work: dict[str, Any]) -> Tensor:
    x_TD = work["x_TD"]
    x_TD = torch.cat([x_TD, x_TD[:, :16]], dim=1).cuda()[:, : x_TD.shape[1]]  # rows of a wider tensor
    others = [on_device(work[name]) for name in ("weights_TK", "experts_TK", "gate_up", "down")]
    return quantised_ops().experts(x_TD, *others)


def error_of(found: Tensor, expected: Tensor) -> float:
    """The largest difference of a row, over the row's largest value: rows are of several sizes. One of zeros is 0."""
    largest = expected.abs().amax(1)
    assert not found.cpu()[largest == 0].any()
    return float(((found.cpu().double() - expected).abs().amax(1) / largest.clamp(min=1e-30)).max())


def assert_near(cases: list[tuple[Tensor, dict[str, Any]]]) -> None:
    """Of each case the largest difference, against the largest that plain torch has in all of them: what a single row
    is off by is a matter of which values lie between two numbers."""
    expected = [mixture(**work) for _, work in cases]
    plain = max(error_of(QuantisedOps(CpuOps()).experts(**work), right)
                for (_, work), right in zip(cases, expected, strict=True))
    for (found, work), right in zip(cases, expected, strict=True):
        assert found.dtype == work["x_TD"].dtype
        ours = error_of(found, right)
        assert ours <= LIMIT * plain, f"{ours:.2e} of {len(found)} tokens, plain torch {plain:.2e}"


@pytest.mark.parametrize("sizes", [(2, 4, 256, 128), (8, 32, 512, 384), (3, 5, 640, 256), (1, 1, 128, 128)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_few_and_many_tokens(form: str, sizes: tuple[int, ...]) -> None:
    works = [random_work(form, num_tokens, *sizes) for num_tokens in (1, 2, 3, 17, 90, 700)]
    assert_near([(run(work), work) for work in works])


def test_int8_of_sizes_that_no_128_divides_and_of_float16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        works = [random_work(INT8_EXPERTS, num_tokens, 2, 6, 200, 72, dtype) for num_tokens in (1, 5, 300)]
        assert_near([(run(work), work) for work in works])


@pytest.mark.parametrize("form", FORMS)
def test_all_tokens_on_one_expert_and_the_others_empty(form: str) -> None:
    works = [random_work(form, num_tokens, 1, 6, 256, 128) for num_tokens in (3, 150)]
    for work in works:
        work["experts_TK"].fill_(4)
    assert_near([(run(work), work) for work in works])


@pytest.mark.parametrize("form", FORMS)
def test_what_ranges_of_experts_compute_adds_up(form: str) -> None:
    """Few tokens and many, ranges that nobody chose among them."""
    cases = []
    for num_tokens in (1, 3, 40, 700):
        work, ops = random_work(form, num_tokens, 2, 7, 256, 128), quantised_ops()
        x_TD, weights_TK, experts_TK, gate_up, down = (on_device(each) for each in work.values())
        total = torch.zeros(x_TD.shape, dtype=torch.float64)
        for first, last in ((0, 4), (4, 5), (5, 7)):
            parts = (QuantisedExperts(each.values[first:last], each.scales[first:last]) for each in (gate_up, down))
            part = ops.experts(x_TD, weights_TK, experts_TK, *parts, HeldExperts(first, 7)).cpu().double()
            is_chosen = ((work["experts_TK"] >= first) & (work["experts_TK"] < last)).any(1)
            assert (part[~is_chosen] == 0).all(), "exactly nothing"
            total += part
        cases.append((total.to(x_TD.dtype), work))
    assert_near(cases)


@pytest.mark.parametrize("form", FORMS)
def test_every_tile_size(form: str) -> None:
    from npu_runner.platforms.cuda.moe import experts

    work = random_work(form, 90, 3, 5, 384, 256)
    x_TD, weights_TK, experts_TK, gate_up, down = (on_device(each) for each in work.values())
    for tiling in experts.tilings(gate_up.values.dtype):
        for few in (0, 10_000):
            pairs = experts.sort_pairs(experts_TK, 5, tiling.rows, few)
            assert_near([(experts.quantised_gemms(x_TD, weights_TK, pairs, gate_up, down, tiling), work)])


@pytest.mark.parametrize("form", FORMS)
def test_a_captured_step_gives_what_it_gave(form: str) -> None:
    for num_tokens in (1, 8, 64):
        work, ops = random_work(form, num_tokens, 4, 16, 512, 256), quantised_ops()
        given = [on_device(each) for each in work.values()]
        before = ops.experts(*given)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops.experts(*given)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.experts(*given)
        for _ in range(2):
            out.zero_()
            graph.replay()
            assert torch.equal(out, before)
