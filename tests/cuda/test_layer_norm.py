"""Layer norm in Triton, with and without a sum, against its definition in float64; a matmul that ends in GELU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
EPS = 1e-6


@pytest.mark.parametrize("adds", [True, False], ids=["with a sum", "alone"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [24, 1152, 4608])
def test_layer_norm_is_its_definition(device: torch.device, dtype: torch.dtype, width: int, adds: bool) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    x_TD = (torch.randn(5, width) * 3 + 7).to(dtype)  # a mean that a sum of squares alone would lose
    residual_TD = torch.randn(5, 2 * width).to(dtype)[:, :width]
    weight_D, bias_D = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    on_device = [value.to(device) for value in (x_TD, residual_TD, weight_D, bias_D)]
    if adds:
        found, total = TritonOps().add_layer_norm(*on_device, EPS)
        assert torch.equal(total.cpu(), x_TD + residual_TD)
    else:
        found, total = TritonOps().layer_norm(on_device[0], *on_device[2:], EPS), x_TD
    expected = F.layer_norm(total.cpu().double(), (width,), weight_D.double(), bias_D.double(), EPS)
    assert found.dtype == dtype
    scale = expected.abs().max()
    torch.testing.assert_close(found.cpu().double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_matmul_that_ends_in_gelu(device: torch.device, dtype: torch.dtype, approximate: str) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    x_TD, weight_OD, bias_O = (value.to(dtype) for value in (torch.randn(40, 64), torch.randn(96, 64) / 8,
                                                             torch.randn(96)))
    matmul = F.linear(x_TD.double(), weight_OD.double(), bias_O.double())
    expected = F.gelu(matmul, approximate=approximate)
    found = TritonOps().linear_gelu(x_TD.to(device), weight_OD.to(device), bias_O.to(device), approximate)
    assert found.dtype == dtype
    scale = expected.abs().max()
    torch.testing.assert_close(found.cpu().double() / scale, expected / scale, rtol=0, atol=TOLERANCE[dtype])
