"""The operators of a decoder layer that a vendor must provide (`Ops`), and all of them in plain torch, which every
platform falls back on and is compared with (`TorchOps`). Knows no vendor.

Shapes: T tokens of a step, N query heads, K kv heads or experts of a token, H head dim, R dims of a head that turn,
D hidden size, I MLP width, E experts; all of this rank.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.errors import Contract

AddAt: TypeAlias = Callable[[Tensor, Tensor, Tensor], object]
"""(table (N,) float32, places (B,) int64, none twice, amounts (B,) float32): adds to the table, in place."""

MaskedSampler: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits (B, V), temperatures (B, 1) float32, uniforms (B, 1) float32, words (C, W) int32, masks (B,) int32: the mask
of each row, -1 for none) -> tokens (B, 1) int32; -1 where a row is no number, -2 where nothing is left to come."""


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head; weights (H,) as in `Ops.rms_norm`."""

    q_weight_H: Tensor
    k_weight_H: Tensor
    eps: float


class HeldExperts(NamedTuple):
    """A rank holds the experts from `first` on, of the layer's `total`. Its weights say how many."""

    first: int
    total: int


class Ops(Contract, ABC):
    """Operators of a dense decoder layer, fused where the vendor has them. All shapes are this rank's."""

    _REPLACED: ClassVar = {
        "softmax_draw": "softmax_sampler(greedy=False)", "draws_greedily": "softmax_sampler(greedy=True)",
        "allowed_draw": "masked_sampler", "settled": "QuantisedOps.prepare_weight",
        "settled_int8": "QuantisedOps.prepare_weight", "settled_int8_experts": "QuantisedOps.prepare_experts",
        "most_int8_features": "QuantisedOps.max_int8_features", "silu_and_mul_for": "QuantisedOps.silu_and_mul",
        "quantised_experts": "QuantisedOps.experts", "fuses_rounding": "QuantisedOps.fuses_rounding",
        **{f"{form}_linear": "QuantisedOps.linear" for form in ("int8", "int8_static", "fp8", "grouped")},
        **{f"add_rms_norm_{form}": "QuantisedOps.add_rms_norm" for form in ("int8", "int8_static", "fp8")},
    }

    @abstractmethod
    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        """x W^T + b, (T, O)."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm over the last dim, computed in float32 (arXiv 1910.07467), of x's dtype.

        `weight` is of x's dtype, with which the rounded norm is multiplied, or float32: then all is rounded once.
        """

    @abstractmethod
    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def layer_norm(self, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        """Layer norm over the last dim (arXiv 1607.06450), computed in float32, of x's dtype."""
        return F.layer_norm(x, weight_D.shape, weight_D, bias_D, eps)

    def add_layer_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor,
                       eps: float) -> tuple[Tensor, Tensor]:
        """(layer_norm(x + residual), x + residual)."""
        total_TD = x_TD + residual_TD
        return self.layer_norm(total_TD, weight_D, bias_D, eps), total_TD

    @abstractmethod
    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        """rms_norm(x) * weight * silu(gate), over the last dim, the gate in float32; of x's dtype (Gated DeltaNet)."""

    @abstractmethod
    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        """Rotate halves of the first R <= H dims: x * cos + (-x2, x1) * sin. May work in place on q and k.

        cos and sin are float32 in some networks of transformers, whatever the dtype of q and k.
        """

    @abstractmethod
    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        """`rotary` of q and k side by side, computed in float32 and rounded once. May work in place; cos, sin float32.

        What vision towers do, whatever the model's dtype.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(first half) * second half, (T, I)."""

    experts_in_out: bool = False
    """Experts' weights lie as (experts, inputs, outputs) and not as (experts, outputs, inputs)."""

    @abstractmethod
    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Weights (T, K) of logits' dtype and experts (T, K) int32: the most probable of a float32 softmax over all.

        With `renormalise` the weights of a token are divided by their sum before they are rounded.
        """

    @abstractmethod
    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        """Sum over a token's K experts of weight * down(silu(gate) * up), (T, D).

        gate_up (E, 2I, D), gate first, and down (E, D, I); with `experts_in_out` (E, D, 2I) and (E, I, D). `held`:
        which experts these are; the others of a token add nothing. None: they are all.
        """

    def add_gated(self, x_TD: Tensor, y_TD: Tensor, gate_T1: Tensor) -> Tensor:
        """x + sigmoid(gate) * y, (T, D): the experts that were chosen, and the one that every token sees."""
        return x_TD + torch.sigmoid(gate_T1) * y_TD

    def times_sigmoid(self, x_TNH: Tensor, gate_TNH: Tensor) -> Tensor:
        """x * sigmoid(gate), the sigmoid rounded before the multiplication."""
        return x_TNH * torch.sigmoid(gate_TNH)

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """GELU (arXiv 1606.08415). `approximate`: "none" is by the error function; the others are "tanh" and "sigmoid",
        x * sigmoid(1.702 x) (section 2)."""
        return x * torch.sigmoid(1.702 * x) if approximate == "sigmoid" else F.gelu(x, approximate=approximate)

    def linear_gelu(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, approximate: str) -> Tensor:
        """gelu(x W^T + b), (T, O)."""
        return self.gelu(self.linear(x_TD, weight_OD, bias_O), approximate)

    def sort_ascending(self, x: Tensor) -> Tensor:
        """The values of each row (the last dim), smallest first; a fresh tensor."""
        return x.sort(dim=-1).values

    @staticmethod
    def add_at(table_N: Tensor, places_B: Tensor, amounts_B: Tensor) -> None:
        """Add to a few places of a table in place. No place comes twice."""
        table_N.index_add_(0, places_B, amounts_B)

    def softmax_sampler(self, *, greedy: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """A function that samples from the whole vocabulary at once; None: the sampler's plain operators do.

        `greedy`: rows may have temperature 0, which is the most probable token, the first of equals.
        (logits (B, V), temperatures (B, 1) float32, uniforms in [0, 1) (B, 1) float32) -> tokens (B, 1) int32: the
        first whose running sum of softmax(logits / temperature) passes the uniform, never one that weighs nothing; -1
        where a row has no token: its logits hold NaN or +inf, or are all -inf. A row's token is the same whatever rows
        stand beside it.
        """
        return None

    @abstractmethod
    def allow_tokens(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        """float32 (C, V), fresh: logits of the rows `rows_C` (int64; None: all), less infinity where a mask has no bit.

        words_CW: int32, a bit per token, the lowest first. NaN stays what it is and +inf without a bit becomes it, so
        that a row which is no number still shows it.
        """

    def masked_sampler(self) -> MaskedSampler | None:
        """A function that samples from the tokens that masks allow, without a copy of the logits; None: `allow_tokens`
        comes first.

        As a greedy `softmax_sampler`, and for each row which mask is its own.
        """
        return None


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
        return rotate_leading(q_TNH, cos, sin).to(q_TNH.dtype), rotate_leading(k_TKH, cos, sin).to(k_TKH.dtype)

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        turned_T2NH = rotate_half(qk_T2NH.float(), cos_TH[:, None, None], sin_TH[:, None, None])
        q_TNH, k_TNH = turned_T2NH.to(qk_T2NH.dtype).unbind(1)
        return q_TNH, k_TNH

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
        return F.silu(gate_TI) * up_TI

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        probabilities_TE = F.softmax(logits_TE, dim=-1, dtype=torch.float32)
        weights_TK, experts_TK = probabilities_TE.topk(top_k, dim=-1)
        if renormalise:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        return weights_TK.to(logits_TE.dtype), experts_TK.int()

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        return experts_one_by_one(x_TD, weights_TK, experts_TK, gate_up, down, 0 if held is None else held.first)

    def allow_tokens(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        return self._look_up(logits_BV, rows_C, words_CW)

    @functools.cached_property
    def _look_up(self) -> TokenLookUp:
        return TokenLookUp()


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
                       down_EDI: Tensor, first: int) -> Tensor:
    """`Ops.experts` if the host may read the routing: one matmul for each expert with tokens. `first`: as of
    `HeldExperts`."""
    return loop_over_experts(x_TD, weights_TK, experts_TK, range(first, first + len(gate_up_E2ID)),
                             lambda rows, expert: F.linear(rows, gate_up_E2ID[expert]),
                             lambda rows, expert: F.linear(rows, down_EDI[expert]))


def loop_over_experts(x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, held: range,
                      gate_up: Callable[[Tensor, int], Tensor], down: Callable[[Tensor, int], Tensor]) -> Tensor:
    """`gate_up` and `down` multiply rows with an expert's matrix; they count experts from the first of `held`."""
    out_TD = torch.zeros_like(x_TD)
    order = experts_TK.flatten().argsort(stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=held.stop).tolist()
    for expert, places in enumerate(order.split(counts)[held.start : held.stop]):
        if len(places):
            tokens = places // experts_TK.shape[1]
            gate, up = gate_up(x_TD[tokens], expert).chunk(2, dim=-1)
            hidden = down(F.silu(gate) * up, expert)
            out_TD.index_add_(0, tokens, hidden * weights_TK.flatten()[places, None])
    return out_TD


class TokenLookUp:
    """`Ops.allow_tokens` by a look-up for each byte. Bits are not shifted and masked separately: each would be a pass
    over all tokens, slow on some devices."""

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
