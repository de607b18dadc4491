"""Matmuls of quantised weights on a GPU: no further from float64 than twice what the same formula in plain torch is.

The inputs of a reference are those that the kernels rounded: two roundings of a value that lies in the middle between
two numbers may both be right. The rounding itself is compared with the definition by itself.

M rows, I input features, O output features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.platforms.ops import TorchOps
from npu_runner.platforms.quantised import (
    FP8,
    FP8_BLOCKS,
    INT8,
    QuantisedOps,
    fp8_rows,
    int8_rows,
)
from tests.cuda.quantised_weights import assert_near, exact, quantised_ops, rounded, rows_of, weight_of, wide

FORMS = (INT8, FP8, FP8_BLOCKS)
ROWS = (1, 2, 7, 16, 17, 33, 64, 65, 200, 1000)
SHAPES = ((128, 512), (384, 1024), (1280, 512), (4096, 1536), (12_288, 1024), (1024, 12_288))
ROUNDING_STEP = {INT8: 1.0, FP8: 32.0, FP8_BLOCKS: 32.0}  # the widest of the type


@pytest.fixture(autouse=True)
def on_a_gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("quantised matmuls are tried on a GPU: triton's interpreter has no FP8 and takes minutes")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("quantised matmuls are for Hopper")


def plain_matmul(form: str, rows: Any, weight: Any, bias_O: Tensor | None) -> Tensor:
    """The definition; a matmul of int8 in the library wants more than 16 rows."""
    if form != INT8 or len(rows[0]) > 16:
        return QuantisedOps(TorchOps()).linear(rows, weight, bias_O)
    sums = (rows[0].double() @ weight[0].double().T).float()  # exact: whole numbers below 2^53
    out_MO = sums * rows[1][:, None] * weight[1]
    return (out_MO if bias_O is None else out_MO + bias_O).to(rows.dtype)


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_of_any_number_of_rows(form: str, shape: tuple[int, int], has_bias: bool) -> None:
    generator, ops = torch.Generator("cuda").manual_seed(0), quantised_ops()
    weight = weight_of(form, *shape, generator)
    bias = torch.randn(shape[0], generator=generator, device="cuda") if has_bias else None
    bias = bias if form == INT8 or bias is None else bias.bfloat16()
    for num_rows in ROWS:
        x_MI = rows_of(num_rows, shape[1], generator, torch.bfloat16)
        rows = rounded(form, x_MI)
        expected, plain = exact(rows, weight, bias), plain_matmul(form, rows, weight, bias)
        for given in (rows, x_MI):  # rounded before, or by the matmul
            for _ in range(2):  # what a matmul of parts leaves behind serves the next
                assert_near(ops.linear(given, weight, bias), plain, expected)


def test_int8_of_float16() -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    weight = weight_of(INT8, 1280, 512, generator)
    for num_rows in (1, 5, 40):
        x_MI = rows_of(num_rows, 512, generator, torch.float16)
        rows = rounded(INT8, x_MI)
        assert_near(quantised_ops().linear(x_MI, weight, None), plain_matmul(INT8, rows, weight, None),
                    exact(rows, weight, None))


@pytest.mark.parametrize("num_rows", [1, 2, 16])
@pytest.mark.parametrize("form", FORMS)
def test_each_kernel_of_small_m(form: str, num_rows: int) -> None:
    """Also the tiles of more outputs, split or not, which the sizes above may not take."""
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.cuda.matmul.quantised import multiply
    from npu_runner.platforms.cuda.matmul.small_m import Tile

    generator = torch.Generator("cuda").manual_seed(2)
    weight = weight_of(form, 640, 1536, generator)
    rows = rounded(form, rows_of(num_rows, 1536, generator, torch.bfloat16))
    expected, plain = exact(rows, weight, None), plain_matmul(form, rows, weight, None)
    for tile in (Tile(64, 128, 4, 4, 4), Tile(128, 128, 8, 4), Tile(64, 128, 4, 6, 2)):
        assert_near(multiply(Matmul.from_rounded(rows, weight, None), tile), plain, expected)


def test_int8_of_sizes_that_no_8_divides() -> None:
    generator = torch.Generator("cuda").manual_seed(7)
    for shape in ((100, 512), (60, 500)):
        weight = weight_of(INT8, *shape, generator)
        for num_rows in (1, 3, 40):
            x_MI = rows_of(num_rows, shape[1], generator, torch.bfloat16)
            rows = rounded(INT8, x_MI)
            plain = (wide(*rows[:2]).float() @ wide(*weight).float().T).bfloat16()
            assert_near(quantised_ops().linear(x_MI, weight, None), plain, exact(rows, weight, None))


def test_no_rows() -> None:
    generator = torch.Generator("cuda").manual_seed(3)
    for form in FORMS:
        weight = weight_of(form, 256, 512, generator)
        found = quantised_ops().linear(torch.empty(0, 512, device="cuda", dtype=torch.bfloat16), weight, None)
        assert found.shape == (0, 256)


@pytest.mark.parametrize("num_rows", [1, 5, 33])
@pytest.mark.parametrize("form", FORMS)
def test_rounded_inputs_are_the_definitions(form: str, num_rows: int) -> None:
    """Alone, behind a norm, and behind silu(gate) * up; to within a step where a value lies between two numbers."""
    from npu_runner.platforms.cuda.ops import TritonOps

    generator, ops = torch.Generator("cuda").manual_seed(4), TritonOps()
    x_MI, residual = (rows_of(num_rows, 1536, generator, torch.bfloat16) for _ in range(2))
    gain = torch.randn(1536, generator=generator, device="cuda").bfloat16()
    normed, total = ops.add_rms_norm(x_MI, residual, gain, 1e-6)
    behind, summed = quantised_ops().add_rms_norm(x_MI, residual, gain, 1e-6, form)
    assert torch.equal(summed, total)
    activated = quantised_ops().silu_and_mul(torch.cat((x_MI, residual), dim=1), form)
    for found, values in ((rounded(form, x_MI), x_MI), (behind, normed),
                          (activated, ops.silu_and_mul(torch.cat((x_MI, residual), dim=1)))):
        defined = int8_rows(values) if form == INT8 else fp8_rows(values, in_blocks=form == FP8_BLOCKS)
        torch.testing.assert_close(found[1], defined[1], rtol=3e-7, atol=0)
        difference = (found[0].double() - defined[0].double()).abs()
        assert float(difference.max()) <= ROUNDING_STEP[form]
        assert float((difference > 0).double().mean()) < 0.01


@pytest.mark.parametrize("form", FORMS)
def test_values_are_divided_to_the_nearest(form: str) -> None:
    """As IEEE divides, for rows of all sizes: scales that float32 holds with all digits, with few of them, and not."""
    generator = torch.Generator("cuda").manual_seed(6)
    x_MI = torch.randn(80, 4096, generator=generator, device="cuda")
    x_MI = (x_MI * torch.logspace(-40, 35, 80, dtype=torch.float64, device="cuda")[:, None]).bfloat16()
    values, scales = (each.cpu() for each in rounded(form, x_MI)[:2])
    divisors = scales[:, None] if scales.dim() == 1 else scales.repeat_interleave(128, 1)
    quotients = x_MI.float().cpu() / divisors.where(divisors > 0, 1)
    assert torch.equal(values, quotients.round().to(torch.int8) if form == INT8
                       else quotients.clamp(-448, 448).to(torch.float8_e4m3fn))


def test_nan_stays() -> None:
    x_MI = torch.ones(2, 512, dtype=torch.bfloat16, device="cuda")
    x_MI[1, 7] = torch.nan
    is_nan = rounded(FP8, x_MI)[0].float().isnan()
    assert is_nan[1, 7]
    assert int(is_nan.sum()) == 1


@pytest.mark.parametrize("form", FORMS)
def test_a_captured_matmul_gives_what_it_gave(form: str) -> None:
    generator, ops = torch.Generator("cuda").manual_seed(5), quantised_ops()
    weight = weight_of(form, 1280, 1536, generator)
    for num_rows in (1, 8, 64):
        x_MI = rows_of(num_rows, 1536, generator, torch.bfloat16).contiguous()
        before = ops.linear(x_MI, weight, None)
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            ops.linear(x_MI, weight, None)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            out = ops.linear(x_MI, weight, None)
        for _ in range(2):
            out.zero_()
            graph.replay()
            assert torch.equal(out, before)


@pytest.mark.parametrize("num_rows", [8, 64])
@pytest.mark.parametrize("form", FORMS)
def test_two_streams_at_once(form: str, num_rows: int) -> None:
    """Each has counters of its own for the parts of a matmul."""
    generator, ops = torch.Generator("cuda").manual_seed(6), quantised_ops()
    weight = weight_of(form, 4096, 4096, generator)
    inputs = [rows_of(num_rows, 4096, generator, torch.bfloat16) for _ in range(2)]
    expected = [ops.linear(x_MI, weight, None) for x_MI in inputs]
    torch.cuda.synchronize()
    found: list[list[Tensor]] = [[], []]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for _ in range(50):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                found[index].append(ops.linear(inputs[index], weight, None))
    torch.cuda.synchronize()
    for index in range(2):
        assert all(torch.equal(each, expected[index]) for each in found[index])
