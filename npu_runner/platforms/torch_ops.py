"""The operators in plain torch: what every platform falls back on and is compared with. Knows no vendor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.base import Ops


class TorchOps(Ops):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_OD, bias_O)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
        return weight * normed.to(x.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_TH[:, None, :], sin_TH[:, None, :]
        return rotate_half(q_TNH, cos, sin), rotate_half(k_TKH, cos, sin)

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_half_in_float32(qk_T2NH, cos_TH, sin_TH)

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI) * up_TI


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the last dim, first half against second (arXiv 2104.09864); cos and sin broadcast to x."""
    first, second = x.chunk(2, dim=-1)
    cos_first, cos_second = cos.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    left = torch.addcmul(first * cos_first, second, sin_first, value=-1)
    right = torch.addcmul(second * cos_second, first, sin_second)
    return torch.cat((left, right), dim=-1)


def rotate_half_in_float32(qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """`Ops.rotary_in_float32` in plain torch."""
    turned_T2NH = rotate_half(qk_T2NH.float(), cos_TH[:, None, None], sin_TH[:, None, None])
    q_TNH, k_TNH = turned_T2NH.to(qk_T2NH.dtype).unbind(1)
    return q_TNH, k_TNH
