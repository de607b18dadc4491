"""The operators of a decoder layer that a vendor must provide. Plain versions of all are in torch_ops.py.

Shapes: T tokens of a step, N query heads, K kv heads or experts of a token, H head dim, R dims of a head that turn,
D hidden size, I MLP width, E experts; all of this rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

AllowedDraw: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logits (B, V), temperatures (B, 1) float32, uniforms (B, 1) float32, words (C, W) int32, masks (B,) int32: the mask
of each row, -1 for none) -> tokens (B, 1) int32; -1 where a row is no number, -2 where nothing is left to come."""


class HeadNorms(NamedTuple):
    """RMS norms of each query and key head; weights (H,) as in `Ops.rms_norm`."""

    q_weight_H: Tensor
    k_weight_H: Tensor
    eps: float


class Ops(ABC):
    """Operators of a dense decoder layer, fused where the vendor has them. All shapes are this rank's."""

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
        """Rotate halves of the first R <= H dims: x * cos + (-x2, x1) * sin. May work in place on q and k."""

    @abstractmethod
    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        """`rotary` of q and k side by side, computed in float32 and rounded once. May work in place; cos, sin float32.

        What vision towers do, whatever the model's dtype.
        """

    @abstractmethod
    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        """silu(first half) * second half, (T, I)."""

    experts_form: str = "plain operators"
    """What computes experts, for reports."""
    experts_in_out: bool = False
    """Experts' weights lie as (experts, inputs, outputs) and not as (experts, outputs, inputs)."""

    @abstractmethod
    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        """Weights (T, K) of logits' dtype and experts (T, K) int32: the most probable of a float32 softmax over all.

        With `renormalise` the weights of a token are divided by their sum before they are rounded.
        """

    @abstractmethod
    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Sum over a token's K experts of weight * down(silu(gate) * up), (T, D).

        gate_up (E, 2I, D), gate first, and down (E, D, I); with `experts_in_out` (E, D, 2I) and (E, I, D).
        """

    def add_gated(self, x_TD: Tensor, y_TD: Tensor, gate_T1: Tensor) -> Tensor:
        """x + sigmoid(gate) * y, (T, D): the experts that were chosen, and the one that every token sees."""
        return x_TD + torch.sigmoid(gate_T1) * y_TD

    def gelu(self, x: Tensor, approximate: str) -> Tensor:
        """GELU (arXiv 1606.08415); `approximate` is "none", by the error function, or "tanh"."""
        return F.gelu(x, approximate=approximate)

    def linear_gelu(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, approximate: str) -> Tensor:
        """gelu(x W^T + b), (T, O)."""
        return self.gelu(self.linear(x_TD, weight_OD, bias_O), approximate)

    def sort_ascending(self, x: Tensor) -> Tensor:
        """The values of each row (the last dim), smallest first; a fresh tensor."""
        return x.sort(dim=-1).values

    draws_greedily: bool = False
    """`softmax_draw` takes temperature 0, which is the most probable token, the first of equals."""

    def softmax_draw(self) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        """What draws from the whole vocabulary at once; None: the sampler's plain operators do.

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

    def allowed_draw(self) -> AllowedDraw | None:
        """What draws from the tokens that masks leave, without a copy of the logits; None: `allow_tokens` comes first.

        As `softmax_draw` with `draws_greedily`, and for each row which mask is its own.
        """
        return None
