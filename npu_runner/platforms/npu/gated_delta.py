"""Gated DeltaNet on Ascend: decoding through the fused recurrent operator where it takes float32 states.

Knows no model and no pool. Prompts go through plain operators in chunks; so does decoding if the operator is missing or
takes other types. npu_chunk_gated_delta_rule requires gates between -1 and 0, and gates of real models lie outside.

B sequences of the step, Nk and Nv key and value heads, K and V their dims, C channels, W convolution kernel.
"""

from __future__ import annotations

import logging

import torch
import torch.nn.functional as F
import torch_npu
from torch import Tensor

from npu_runner.platforms.gated_delta import L2_EPS, GatedDeltaShape
from npu_runner.platforms.gated_delta_plan import DraftPlan
from npu_runner.platforms.npu.attention import DeviceLengths
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.torch_gated_delta import TorchGatedDelta

logger = logging.getLogger(__name__)

_MOST_ROWS = 4096  # as many as attention takes in one step


class NpuGatedDelta(TorchGatedDelta):
    def __init__(self, shape: GatedDeltaShape, dtype: torch.dtype, device: torch.device):
        super().__init__(shape)
        self._one_token_each = torch.ones(_MOST_ROWS, dtype=torch.int32, device=device)
        # x rsqrt(sum x^2 + eps) is the root-mean-square norm with this weight, and eps / K.
        self._l2_weight = torch.full((shape.head_k_dim,), shape.head_k_dim**-0.5, device=device)
        self._scaled_l2_weight = self._l2_weight * shape.head_k_dim**-0.5
        self.refusal = self._try_fused([1], dtype, device)
        """Why decode steps do not go through the fused operator, or None."""
        self.refusal_of_drafts = self.refusal or self._try_fused([2, 1], dtype, device)
        """The same of steps with drafts."""
        self.name = "fused" if self.refusal is None else "torch"
        logger.info("Gated DeltaNet decodes through %s", self.form)

    @property
    def form(self) -> str:
        return "npu_recurrent_gated_delta_rule" if self.refusal is None else f"plain operators ({self.refusal})"

    # -- decoding --------------------------------------------------------------------------------------------------

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().convolve(x_TC, weight_CW, conv_state, metadata)
        slots_T = metadata.state_slots_B
        assert slots_T is not None, "a model with states has slots"
        window_TWC = self._windows(x_TC, conv_state, slots_T, metadata.state_plan)
        self.write(conv_state, slots_T, window_TWC[:, 1:])
        # Products in x's dtype: their rounding is as small as that of the inputs was. The sum is a float32 one inside.
        return F.silu((window_TWC * weight_CW.t()).sum(1))

    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().delta_rule(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, metadata)
        shape, slots_T = self.shape, metadata.state_slots_B
        assert slots_T is not None, "a model with states has slots"
        plan: DraftPlan | None = metadata.state_plan
        beta_TV, g_TV = b_TV.sigmoid(), neg_exp_A_V * F.softplus(a_TV + dt_bias_V)
        if plan is not None and self.refusal_of_drafts is not None:
            return self._decode_drafts(qkv_TC, beta_TV, g_TV, state, slots_T, plan)
        # The graph engine declares the operator for states in bfloat16 alone.
        if plan is None and (self.refusal is not None or isinstance(metadata.plan, DeviceLengths)):
            return self._decode(qkv_TC, beta_TV, g_TV, state, slots_T)
        qk_TC, v_TC = qkv_TC.split([2 * shape.key_size, shape.value_size], dim=-1)
        q_TKD, k_TKD = self._normalised(qk_TC, self._l2_weight).chunk(2, dim=1)
        # It reads the slot of a sequence's first token, and leaves the state of each token in that one's slot.
        return torch_npu.npu_recurrent_gated_delta_rule(
            q_TKD, k_TKD, v_TC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim)), state, beta=beta_TV,
            scale=shape.head_k_dim**-0.5,
            actual_seq_lengths=self._one_token_each[: len(qkv_TC)] if plan is None else plan.lengths_B,
            ssm_state_indices=slots_T, g=g_TV,
        )

    def _step(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """One token a row in plain operators, of which the graph engine knows all."""
        shape = self.shape
        q_BC, k_BC, v_BC = qkv_BC.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        # A norm each, so that both lie as the products want them; queries also times K^-1/2.
        q_BKD = self._normalised(q_BC, self._scaled_l2_weight)
        k_BKD = self._normalised(k_BC, self._l2_weight)
        v_BVD = v_BC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim))
        states = states * g_BV.exp()[..., None, None]
        # The value heads of a key head lie side by side, as rows of one product.
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
        """Sequences of so many tokens are tried, each token with another key, from empty states: each has to leave the
        sum of v k^T up to itself in its slot. What lay there is read of the first ones only."""
        if dtype != torch.bfloat16:
            return f"the fused operator takes bfloat16, not {str(dtype).removeprefix('torch.')}"
        shape, num_tokens = self.shape, sum(lengths)
        keys_TK = torch.eye(num_tokens, shape.head_k_dim)
        k_TKD = keys_TK[:, None].repeat(1, shape.num_k_heads, 1).to(dtype).to(device)
        v_TVD = torch.ones(num_tokens, shape.num_v_heads, shape.head_v_dim, dtype=dtype, device=device)
        blocks = [torch.ones(length, length).tril() for length in lengths]
        sums_TK = torch.block_diag(*blocks) @ keys_TK
        is_first_T = torch.cat([block.sum(1) == 1 for block in blocks])
        state = torch.where(is_first_T, 0.0, 1.0).view(-1, 1, 1, 1).repeat(1, *shape.state_shape).to(device)
        try:
            out_TVD = torch_npu.npu_recurrent_gated_delta_rule(
                k_TKD, k_TKD, v_TVD, state, beta=v_TVD[..., 0].contiguous(), scale=1.0,
                actual_seq_lengths=torch.tensor(lengths, dtype=torch.int32).to(device),
                ssm_state_indices=torch.arange(num_tokens, dtype=torch.int32).to(device),
                g=torch.zeros(num_tokens, shape.num_v_heads, device=device),
            )
            written, read = state.cpu(), out_TVD.cpu().float()
        except RuntimeError as refusal:
            return str(refusal).strip().splitlines()[-1].strip()
        is_right = bool((written == sums_TK[:, None, None]).all() and (read == 1).all())
        return None if is_right else "the fused operator gives other numbers"
