"""Matmuls of small M against the definition in float64, on a GPU or in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.matmul_cases import DTYPES, assert_matmul, random_work


@pytest.mark.parametrize("has_bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("excess", [(0, 0), (0, 512), (6, 8)], ids=str)
@pytest.mark.parametrize("num_outputs", [1024, 6144, 12_288, 151_936])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 16])
def test_a_matmul(device: torch.device, num_rows: int, num_outputs: int, excess: tuple[int, int], dtype: torch.dtype,
                  has_bias: bool) -> None:
    """With the tile that weights of so many outputs have: two of them, two steps, and what is left over."""
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.cuda.matmul.small_m import choose_tile, multiply

    tile = choose_tile(num_rows, num_outputs)
    sizes = [2 * size + more for size, more in zip((tile.block_n, tile.block_k), excess, strict=True)]
    x_MI, weight_OI, bias_O = random_work(num_rows, *sizes, dtype)
    wider = torch.cat((x_MI, x_MI[:, :64]), dim=1).to(device)[:, :sizes[1]]  # rows of a wider tensor
    bias = bias_O if has_bias else None
    bias_N = None if bias is None else bias.to(device)
    found = multiply(Matmul(wider, weight_OI.to(device), bias_N, dtype), tile)
    assert_matmul(found, x_MI, weight_OI, bias)


@pytest.mark.parametrize(("num_inputs", "num_rows"), [(1028, 1), (1028, 2), (1024, 1), (1024, 16), (1024, 17)])
def test_linear_takes_it_up_to_its_most_rows_and_compiles_it_before(
    device: torch.device, num_inputs: int, num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of 1,028 inputs no tiles can be copied at once: they are no multiples of 16 bytes."""
    from npu_runner.platforms.cuda.matmul import small_m
    from npu_runner.platforms.cuda.ops import TritonOps

    most, compiled = (small_m.MOST_M, [1, 2]) if num_inputs == 1024 else (1, [1])
    calls: list[int] = []
    multiply = small_m.multiply
    monkeypatch.setattr(small_m, "multiply", lambda matmul: calls.append(len(matmul.x_MK)) or multiply(matmul))
    x_MI, weight_OI, bias_O = random_work(num_rows, 1024, num_inputs, torch.bfloat16)
    ops = TritonOps()
    on_device = (x_MI.to(device), weight_OI.to(device), bias_O.to(device))
    found = ops.linear(*on_device)
    is_own = num_rows <= most
    if is_own:
        assert_matmul(found, x_MI, weight_OI, bias_O)
    else:  # the library's own, which may round a matmul before it adds the bias
        assert torch.equal(found, torch.nn.functional.linear(*on_device))
    own = [num_rows] if is_own else []
    assert calls == [*compiled, *own]
    ops.linear(*on_device)
    assert calls == [*compiled, *own, *own]


def test_a_weight_whose_tiles_cannot_be_copied_at_once_stays_with_the_library(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul.small_m import MOST_M, most_m

    weight_OI = torch.zeros(8192, 1024, dtype=torch.bfloat16, device=device)
    assert most_m(weight_OI) == MOST_M
    assert most_m(weight_OI[:, :1020].contiguous()) == 1
    assert most_m(weight_OI.view(-1)[4 : 4 + 8191 * 1024].view(8191, 1024)) == 1


def test_small_weights_and_float32_stay_with_the_library(device: torch.device) -> None:
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.cuda.matmul.small_m import accepts

    x_MI, weight_OI, _ = random_work(1, 1024, 1024, torch.bfloat16)
    assert accepts(Matmul(x_MI, weight_OI, None, x_MI.dtype))
    assert not accepts(Matmul(x_MI, weight_OI[:1000], None, x_MI.dtype))
    assert not accepts(Matmul(x_MI.float(), weight_OI.float(), None, torch.float32))


@pytest.mark.parametrize("num_rows", [63, 64, 100, 128, 129])
def test_long_sums_of_the_library(device: torch.device, num_rows: int) -> None:
    """Between 64 and 128 rows another of its kernels may be chosen."""
    from npu_runner.platforms.cuda.matmul.library import multiply
    from npu_runner.platforms.cuda.matmul.operands import Matmul

    x_MI, weight_OI, bias_O = random_work(num_rows, 2048, 4096, torch.bfloat16)
    for bias in (None, bias_O):
        bias_N = None if bias is None else bias.to(device)
        found = multiply(Matmul(x_MI.to(device), weight_OI.to(device), bias_N, torch.bfloat16))
        assert_matmul(found, x_MI, weight_OI, bias)
