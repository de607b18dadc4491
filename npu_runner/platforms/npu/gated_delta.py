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
        self.refusal = self._try_fused(dtype, device)
        """Why decode steps do not go through the fused operator, or None."""
        self.name = "fused" if self.refusal is None else "torch"
        logger.info("Gated DeltaNet decodes through %s", self.form)

    @property
    def form(self) -> str:
        return "npu_recurrent_gated_delta_rule" if self.refusal is None else f"plain operators ({self.refusal})"

    # -- decoding --------------------------------------------------------------------------------------------------

    def convolve(self, x_TC: Tensor, weight_CW: Tensor, conv_state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().convolve(x_TC, weight_CW, conv_state, metadata)
        slots_B = metadata.state_slots_B
        assert slots_B is not None, "a model with states has slots"
        window_BWC = torch.cat([conv_state.index_select(0, slots_B), x_TC[:, None]], dim=1)
        self._write(conv_state, slots_B, window_BWC[:, 1:])
        # Products in x's dtype: their rounding is as small as that of the inputs was. The sum is a float32 one inside.
        return F.silu((window_BWC * weight_CW.t()).sum(1))

    def delta_rule(self, qkv_TC: Tensor, a_TV: Tensor, b_TV: Tensor, neg_exp_A_V: Tensor, dt_bias_V: Tensor,
                   state: Tensor, metadata: AttentionMetadata) -> Tensor:
        if metadata.is_prefill:
            return super().delta_rule(qkv_TC, a_TV, b_TV, neg_exp_A_V, dt_bias_V, state, metadata)
        shape, slots_B = self.shape, metadata.state_slots_B
        beta_BV, g_BV = b_TV.sigmoid(), neg_exp_A_V * F.softplus(a_TV + dt_bias_V)
        # The graph engine declares the operator for states in bfloat16 alone.
        if self.refusal is not None or isinstance(metadata.plan, DeviceLengths):
            return self._recur(qkv_TC, beta_BV, g_BV, state, slots_B)
        qk_BC, v_BC = qkv_TC.split([2 * shape.key_size, shape.value_size], dim=-1)
        q_BKD, k_BKD = self._normalised(qk_BC, self._l2_weight).chunk(2, dim=1)
        return torch_npu.npu_recurrent_gated_delta_rule(
            q_BKD, k_BKD, v_BC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim)), state, beta=beta_BV,
            scale=shape.head_k_dim**-0.5, actual_seq_lengths=self._one_token_each[: len(qkv_TC)],
            ssm_state_indices=slots_B, g=g_BV,
        )

    def _recur(self, qkv_BC: Tensor, beta_BV: Tensor, g_BV: Tensor, state: Tensor, slots_B: Tensor | None) -> Tensor:
        """One token a row in plain operators, of which the graph engine knows all."""
        assert slots_B is not None, "a model with states has slots"
        shape = self.shape
        q_BC, k_BC, v_BC = qkv_BC.float().split([shape.key_size, shape.key_size, shape.value_size], dim=-1)
        # A norm each, so that both lie as the products want them; queries also times K^-1/2.
        q_BKD = self._normalised(q_BC, self._scaled_l2_weight)
        k_BKD = self._normalised(k_BC, self._l2_weight)
        v_BVD = v_BC.unflatten(-1, (shape.num_v_heads, shape.head_v_dim))
        states = state.index_select(0, slots_B) * g_BV.exp()[..., None, None]
        # The value heads of a key head lie side by side, as rows of one product.
        rows = states.unflatten(1, (shape.num_k_heads, -1)).flatten(2, 3).flatten(0, 1)
        keys = k_BKD.flatten(0, 1).unsqueeze(1)
        seen_BVD = torch.bmm(rows, keys.mT).view(v_BVD.shape)
        errors = ((v_BVD - seen_BVD) * beta_BV.unsqueeze(-1)).view(rows.shape[0], -1, 1)
        rows = torch.addcmul(rows, errors, keys)
        self._write(state, slots_B, rows.view(states.shape))
        return torch.bmm(rows, q_BKD.flatten(0, 1).unsqueeze(-1)).view(v_BVD.shape).to(qkv_BC.dtype)

    def _normalised(self, x_BC: Tensor, weight_D: Tensor) -> Tensor:
        """Heads (B, heads, K) of x, of length 1 where the weight is K^-1/2; of x's dtype."""
        head_dim = self.shape.head_k_dim
        return torch_npu.npu_rms_norm(x_BC.unflatten(-1, (-1, head_dim)), weight_D, L2_EPS / head_dim)[0]

    def _write(self, pool: Tensor, slots: Tensor, values: Tensor) -> None:
        # index_copy_ sorts its indices in bfloat16, and compilers copy the pool for it.
        torch_npu.npu_scatter_nd_update_(pool, slots[:, None], values)

    # -- what the operator takes -----------------------------------------------------------------------------------

    def _try_fused(self, dtype: torch.dtype, device: torch.device) -> str | None:
        """One token is tried on an empty state: it has to leave v k^T."""
        if dtype != torch.bfloat16:
            return f"the fused operator takes bfloat16, not {str(dtype).removeprefix('torch.')}"
        shape = self.shape
        k_1ND = F.one_hot(torch.zeros(1, shape.num_k_heads, dtype=torch.long), shape.head_k_dim).to(dtype).to(device)
        v_1ND = torch.ones(1, shape.num_v_heads, shape.head_v_dim, dtype=dtype, device=device)
        state = torch.zeros((1, *shape.state_shape), device=device)
        try:
            out_1ND = torch_npu.npu_recurrent_gated_delta_rule(
                k_1ND, k_1ND, v_1ND, state, beta=v_1ND[..., 0].contiguous(), scale=1.0,
                actual_seq_lengths=self._one_token_each[:1],
                ssm_state_indices=self._one_token_each[:1] - 1, g=torch.zeros(1, shape.num_v_heads, device=device),
            )
            written, read = state.cpu(), out_1ND.cpu().float()
        except RuntimeError as refusal:
            return str(refusal).strip().splitlines()[-1].strip()
        is_right = bool((written[..., 0] == 1).all() and (written[..., 1:] == 0).all() and (read == 1).all())
        return None if is_right else "the fused operator gives other numbers"
