"""Matmuls of small M in CUDA C++ on Hopper: no further from float64 than twice what plain torch is.

M rows, I input features, O output features.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import TorchOps
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, QuantisedOps
from tests.cuda.paged_work import need_hopper
from tests.cuda.quantised_weights import assert_near, exact, rounded, rows_of, weight_of

FORMS = (FP8, FP8_BLOCKS)
ROWS = (1, 2, 7, 8, 9, 16)
SHAPES = ((16, 128), (144, 1152), (2064, 1536), (4096, 4096), (24_576, 1024), (1024, 12_288), (6144, 256))


@pytest.fixture(autouse=True)
def _hopper(device: torch.device) -> None:
    need_hopper(device)


def twice(x_MI: Tensor, x_scale: Tensor | None, weight_OI: Tensor, scale: Tensor | None, bias_O: Tensor | None,
          dtype: torch.dtype) -> Tensor:
    """What a matmul leaves behind serves the next, and sums are added in one order."""
    from npu_runner.platforms.cuda.matmul.hopper_small_m import multiply
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    torch.cuda.synchronize()  # a weight is written long before
    found, again = (multiply(Matmul(x_MI, weight_OI, bias_O, dtype, x_scale, scale)) for _ in range(2))
    assert torch.allclose(found, again, rtol=0, atol=0, equal_nan=True)
    return found


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_fp8(form: str, shape: tuple[int, int], has_bias: bool) -> None:
    """One unit of outputs and thousands; fewer slices of inputs than warps, as many, and more."""
    (num_outputs, num_inputs), generator = shape, torch.Generator("cuda").manual_seed(sum(shape))
    whole = -(-num_outputs // 128) * 128 if form == FP8_BLOCKS else num_outputs  # a block of an edge is cut short
    weight = weight_of(form, whole, num_inputs, generator)
    bias = torch.randn(whole, generator=generator, device="cuda").bfloat16() if has_bias else None
    for num_rows in ROWS:
        rows = rounded(form, rows_of(num_rows, num_inputs, generator, torch.bfloat16))
        plain = QuantisedOps(TorchOps()).linear(rows, weight, bias)[:, :num_outputs]
        expected = exact(rows, weight, bias)[:, :num_outputs]
        given = None if bias is None else bias[:num_outputs]
        found = twice(rows[0], rows[1], weight[0][:num_outputs], weight[1], given, torch.bfloat16)
        assert_near(found, plain, expected)


def test_one_scale_for_all_outputs() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    weight = weight_of(FP8, 1024, 512, generator)
    rows = rounded(FP8, rows_of(3, 512, generator, torch.bfloat16))
    one = weight[1][:1].contiguous()
    found = twice(rows[0], rows[1], weight[0], one, None, torch.bfloat16)
    assert torch.equal(found, twice(rows[0], rows[1], weight[0], one.expand(1024).contiguous(), None, torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(16, 64), (1040, 1088), (4096, 4096), (1024, 12_288), (24_576, 512)], ids=str)
def test_16_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    (num_outputs, num_inputs) = shape
    weight_OI = (torch.randn(shape, generator=generator, device="cuda") * num_inputs**-0.5).to(dtype)
    bias_O = torch.randn(num_outputs, generator=generator, device="cuda").to(dtype)
    for num_rows in ROWS:
        x_MI = rows_of(num_rows, num_inputs, generator, dtype)
        for bias in (None, bias_O):
            expected = x_MI.double() @ weight_OI.double().T + (0 if bias is None else bias.double())
            plain = torch.nn.functional.linear(x_MI.float(), weight_OI.float(), None if bias is None else bias.float())
            assert_near(twice(x_MI, None, weight_OI, None, bias, dtype), plain.to(dtype), expected)


def test_what_is_not_a_number_stays_in_its_row() -> None:
    weight_OI = torch.randn(1024, 1088, device="cuda").bfloat16()
    x_MI = torch.randn(5, 1088, device="cuda").bfloat16()
    kept = twice(x_MI, None, weight_OI, None, None, torch.bfloat16)
    x_MI[1], x_MI[3, 0] = float("nan"), float("inf")
    found = twice(x_MI, None, weight_OI, None, None, torch.bfloat16)
    assert found[1].isnan().all()
    assert found[3].isinf().all()
    assert torch.equal(found[[0, 2, 4]], kept[[0, 2, 4]])


def test_a_graph_of_products_one_behind_the_other() -> None:
    """Each asks for the next one's weight. The graph gives what the calls gave."""
    from npu_runner.platforms.cuda.matmul.hopper_small_m import multiply
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    weights = [torch.randn(shape, device="cuda").bfloat16() * 0.02 for shape in ((6144, 4096), (4096, 6144)) * 3]
    x_MI = torch.randn(4, 4096, device="cuda").bfloat16()

    def run() -> Tensor:
        rows = x_MI
        for weight_OI in weights:
            rows = multiply(Matmul(rows, weight_OI, None, torch.bfloat16))
        return rows

    expected = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    for _ in range(20):
        found.zero_()
        graph.replay()
        assert torch.equal(found, expected)


def test_what_the_copy_engine_does_not_take_stays_with_the_others() -> None:
    from npu_runner.platforms.cuda.matmul.hopper_small_m import accepts
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    def accepted(x_MI: Tensor, weight_OI: Tensor) -> bool:
        scales = torch.zeros(2, len(weight_OI), device="cuda")
        return accepts(Matmul(x_MI, weight_OI, None, torch.bfloat16, scales[0, :len(x_MI)], scales[1]))

    weight_OI = torch.zeros(16_384, 1152, device="cuda").to(torch.float8_e4m3fn)
    x_MI = torch.zeros(17, 1152, device="cuda").to(torch.float8_e4m3fn)
    assert accepted(x_MI[:1], weight_OI)
    assert accepted(x_MI[:16], weight_OI)
    assert not accepted(x_MI, weight_OI)
    assert not accepted(x_MI[:0], weight_OI)
    assert not accepted(x_MI[:1, :1024], weight_OI[:, :1024])
    assert not accepted(x_MI[:1, :1040].contiguous(), weight_OI[:, :1040].contiguous())
    assert not accepted(x_MI[:1], weight_OI[:16_376])
    assert not accepted(x_MI[:1], weight_OI[:8192])
    assert not accepted(x_MI[:1].view(torch.int8), weight_OI.view(torch.int8))


def test_in_16_bits_some_multiprocessors_may_be_left_without_outputs() -> None:
    from npu_runner.platforms.cuda.matmul.hopper_small_m import accepts
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    def accepted(num_rows: int, *shape: int) -> bool:
        weight_OI = torch.zeros(shape, device="cuda", dtype=torch.bfloat16)
        x_MI = weight_OI[:1].expand(num_rows, -1).contiguous()
        return accepts(Matmul(x_MI, weight_OI, None, torch.bfloat16))

    assert [accepted(count, 2048, 4096) for count in (1, 2, 16, 17)] == [False, True, True, False]
    assert [accepted(count, 4096, 2048) for count in (1, 2)] == [True, True]
    assert not accepted(2, 1024, 8192)
    assert not accepted(2, 2048, 4032), "less than 16 MiB"
