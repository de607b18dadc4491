"""Operators of the decoder in Triton against the plain ones in torch, on a GPU or in triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from npu_runner.platforms.ops import TorchOps, rotate_half

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(32, 32), (64, 16), (256, 64)])
def test_rotary_turns_the_leading_dims_and_leaves_the_rest(device: torch.device, dtype: torch.dtype, head_dim: int,
                                                           rotary_dim: int) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    q_TNH = torch.randn(5, 12, 2 * head_dim).to(dtype)[..., :head_dim]  # beside each head's gate
    k_TKH = torch.randn(5, 2, head_dim).to(dtype)
    angles_TR = torch.randn(5, rotary_dim // 2).repeat(1, 2)
    cos_TR, sin_TR = angles_TR.cos().to(dtype), angles_TR.sin().to(dtype)
    expected = [torch.cat([rotate_half(x[..., :rotary_dim], cos_TR[:, None], sin_TR[:, None]), x[..., rotary_dim:]], -1)
                for x in (q_TNH, k_TKH)]
    found = TritonOps().rotary(q_TNH.to(device), k_TKH.to(device), cos_TR.to(device), sin_TR.to(device))
    for actual, right in zip(found, expected, strict=True):
        torch.testing.assert_close(actual.cpu(), right, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
        assert torch.equal(actual[..., rotary_dim:].cpu(), right[..., rotary_dim:])


@pytest.mark.parametrize("weight_dtype", [None, torch.float32], ids=["weight as x", "float32 weight"])
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [24, 128])
def test_gated_rms_norm(device: torch.device, dtype: torch.dtype, width: int, weight_dtype: torch.dtype | None) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    x_TVD = torch.randn(5, 4, width).to(dtype)
    gate_TVD = torch.randn(5, 4 * width + 16).to(dtype)[:, :4 * width].unflatten(1, (4, width)) * 3
    weight_D = torch.rand(width).to(weight_dtype or dtype) + 0.5
    expected = TorchOps().gated_rms_norm(x_TVD, gate_TVD, weight_D, 1e-6)
    found = TritonOps().gated_rms_norm(x_TVD.to(device), gate_TVD.to(device), weight_D.to(device), 1e-6)
    assert found.dtype == dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    flat = TritonOps().gated_rms_norm(x_TVD[:, 0].to(device), gate_TVD[:, 0].to(device), weight_D.to(device), 1e-6)
    assert torch.equal(flat, found[:, 0])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [24, 256])
def test_heads_times_the_sigmoid_of_their_gates(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """One token, and several whose gates lie beside their queries."""
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    ops = TritonOps()
    for num_tokens in (1, 7):
        x_TNH = torch.randn(num_tokens, 5, width).to(dtype)
        gate_TNH = (3 * torch.randn(num_tokens, 5 * 2 * width + 16)).to(dtype)[:, 8:-8].unflatten(1, (5, 2 * width))
        gate_TNH = gate_TNH[..., width:]
        found = ops.times_sigmoid(x_TNH.to(device), gate_TNH.to(device))
        expected = TorchOps().times_sigmoid(x_TNH, gate_TNH)
        assert found.dtype == dtype
        assert found.is_contiguous()
        torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_a_gated_sum(device: torch.device, dtype: torch.dtype) -> None:
    from npu_runner.platforms.cuda.ops import TritonOps

    torch.manual_seed(0)
    x_TD, y_TD = (torch.randn(5, 1100).to(dtype) for _ in range(2))
    gate_T1 = torch.randn(5, 3).to(dtype)[:, 1:2]
    found = TritonOps().add_gated(x_TD.to(device), y_TD.to(device), gate_T1.to(device))
    expected = TorchOps().add_gated(x_TD, y_TD, gate_T1)
    torch.testing.assert_close(found.cpu(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
