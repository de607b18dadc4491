"""Gated DeltaNet in plain torch: chunks for prompts (arXiv 2406.06484 and 2412.06464), one step for decoding.

Within a chunk the recurrence is a triangular system, solved for all chunks at once (`chunk_parts`); between chunks only
the state is carried (arXiv 2412.06464, section 3.3). Knows no vendor and no pool. All is float32 whatever the model's
dtype.

T tokens, B sequences, Nk and Nv key and value heads, G = Nv / Nk, K and V their dims, C channels, W convolution kernel;
R rows of a group or wave, N chunks of a piece, S places of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.gated_delta import L2_EPS, GatedDeltaBackend, GatedDeltaShape, StateSave, check_saves
from npu_runner.platforms.gated_delta_plan import (
    ConvolutionPlan,
    DraftSources,
    Piece,
    PrefillPlan,
    plan_chunks,
    plan_convolution,
    plan_draft_steps,
)
from npu_runner.platforms.step_inputs import AttentionMetadata


class TorchGatedDelta(GatedDeltaBackend):
    name = "torch"

    def __init__(self, shape: GatedDeltaShape):
        self.shape = shape

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], saves: Sequence[StateSave],
                     device: torch.device) -> PrefillPlan:
        check_saves(query_lens_B, context_lens_B, saves)
        return PrefillPlan(
            convolution=plan_convolution(query_lens_B, context_lens_B, saves, self.shape.conv_kernel_size, device),
            groups=plan_chunks(query_lens_B, context_lens_B, saves, device))

    def plan_drafts(self, runs_T: Tensor, query_lens_B: Sequence[int] | None) -> DraftSources:
        if query_lens_B is None:
            raise ConfigError(f"Gated DeltaNet through {self.name} verifies no drafts in graphs; set graph_mode eager")
        return plan_draft_steps(query_lens_B, self.shape.conv_kernel_size, runs_T.device)

    # -- the convolution -------------------------------------------------------------------------------------------

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        slots_B = _slots(metadata)
        if not metadata.is_prefill:
            window_TWC = self._windows(x_TC, conv_state, slots_B, metadata.state_plan)
            self.write(conv_state, slots_B, window_TWC[:, 1:])
            return F.silu((window_TWC.float() * weight_CW.t().float()).sum(1)).to(x_TC.dtype)
        tails_BWC = conv_state.index_select(0, slots_B)
        plan: ConvolutionPlan = metadata.state_plan.convolution
        # Not multiplied: what a new row finds in its slot may be no number.
        tails_BWC = torch.where(plan.is_old_B[:, None, None], tails_BWC, 0.0)
        ext_LC = torch.cat([x_TC, tails_BWC.flatten(0, 1)]).index_select(0, plan.sources_L)
        new_XWC = ext_LC.index_select(0, plan.tails_XW.flatten()).unflatten(0, plan.tails_XW.shape)
        self.write(conv_state, slots_B, new_XWC[: len(slots_B)])
        if plan.saved_slots is not None:
            self.write(conv_state, plan.saved_slots, new_XWC[len(slots_B):])
        return _convolve(ext_LC, weight_CW).index_select(0, plan.places_T).to(x_TC.dtype)

    def _windows(self, x_TC: Tensor, conv_state: Tensor, slots_T: Tensor, plan: DraftSources | None) -> Tensor:
        """(T, W, C): the inputs that each token of a decode step sees, itself at last."""
        if plan is None:
            return torch.cat([conv_state.index_select(0, slots_T), x_TC[:, None]], dim=1)
        tails_NWC = conv_state.index_select(0, slots_T.index_select(0, plan.firsts_N))
        ext_LC = torch.cat([x_TC, tails_NWC.flatten(0, 1)])
        return ext_LC.index_select(0, plan.sources_TW.flatten()).unflatten(0, plan.sources_TW.shape)

    # -- the delta rule --------------------------------------------------------------------------------------------

    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        slots_B = _slots(metadata)
        beta_TV = b_TV.sigmoid().float()
        g_TV = neg_exp_A_V * F.softplus(a_TV.float() + dt_bias_V)
        if not metadata.is_prefill:
            if metadata.state_plan is not None:
                return self._decode_drafts(qkv_TC, beta_TV, g_TV, state, slots_B, metadata.state_plan)
            return self._decode(qkv_TC, beta_TV, g_TV, state, slots_B)
        out_TVD = qkv_TC.new_empty(len(qkv_TC), self.shape.num_v_heads, self.shape.head_v_dim)
        for group in metadata.state_plan.groups:
            slots_R = slots_B.index_select(0, group.rows_R)
            states_R = state.index_select(0, slots_R)
            states_R = torch.where(group.is_old_R[:, None, None, None], states_R, 0.0)
            for piece in group.pieces:
                self._run_piece(piece, qkv_TC, beta_TV, g_TV, state, states_R, out_TVD)
            self.write(state, slots_R, states_R)
        return out_TVD

    def _decode(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, state: Tensor, slots_B: Tensor) -> Tensor:
        out_BVD, states = self._step(qkv_BC, beta_BV, g_BV, state.index_select(0, slots_B))
        self.write(state, slots_B, states)
        return out_BVD

    def _decode_drafts(self, qkv_TC: Tensor, beta_TV: Tensor, g_TV: Tensor, state: Tensor, slots_T: Tensor,
                       plan: DraftSources) -> Tensor:
        """Token by token, in place: each begins with a copy of what the one before it has left."""
        slots, firsts, outs = slots_T.tolist(), set(plan.firsts_N.tolist()), []
        for token, (qkv, beta, g) in enumerate(zip(qkv_TC.split(1), beta_TV.split(1), g_TV.split(1), strict=True)):
            if token not in firsts:
                state[slots[token]].copy_(state[slots[token - 1]])
            outs.append(self._step(qkv, beta, g, state[slots[token] : slots[token] + 1])[0])
        return torch.cat(outs)

    def _step(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One token a row, as the recurrence is defined: the output, and `states` (B, Nv, V, K), contiguous, behind it.
        They are updated in place."""
        q_BKD, k_BKD, v_BVD = self._heads(qkv_BC)
        group = self.shape.num_v_heads // self.shape.num_k_heads
        # Each head of each row is a matmul of its own.
        q, k = (x.repeat_interleave(group, dim=1).flatten(0, 1)[..., None] for x in (q_BKD, k_BKD))
        s = states.view(-1, *states.shape[2:]).mul_(g_BV.exp().view(-1, 1, 1))
        d = torch.baddbmm(v_BVD.flatten(0, 1)[..., None], s, k, alpha=-1) * beta_BV.view(-1, 1, 1)
        s.baddbmm_(d, k.mT)
        return torch.bmm(s, q).view(v_BVD.shape).to(qkv_BC.dtype), states

    def _run_piece(self, piece: Piece, qkv_TC: Tensor, beta_TV: Tensor, g_TV: Tensor, state: Tensor,
                   states_R: Tensor, out_TVD: Tensor) -> None:
        """Compute a few waves: writes their tokens of `out_TVD`, `states_R` as it is then, and saves into `state`."""
        tokens, shape = piece.tokens_NS.flatten(), piece.tokens_NS.shape
        beta, g = (x.index_select(0, tokens).unflatten(0, shape).transpose(1, 2) for x in (beta_TV, g_TV))
        if piece.mask_NS is not None:
            beta, g = (torch.where(piece.mask_NS[:, None], x, 0.0) for x in (beta, g))
        q, k, v = (x.unflatten(0, shape).transpose(1, 2).contiguous()
                   for x in self._heads(qkv_TC.index_select(0, tokens)))
        parts = chunk_parts(q, k, v, beta.contiguous(), g.contiguous())
        out = torch.empty_like(v)
        first = 0
        for wave in piece.waves:
            chunks = slice(first, first + wave.num_rows)
            out[chunks] = parts.select(chunks).run(states_R[: wave.num_rows])
            first = chunks.stop
            if wave.saved_rows is not None and wave.saved_slots is not None:
                self.write(state, wave.saved_slots, states_R.index_select(0, wave.saved_rows))
        flat = out.transpose(1, 2).flatten(0, 1)
        self.write(out_TVD, piece.out_tokens,
                   (flat if piece.real is None else flat.index_select(0, piece.real)).to(out_TVD.dtype))

    def _heads(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (T, Nk, K) and k normalised, q scaled, and v (T, Nv, V), in float32."""
        shape = self.shape
        q, k, v = qkv_TC.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        q, k = (x.unflatten(-1, (shape.num_k_heads, shape.head_k_dim)) for x in (q, k))
        q_norm, k_norm = (torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS) for x in (q, k))
        return q * (q_norm * shape.head_k_dim**-0.5), k * k_norm, v.unflatten(-1, (shape.num_v_heads, shape.head_v_dim))


def _slots(metadata: AttentionMetadata) -> Tensor:
    assert metadata.state_slots_B is not None, "a model with states has slots"
    return metadata.state_slots_B.long()


def _convolve(x_LC: Tensor, weight_CW: Tensor) -> Tensor:
    """silu of the sum of the taps, float32 (L - W + 1, C)."""
    weight_CW = weight_CW.float()
    kernel_size = weight_CW.shape[1]
    length = len(x_LC) - kernel_size + 1
    out = x_LC[:length].float() * weight_CW[:, 0]
    for tap in range(1, kernel_size):
        out.addcmul_(x_LC[tap: tap + length].float(), weight_CW[:, tap])
    return F.silu(out, inplace=True)


# Inverses of blocks of 8 are exact to a few parts in 10^7 when keys are alike; of 32, to 10^-4; of 64, wrong.
_BLOCK = 8


@dataclass(frozen=True)
class ChunkParts:
    """The terms of a chunk beside the state that enters it.

    q, k (N, Nk, S, K). values (N, Nv, S, V): the update of each position to an empty state; reads (N, Nv, S, K): the
    part that an entering state subtracts from it. weights (N, Nv, S, S): each position's read of earlier ones.
    from_start (N, Nv, S): the decay of the entering state up to each position; to_end: of each position, to the end.
    """

    q: Tensor
    k: Tensor
    values: Tensor
    reads: Tensor
    weights: Tensor
    from_start: Tensor
    to_end: Tensor

    def select(self, chunks: slice) -> ChunkParts:
        return ChunkParts(self.q[chunks], self.k[chunks], self.values[chunks], self.reads[chunks],
                          self.weights[chunks], self.from_start[chunks], self.to_end[chunks])

    def run(self, states: Tensor) -> Tensor:
        """The outputs (N, Nv, S, V) of chunks that `states` (N, Nv, V, K) enter; these are what leaves them, then."""
        num_k_heads = self.q.shape[1]
        by_k_head = states.unflatten(1, (num_k_heads, -1)).flatten(2, 3)  # (N, Nk, G V, K)
        written = _add_matmul(self.values, self.reads, states.mT, alpha=-1)
        old = (self.q @ by_k_head.mT).unflatten(-1, (-1, states.shape[2])).transpose(2, 3).flatten(1, 2)
        out = _add_matmul(self.from_start[..., None] * old, self.weights, written)
        kept = (written * self.to_end[..., None]).mT  # (N, Nv, V, S)
        kept = kept.unflatten(1, (num_k_heads, -1)).flatten(2, 3) @ self.k
        states.mul_(self.from_start[..., -1, None, None]).add_(kept.view(states.shape))
        return out


def chunk_parts(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor) -> ChunkParts:
    """q, k (N, Nk, S, K) normalised and scaled, v (N, Nv, S, V), beta and g (N, Nv, S); float32, zeros in padding."""
    num_k_heads, size = q.shape[1], q.shape[2]
    decay = _decay(g)
    from_start = g.cumsum(-1).exp()
    by_k_head = decay.unflatten(1, (num_k_heads, -1))
    weights = ((q @ k.mT)[:, :, None] * by_k_head).flatten(1, 2)
    system = ((k @ k.mT)[:, :, None] * by_k_head).flatten(1, 2).mul_(beta[..., None]).tril_(-1)
    inverse = invert_unit_lower(system)
    values = (inverse * beta[..., None, :]) @ v
    scaled = (inverse * (beta * from_start)[..., None, :]).unflatten(1, (num_k_heads, -1)).flatten(2, 3)
    reads = (scaled @ k).unflatten(2, (-1, size)).flatten(1, 2)
    return ChunkParts(q, k, values, reads, weights, from_start, decay[..., -1, :])


def _add_matmul(x: Tensor, a: Tensor, b: Tensor, alpha: int = 1) -> Tensor:
    """x + alpha * (a @ b), in one pass."""
    return torch.baddbmm(x.flatten(0, 1), a.flatten(0, 1), b.flatten(0, 1), alpha=alpha).view(x.shape)


def _decay(g: Tensor) -> Tensor:
    """exp(g_j+1 + ... + g_i) for j <= i, else 0: (N, Nv, S, S).

    Each j has sums of its own. Differences of sums from the start would have the error of the largest, which matters
    after a gate close to 0. Masked before it is exponentiated.
    """
    size = g.shape[-1]
    lower = torch.ones(size, size, dtype=torch.bool, device=g.device).tril()
    sums = torch.where(lower.tril(-1), g[..., None], 0.0).cumsum(-2)
    return torch.where(lower, sums, -torch.inf).exp_()


def invert_unit_lower(system: Tensor) -> Tensor:
    """(I + system)^-1 of strictly lower triangular (..., S, S), S a power of two times 8.

    Blocks of 8 by their powers, which end: (I - L)(I + L^2)(I + L^4); then two neighbours at a time.
    """
    low = _diagonal_blocks(system, _BLOCK)
    eye = torch.eye(_BLOCK, dtype=system.dtype, device=system.device)
    low_2 = low @ low
    inverse = (eye - low) @ (eye + low_2) @ (eye + low_2 @ low_2)
    size = _BLOCK
    while size < system.shape[-1]:
        below = _diagonal_blocks(system, 2 * size)[..., size:, :size]
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        merged = torch.zeros_like(below).repeat(*(1,) * (below.dim() - 2), 2, 2)
        merged[..., :size, :size] = first
        merged[..., size:, size:] = second
        merged[..., size:, :size] = -(second @ (below @ first))
        inverse, size = merged, 2 * size
    return inverse[..., 0, :, :]


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """(..., S / size, size, size) of (..., S, S)."""
    count = x.shape[-1] // size
    blocks = x.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    return blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3).contiguous()
