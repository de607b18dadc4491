"""The operators in plain torch: what every platform falls back on and is compared with. Knows no vendor."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.ops import Ops


class TorchOps(Ops):
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        return F.linear(x_TD, weight_OD, bias_O)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, (x.shape[-1],), weight, eps)
        x_f32 = x.float()
        normed = x_f32 * torch.rsqrt(x_f32.pow(2).mean(-1, keepdim=True) + eps)
        return (weight * normed.to(weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total_TD = x_TD + residual_TD
        return self.rms_norm(total_TD, weight_D, eps), total_TD

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), None, eps)
        return ((weight * normed.to(weight.dtype)) * F.silu(gate.float())).to(x.dtype)

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = cos_TR[:, None, :], sin_TR[:, None, :]
        return rotate_leading(q_TNH, cos, sin), rotate_leading(k_TKH, cos, sin)

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        return rotate_half_in_float32(qk_T2NH, cos_TH, sin_TH)

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI) * up_TI

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        probabilities_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(top_k, dim=-1)
        if renormalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(logits_TE.dtype), experts_TK.int()

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return experts_one_by_one(x_TD, weights_TK, experts_TK, gate_up, down)

    def allow_tokens(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        return self._look_up(logits_BV, rows_C, words_CW)

    @functools.cached_property
    def _look_up(self) -> TokenLookUp:
        return TokenLookUp()


class TokenLookUp:
    """`Ops.allow_tokens` by a look-up for each byte. Bits are not shifted and masked apart: that is a pass over all
    tokens for each of it, and not every device does it with all of its speed."""

    def __init__(self) -> None:
        self._masks_of_bytes: Tensor | None = None
        """float32 (256, 8): what is added for the bits of each byte, 0 or -inf."""

    def __call__(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        num_rows, num_words = words_CW.shape
        if self._masks_of_bytes is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            masks = torch.from_numpy(np.where(bits == 1, np.float32(0.0), np.float32(-np.inf)))
            self._masks_of_bytes = masks.to(words_CW.device)
        bytes_ = words_CW.view(torch.uint8).view(-1).to(torch.int32)
        masks_CV = self._masks_of_bytes.index_select(0, bytes_).view(num_rows, 32 * num_words)
        taken_CV = logits_BV if rows_C is None else logits_BV.index_select(0, rows_C)
        return taken_CV + masks_CV[:, : logits_BV.shape[1]]


def rotate_leading(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate_half` of as many leading dims as cos and sin have; the others stay."""
    num_dims = cos.shape[-1]
    if num_dims == x.shape[-1]:
        return rotate_half(x, cos, sin)
    return torch.cat((rotate_half(x[..., :num_dims], cos, sin), x[..., num_dims:]), dim=-1)


def rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the last dim, first half against second (arXiv 2104.09864); cos and sin broadcast to x."""
    first, second = x.chunk(2, dim=-1)
    cos_first, cos_second = cos.chunk(2, dim=-1)
    sin_first, sin_second = sin.chunk(2, dim=-1)
    left = torch.addcmul(first * cos_first, second, sin_first, value=-1)
    right = torch.addcmul(second * cos_second, first, sin_second)
    return torch.cat((left, right), dim=-1)


def experts_one_by_one(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up_E2ID: Tensor,
                       down_EDI: Tensor) -> Tensor:
    """`Ops.experts` where the host may look at the choice: one product for each expert that anybody chose."""
    out_TD = torch.zeros_like(x_TD)
    order = experts_TK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=len(gate_up_E2ID)).tolist()
    for expert, places in enumerate(order.split(counts)):
        if len(places):
            tokens = places // experts_TK.shape[1]
            gate, up = F.linear(x_TD[tokens], gate_up_E2ID[expert]).chunk(2, dim=-1)
            hidden = F.linear(F.silu(gate) * up, down_EDI[expert])
            out_TD.index_add_(0, tokens, hidden * weights_TK.flatten()[places, None])
    return out_TD


def rotate_half_in_float32(qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
    """`Ops.rotary_in_float32` in plain torch."""
    turned_T2NH = rotate_half(qk_T2NH.float(), cos_TH[:, None, None], sin_TH[:, None, None])
    q_TNH, k_TNH = turned_T2NH.to(qk_T2NH.dtype).unbind(1)
    return q_TNH, k_TNH
