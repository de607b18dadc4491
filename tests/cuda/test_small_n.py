"""Matmuls with weights of few outputs against the definition in float64, on a GPU or in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.cuda.matmul_cases import DTYPES, assert_matmul, random_work


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [
    (1, 16, 1024), (2, 128, 2048), (16, 64, 1024), (17, 48, 2048), (64, 512, 1024)])
def test_a_matmul(device: torch.device, num_rows: int, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> None:
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.cuda.matmul.small_n import accepts, multiply

    x_MI, weight_OI, _ = random_work(num_rows, num_outputs, num_inputs, dtype)
    wider = torch.cat((x_MI, x_MI[:, :64]), dim=1).to(device)[:, :num_inputs]  # rows of a wider tensor
    matmul = Matmul(wider, weight_OI.to(device), None, dtype)
    assert accepts(matmul)
    assert_matmul(multiply(matmul), x_MI, weight_OI, None)


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs", "dtype"), [
    (0, 128, 2048, torch.bfloat16), (65, 128, 2048, torch.bfloat16), (1, 1, 2048, torch.bfloat16),
    (1, 528, 2048, torch.bfloat16), (1, 128, 4096, torch.bfloat16),
    (1, 128, 1100, torch.bfloat16), (1, 128, 2048, torch.float32)])
def test_others_are_left_to_the_library(device: torch.device, num_rows: int, num_outputs: int, num_inputs: int,
                                        dtype: torch.dtype) -> None:
    from npu_runner.platforms.cuda.matmul.operands import Matmul
    from npu_runner.platforms.cuda.matmul.small_n import accepts

    x_MI, weight_OI = (torch.zeros(rows, num_inputs, dtype=dtype, device=device) for rows in (num_rows, num_outputs))
    assert not accepts(Matmul(x_MI, weight_OI, None, dtype))


def test_linear_takes_it(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from npu_runner.platforms.cuda.matmul import small_n
    from npu_runner.platforms.cuda.ops import TritonOps

    calls: list[int] = []
    multiply = small_n.multiply
    monkeypatch.setattr(small_n, "multiply", lambda matmul: calls.append(len(matmul.x_MK)) or multiply(matmul))
    x_MI, weight_OI, bias_O = random_work(2, 16, 1024, torch.bfloat16)
    for bias, is_taken in ((None, True), (bias_O.to(device), False)):
        calls.clear()
        found = TritonOps().linear(x_MI.to(device), weight_OI.to(device), bias)
        assert calls == [2] * is_taken
        assert_matmul(found, x_MI, weight_OI, None if bias is None else bias_O)
