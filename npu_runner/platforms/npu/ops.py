"""Operators of a dense decoder layer through torch_npu's fused kernels. Knows nothing of models.

T tokens, N query heads, K kv heads, H head dim, D hidden size, I MLP width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_runner.platforms.base import Ops

# npu_apply_rotary_pos_emb turns q and k in one launch, in place; A2 and A3 devices take it for these head dims only.
_FUSED_ROTARY_HEAD_DIMS = (64, 128)


class NpuOps(Ops):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_OD, bias_O)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normed_TD, _, total_TD = torch_npu.npu_add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return normed_TD, total_TD

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        cos_T1H, sin_T1H = cos_TH.unsqueeze(1), sin_TH.unsqueeze(1)
        if q_TNH.shape[-1] in _FUSED_ROTARY_HEAD_DIMS:
            return torch_npu.npu_apply_rotary_pos_emb(q_TNH, k_TKH, cos_T1H, sin_T1H, layout="TND")
        cos, sin = cos_T1H.unsqueeze(0), sin_T1H.unsqueeze(0)
        q, k = (torch_npu.npu_rotary_mul(x.unsqueeze(0), cos, sin).squeeze(0) for x in (q_TNH, k_TKH))
        return q, k

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        # One kernel for q and k as heads of one tensor. The casts back also make both contiguous, as attention wants.
        cos_1T1H, sin_1T1H = cos_TH[None, :, None], sin_TH[None, :, None]
        turned_1THH = torch_npu.npu_rotary_mul(qk_T2NH.float().flatten(1, 2).unsqueeze(0), cos_1T1H, sin_1T1H)
        q_TNH, k_TNH = (half.to(qk_T2NH.dtype, memory_format=torch.contiguous_format)
                        for half in turned_1THH.squeeze(0).chunk(2, dim=1))
        return q_TNH, k_TNH

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        return torch_npu.npu_swiglu(gate_up_T2I)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        # F.gelu drops the approximation on its way: the kernel behind it computes the one with tanh for both.
        return torch_npu.npu_gelu(x, approximate=approximate)
