"""Gated DeltaNet on Ascend: decoding through the fused recurrent operator where it takes float32 states.

Knows no model and no pool. Prompts go through plain operators in chunks; so does decoding if the operator is missing or
takes other types. npu_chunk_gated_delta_rule requires gates between -1 and 0, and gates of real models lie outside.

Steps with drafts take the same operators eagerly and in graphs: what they need of the step is computed on the device
from StepInputs.runs, in shapes that depend on the number of tokens alone.

B sequences of the step, T its tokens, Nk and Nv key and value heads, K and V their dims, C channels, W convolution
kernel, S tokens up to one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_runner.platforms.gated_delta import L2_EPS, GatedDeltaShape
from npu_runner.platforms.gated_delta_plan import DraftSources
from npu_runner.platforms.npu.attention import DeviceLengths
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096  # as many as attention takes in one step
_MOST_RUN = 8  # tokens of a sequence in a step: the fused operator takes no more


@dataclass(kw_only=True)
class RunPlan(DraftSources):
    """The plan of a decode step with drafts, int32. places_T: each token's index within its sequence; lengths_T: their
    number at the first one, 0 at others. T "sequences", of which those without a token are passed over."""

    places_T: Tensor
    lengths_T: Tensor


class NpuGatedDelta(TorchGatedDelta):
    def __init__(self, shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device):
        super().__init__(shape)
        self._one_token_each = torch.ones(_MOST_ROWS, dtype=torch.int32, device=device)
        self._numbers = torch.arange(_MOST_ROWS, dtype=torch.int32, device=device)
        self._up_to_W = torch.arange(1 - shape.conv_kernel_size, 1, dtype=torch.int32, device=device)
        self._up_to_S = torch.arange(1 - _MOST_RUN, 1, dtype=torch.int32, device=device)
        self._eye_SS = torch.eye(_MOST_RUN, device=device)
        self._lower_SS = torch.ones(_MOST_RUN, _MOST_RUN).tril().to(device)
        # [l, (j, i)]: whether j < l <= i. A matmul with it sums the gates between two places, each pair for itself.
        j, i, between = (torch.arange(_MOST_RUN).view(view) for view in ((-1, 1), (1, -1), (-1, 1, 1)))
        self._between_SP = ((between > j) & (between <= i)).float().flatten(1).to(device)
        # x rsqrt(sum x^2 + eps) is the root-mean-square norm with this weight, and eps / K.
        self._l2_weight = torch.full((shape.head_k_dim,), shape.head_k_dim**-0.5, device=device)
        self._scaled_l2_weight = self._l2_weight * shape.head_k_dim**-0.5
        self.refusal = self._try_fused([1], dtype, device)
        """Why decode steps do not go through the fused operator, or None."""
        self.refusal_of_drafts = self.refusal or self._try_fused([2, 0, 1], dtype, device)
        """The same of steps with drafts."""
        self.name = "fused" if self.refusal is None else "torch"
        logger.info("Gated DeltaNet decodes through %s", self.form)

    @property
    def form(self) -> str:
        return "npu_recurrent_gated_delta_rule" if self.refusal is None else f"plain operators ({self.refusal})"

    # -- steps with drafts -----------------------------------------------------------------------------------------

    def plan_drafts(self, runs_T: Tensor, query_lens_B: Sequence[int] | None) -> RunPlan:
        num_tokens, before = len(runs_T), self.shape.conv_kernel_size - 1
        places_T, numbers_T = (-runs_T).clamp(min=0), self._numbers_to(num_tokens)
        places_TW = places_T[:, None] + self._up_to_W
        # The W - 1 inputs before each sequence's first token lie behind all tokens.
        before_TW = (numbers_T * before + (num_tokens + before))[:, None] + places_TW
        return RunPlan(
            firsts_N=numbers_T - places_T, places_T=places_T, lengths_T=runs_T.clamp(min=0),
            sources_TW=torch.where(places_TW < 0, before_TW, numbers_T[:, None] + self._up_to_W))

    def _numbers_to(self, num: int) -> Tensor:
        if num <= _MOST_ROWS:
            return self._numbers[:num]
        return torch.arange(num, dtype=torch.int32, device=self._numbers.device)  # eager steps alone are so large

    def _decode_runs(self, qkv_TC: Tensor, beta_TV: Tensor, g_TV: Tensor, state: Tensor, slots_T: Tensor,
                     plan: RunPlan) -> Tensor:
        """Each token with those before it in its sequence, a chunk of S places that ends with it (arXiv 2412.06464,
        section 3.3): the state before the sequence's first is read, and the one behind the token is written."""
        shape, num = self.shape, len(qkv_TC)
        q_TC, k_TC, v_TC = qkv_TC.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        numbers_TS = (self._numbers_to(num)[:, None] + self._up_to_S).clamp(min=0).flatten()
        is_real_TS1 = (plan.places_T[:, None] + self._up_to_S >= 0).float()[..., None]

        def chunks(x_TX: Tensor, heads: int) -> Tensor:
            """(T, heads, S, dim)"""
            return x_TX.index_select(0, numbers_TS).view(num, _MOST_RUN, heads, -1).transpose(1, 2)

        k = self._normalised(k_TC, self._l2_weight).flatten(1)
        k = chunks(k, shape.num_k_heads).flatten(0, 1).contiguous()  # (T Nk, S, K)
        v = chunks(v_TC, shape.num_v_heads)
        beta, g = (x_TV.float().index_select(0, numbers_TS).view(num, _MOST_RUN, -1) * is_real_TS1
                   for x_TV in (beta_TV, g_TV))
        beta, g = beta.transpose(1, 2), g.transpose(1, 2)  # (T, Nv, S); what is no token leaves the state as it is
        decay = (g @ self._between_SP).exp().view(num, -1, _MOST_RUN, _MOST_RUN).mT * self._lower_SS
        alike = torch.bmm(k, k.mT).view(num, shape.num_k_heads, 1, _MOST_RUN, _MOST_RUN)
        low = (alike * decay.unflatten(1, (shape.num_k_heads, -1))).flatten(1, 2) * beta[..., None]
        low = low * (self._lower_SS - self._eye_SS)
        low_2 = low @ low
        # The inverse of I + low; low to the power of 8 is 0.
        inverse = (self._eye_SS - low) @ (self._eye_SS + low_2) @ (self._eye_SS + low_2 @ low_2)
        from_start = (g @ self._lower_SS.mT).exp()[..., None]  # (T, Nv, S, 1)
        states = state.index_select(0, slots_T.index_select(0, plan.firsts_N))
        rows = states.view(num * shape.num_k_heads, -1, shape.head_k_dim)  # (T Nk, G V, K)
        seen = torch.bmm(rows, k.mT).view(num, shape.num_v_heads, -1, _MOST_RUN).mT  # (T, Nv, S, V)
        written = inverse @ ((v - seen * from_start) * beta[..., None])
        added = (written * decay[..., -1, :, None]).mT.reshape(num * shape.num_k_heads, -1, _MOST_RUN)
        states = states * from_start[..., -1:, :] + torch.bmm(added, k).view(states.shape)
        self.write(state, slots_T, states)
        q = self._normalised(q_TC, self._scaled_l2_weight).flatten(0, 1)[..., None]
        out = torch.bmm(states.view(num * shape.num_k_heads, -1, shape.head_k_dim), q)
        return out.view(num, shape.num_v_heads, -1).to(qkv_TC.dtype)

    # -- decoding --------------------------------------------------------------------------------------------------

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().convolve(x_TC, weight_CW, conv_state, metadata)
        slots_T = metadata.state_slots_B
        assert slots_T is not None, "a model with states has slots"
        window_TWC = self._windows(x_TC, conv_state, slots_T, metadata.state_plan)
        self.write(conv_state, slots_T, window_TWC[:, 1:])
        # Matmuls in x's dtype: their rounding is as small as that of the inputs was. The sum is a float32 one inside.
        return F.silu((window_TWC * weight_CW.t()).sum(1))

    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().delta_rule(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, metadata)
        shape, slots_T = self.shape, metadata.state_slots_B
        assert slots_T is not None, "a model with states has slots"
        plan: RunPlan | None = metadata.state_plan
        beta_TV, g_TV = b_TV.sigmoid(), neg_exp_A_V * F.softplus(a_TV + dt_bias_V)
        refusal = self.refusal if plan is None else self.refusal_of_drafts
        # The graph engine declares the operator for states in bfloat16 alone.
        if refusal is not None or isinstance(metadata.plan, DeviceLengths):
            return (self._decode(qkv_TC, beta_TV, g_TV, state, slots_T) if plan is None else
                    self._decode_runs(qkv_TC, beta_TV, g_TV, state, slots_T, plan))
        qk_TC, v_TC = qkv_TC.split([2 * shape.key_size, shape.value_size], dim=-1)
        q_TKD, k_TKD = self._normalised(qk_TC, self._l2_weight).chunk(2, dim=1)
        # It reads the slot of a sequence's first token, and leaves the state of each token in that one's slot.
        return torch_npu.npu_recurrent_gated_delta_rule(
            q_TKD, k_TKD, v_TC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim)), state, beta=beta_TV,
            scale=shape.head_k_dim**-0.5,
            actual_seq_lengths=self._one_token_each[: len(qkv_TC)] if plan is None else plan.lengths_T,
            ssm_state_indices=slots_T, g=g_TV)

    def _step(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One token a row in plain operators, of which the graph engine knows all."""
        shape = self.shape
        q_BC, k_BC, v_BC = qkv_BC.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        # A norm each, so that both lie as the matmuls want them; queries also times K^-1/2.
        q_BKD = self._normalised(q_BC, self._scaled_l2_weight)
        k_BKD = self._normalised(k_BC, self._l2_weight)
        v_BVD = v_BC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim))
        states = states * g_BV.exp()[..., None, None]
        # The value heads of a key head lie side by side, as rows of one matmul.
        rows = states.unflatten(1, (shape.num_k_heads, -1)).flatten(2, 3).flatten(0, 1)
        keys = k_BKD.flatten(0, 1).unsqueeze(1)
        seen_BVD = torch.bmm(rows, keys.mT).view(v_BVD.shape)
        errors = ((v_BVD - seen_BVD) * beta_BV.unsqueeze(-1)).view(rows.shape[0], -1, 1)
        rows = torch.addcmul(rows, errors, keys)
        out_BVD = torch.bmm(rows, q_BKD.flatten(0, 1).unsqueeze(-1)).view(v_BVD.shape).to(qkv_BC.dtype)
        return out_BVD, rows.view(states.shape)

    def _normalised(self, x_BC: Tensor, weight_D: Tensor) -> Tensor:
        """Heads (B, heads, K) of x, of length 1 where the weight is K^-1/2; of x's dtype."""
        head_dim = self.shape.head_k_dim
        return torch_npu.npu_rms_norm(x_BC.unflatten(-1, (-1, head_dim)), weight_D, L2_EPS / head_dim)[0]

    def write(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        # index_copy_ sorts its indices in bfloat16, and compilers copy the pool for it.
        torch_npu.npu_scatter_nd_update_(pool, slots[:, None], values)

    # -- what the operator takes -----------------------------------------------------------------------------------

    def _try_fused(self, lengths: list[int], dtype: torch.dtype, device: torch.device) -> str | None:
        """Compute sequences of these lengths from empty states, each token with another key. Each must leave the sum of
        v k^T up to its token in its slot. Earlier contents of a slot are read for the first tokens only."""
        if dtype != torch.bfloat16:
            return f"the fused operator takes bfloat16, not {str(dtype).removeprefix('torch.')}"
        shape, num_tokens = self.shape, sum(lengths)
        keys_TK = torch.eye(num_tokens, shape.head_k_dim)
        k_TKD = keys_TK[:, None].repeat(1, shape.num_k_heads, 1).to(dtype).to(device)
        v_TVD = torch.ones(num_tokens, shape.num_v_heads, shape.head_v_dim, dtype=dtype, device=device)
        blocks = [torch.ones(length, length).tril() for length in lengths if length]
        sums_TK = torch.block_diag(*blocks) @ keys_TK
        is_first_T = torch.cat([block.sum(1) == 1 for block in blocks])
        state = torch.where(is_first_T, 0.0, 1.0).view(-1, 1, 1, 1).repeat(1, *shape.state_shape).to(device)
        try:
            out_TVD = torch_npu.npu_recurrent_gated_delta_rule(
                k_TKD, k_TKD, v_TVD, state, beta=v_TVD[..., 0].contiguous(), scale=1.0,
                actual_seq_lengths=torch.tensor(lengths, dtype=torch.int32).to(device),
                ssm_state_indices=torch.arange(num_tokens, dtype=torch.int32).to(device),
                g=torch.zeros(num_tokens, shape.num_v_heads, device=device))
            written, read = state.cpu(), out_TVD.cpu().float()
        except RuntimeError as refusal:
            return str(refusal).strip().splitlines()[-1].strip()
        is_right = bool((written == sums_TK[:, None, None]).all() and (read == 1).all())
        return None if is_right else "the fused operator gives other numbers"
