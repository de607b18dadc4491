"""The CPU's own forms of the operators equal their definitions in float64, on few rows and on many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.cpu.ops import CpuOps

# T tokens, D inputs, U outputs, N heads, H head dim

ROWS = (1, 3, 127, 128, 300)
"""Below 128 rows torch computes products, from there on oneDNN."""
D, U, N, H = 48, 80, 6, 32


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def assert_rounded(found: Tensor, expected: Tensor) -> None:
    assert expected.dtype == torch.float64
    torch.testing.assert_close(found.double(), expected, atol=2e-6, rtol=2e-6)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + (-x2, x1) * sin, of (T, N, H)."""
    first, second = x.double().chunk(2, dim=-1)
    return x.double() * cos.double()[:, None] + torch.cat((-second, first), dim=-1) * sin.double()[:, None]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_with_and_without_gelu(num_rows: int, has_bias: bool) -> None:
    x_TD = torch.randn(num_rows, 2 * D)[:, :D]  # a view, as a split of a larger product is
    weight_UD, bias_U = torch.randn(U, D) / 7, torch.randn(U) if has_bias else None
    expected_TU = F.linear(x_TD.double(), weight_UD.double(), None if bias_U is None else bias_U.double())
    assert_rounded(CpuOps().linear(x_TD, weight_UD, bias_U), expected_TU)
    for approximate in ("none", "tanh"):
        found_TU = CpuOps().linear_gelu(x_TD, weight_UD, bias_U, approximate)
        assert_rounded(found_TU, F.gelu(expected_TU, approximate=approximate))


@pytest.mark.parametrize("shape", [(1, D), (300, D), (5, N, H), (300, N, H)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape) * torch.logspace(-4, 3, shape[0]).view(-1, *(1,) * (len(shape) - 1))
    weight, eps = torch.randn(shape[-1]), 1e-6
    expected = x.double() * (x.double().square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()
    assert_rounded(CpuOps().rms_norm(x, weight, eps), expected)
    residual = torch.randn(*shape)
    normed, total = CpuOps().add_rms_norm(x, residual, weight, eps)
    assert_rounded(total, x.double() + residual.double())
    torch.testing.assert_close(normed, CpuOps().rms_norm(total, weight, eps), atol=0, rtol=0)


@pytest.mark.parametrize("num_dims", [H, H // 2])
@pytest.mark.parametrize("num_rows", [1, 300])
def test_rotary_of_whole_and_of_half_heads(num_rows: int, num_dims: int) -> None:
    qkv_TNH = torch.randn(num_rows, N + 4, H)
    q_TNH, k_TNH = qkv_TNH[:, :N], qkv_TNH[:, N : N + 2]
    before = qkv_TNH.clone()
    cos_TR, sin_TR = torch.randn(num_rows, num_dims), torch.randn(num_rows, num_dims)
    cos_TR[:, num_dims // 2 :], sin_TR[:, num_dims // 2 :] = cos_TR[:, : num_dims // 2], sin_TR[:, : num_dims // 2]
    found = CpuOps().rotary(q_TNH, k_TNH, cos_TR, sin_TR)
    for x, turned in zip((before[:, :N], before[:, N : N + 2]), found, strict=True):
        assert_rounded(turned[..., :num_dims], rotated(x[..., :num_dims], cos_TR, sin_TR))
        torch.testing.assert_close(turned[..., num_dims:], x[..., num_dims:], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_of_a_tower(dtype: torch.dtype) -> None:
    qkv_T3NH = torch.randn(200, 3, N, H).to(dtype)
    cos_TH, sin_TH = torch.randn(200, H // 2).repeat(1, 2), torch.randn(200, H // 2).repeat(1, 2)
    expected = [rotated(qkv_T3NH[:, which], cos_TH, sin_TH) for which in range(2)]
    for found, exact in zip(CpuOps().rotary_in_float32(qkv_T3NH[:, :2], cos_TH, sin_TH), expected, strict=True):
        assert found.dtype == dtype
        if dtype == torch.float32:
            assert_rounded(found, exact)
        else:  # rounded once, behind float32
            torch.testing.assert_close(found, exact.to(dtype), atol=0, rtol=2**-7)


@pytest.mark.parametrize("num_rows", [1, 300])
def test_silu_and_mul(num_rows: int) -> None:
    gate_up_T2I = torch.randn(num_rows, 2 * D)
    gate, up = gate_up_T2I.double().chunk(2, dim=-1)
    assert_rounded(CpuOps().silu_and_mul(gate_up_T2I), gate * gate.sigmoid() * up)


def test_16_bits_on_many_rows() -> None:
    """oneDNN's products are asked for in float32 only; the others stay torch's."""
    x_TD, weight_UD, bias_U = torch.randn(300, D).bfloat16(), torch.randn(U, D).bfloat16(), torch.randn(U).bfloat16()
    expected_TU = F.linear(x_TD, weight_UD, bias_U)
    torch.testing.assert_close(CpuOps().linear(x_TD, weight_UD, bias_U), expected_TU, atol=0, rtol=0)
    torch.testing.assert_close(CpuOps().linear_gelu(x_TD, weight_UD, bias_U, "tanh"),
                               F.gelu(expected_TU, approximate="tanh"), atol=0, rtol=0)


def test_what_a_graph_compiler_sees_are_torchs_own_operators() -> None:
    """oneDNN's operator is none of those that inductor takes apart and fuses."""
    from torch._dynamo.testing import EagerAndRecordGraphs

    seen = EagerAndRecordGraphs()
    ops, weight_UD = CpuOps(), torch.randn(U, D)
    torch.compile(lambda x: ops.linear_gelu(ops.rms_norm(x, torch.ones(D), 1e-6), weight_UD, None, "tanh"),
                  backend=seen, fullgraph=True)(torch.randn(300, D))
    assert "mkldnn" not in seen.graphs[0].code
