"""Operators of decoder layers through torch_npu's fused kernels; experts.py has those of experts. Knows no models.

T tokens, N query heads, K kv heads, H head dim, R dims of a head that rotate, D hidden size, I width of an MLP or
expert, E experts, K of them a token.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_runner.platforms.npu.experts import run_experts
from npu_runner.platforms.npu.sample import sample_from_softmax
from npu_runner.platforms.ops import HeldExperts, TorchOps

# npu_apply_rotary_pos_emb turns q and k in one launch, in place; A2 and A3 devices take it for these head dims only.
_FUSED_ROTARY_HEAD_DIMS = (64, 128)


class NpuOps(TorchOps):
    experts_in_out = True  # the grouped matmul reads (groups, in, out)

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_OD, bias_O)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return torch_npu.npu_rms_norm(x, weight, eps)[0]

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if weight_D.dtype != x_TD.dtype:  # float32: the norm's own kernel takes such weights, the fused one not
            total_TD = x_TD + residual_TD
            return self.rms_norm(total_TD, weight_D, eps), total_TD
        normed_TD, _, total_TD = torch_npu.npu_add_rms_norm(x_TD, residual_TD, weight_D, eps)
        return normed_TD, total_TD

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        # swiglu computes silu of the first half times the second in float32, and rounds once.
        return torch_npu.npu_swiglu(torch.cat((gate, self.rms_norm(x, weight, eps)), dim=-1))

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        if cos_TR.dtype != q_TNH.dtype:
            return super().rotary(q_TNH, k_TKH, cos_TR, sin_TR)
        num_dims = cos_TR.shape[-1]
        if num_dims == q_TNH.shape[-1]:
            return _rotate(q_TNH, k_TKH, cos_TR, sin_TR)
        heads = [x[..., :num_dims].contiguous() for x in (q_TNH, k_TKH)]
        turned = _rotate(heads[0], heads[1], cos_TR, sin_TR)
        q, k = (torch.cat((head, x[..., num_dims:]), dim=-1) for head, x in zip(turned, (q_TNH, k_TKH), strict=True))
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

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        # renorm 1 is the softmax over the k largest: the same as dividing by their sum.
        weights_TK, experts_TK, _ = torch_npu.npu_moe_gating_top_k_softmax_v2(logits_TE, k=top_k,
                                                                              renorm=int(renormalise))
        return weights_TK, experts_TK

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        return run_experts(x_TD, weights_TK, experts_TK, gate_up, down, held)

    @staticmethod
    def add_at(table_N: Tensor, places_B: Tensor, amounts_B: Tensor) -> None:
        # scatter_add_ and index_add_ of a long table run on the AI CPU or copy it; this operator writes in place.
        torch_npu.npu_scatter_nd_update_(table_N, places_B[:, None], table_N.index_select(0, places_B) + amounts_B)

    def softmax_sampler(self, *, greedy: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        return None if greedy else sample_from_softmax

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        if approximate == "sigmoid":
            return super().gelu(x, approximate)
        # F.gelu drops the approximation on its way: the kernel behind it computes the one with tanh for both.
        return torch_npu.npu_gelu(x, approximate=approximate)


def _rotate(q_TNR: Tensor, k_TKR: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
    cos_1T1R, sin_1T1R = cos_TR[None, :, None], sin_TR[None, :, None]
    q_1TNR, k_1TKR = q_TNR.unsqueeze(0), k_TKR.unsqueeze(0)
    if q_TNR.shape[-1] in _FUSED_ROTARY_HEAD_DIMS:
        # It turns in place, and a trace takes what it returns for fresh and contiguous: so it must be that before.
        q_1TNR, k_1TKR = q_1TNR.contiguous(), k_1TKR.contiguous()
        # BSND with one batch, by views: every CANN from 8.3 on takes it, and TND came with releases after that.
        turned = torch_npu.npu_apply_rotary_pos_emb(q_1TNR, k_1TKR, cos_1T1R, sin_1T1R, layout="BSND")
        return turned[0].squeeze(0), turned[1].squeeze(0)
    q, k = (torch_npu.npu_rotary_mul(x, cos_1T1R, sin_1T1R).squeeze(0) for x in (q_1TNR, k_1TKR))
    return q, k
