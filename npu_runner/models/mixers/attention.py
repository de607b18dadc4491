"""Attention over the paged cache as a sequence mixer, plain or gated. Knows nothing of the layer around it.

T tokens in the step, D hidden size, N query heads, K kv heads, H head dim, R dims that turn; all of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import AttentionConfig, ModelConfig
from npu_runner.layers.attention import PagedAttention
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, qkv_parts
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.ops import HeadNorms
from npu_runner.platforms.step_inputs import AttentionMetadata


class DecoderAttention(nn.Module):
    """`cache_layer` counts the layers that have a KV cache."""

    def __init__(self, config: ModelConfig, mixer: AttentionConfig, cache_layer: int, context: LayerContext):
        super().__init__()
        self.head_dim = config.head_dim
        parts = qkv_parts(config.num_heads, config.num_kv_heads, config.head_dim, context)
        self.is_gated = mixer.is_gated
        if mixer.is_gated:  # each head's query and gate lie side by side
            query, *rest = parts
            parts = [OutputPart(query.name, 2 * query.total, 2 * query.start, 2 * query.length), *rest]
        self.sizes = [part.length for part in parts]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, bias=mixer.qkv_bias, context=context)
        self.o_proj = RowParallelLinear(
            "o_proj", config.num_heads * config.head_dim, config.hidden_size, bias=mixer.o_bias, context=context
        )
        self.q_norm = _head_norm(config, context) if mixer.qk_norm else None
        self.k_norm = _head_norm(config, context) if mixer.qk_norm else None
        self.attention = PagedAttention(cache_layer, self.sizes[1] // config.head_dim, config.head_dim, context,
                                        window=mixer.sliding_window)

    def forward(self, x_TD: Tensor, cos_TR: Tensor, sin_TR: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x_TD).split(self.sizes, dim=-1)
        k_TKH, v_TKH = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
        q_TNH, gate_TNH = q.unflatten(-1, (-1, (1 + self.is_gated) * self.head_dim)), None
        if self.is_gated:
            q_TNH, gate_TNH = q_TNH.chunk(2, dim=-1)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        out_TNH = self.attention.norm_rotary_forward(q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR, metadata)
        if gate_TNH is not None:
            out_TNH = out_TNH * torch.sigmoid(gate_TNH)
        return self.o_proj(out_TNH.flatten(-2))


def _head_norm(config: ModelConfig, context: LayerContext) -> RMSNorm:
    return RMSNorm(config.head_dim, config.rms_norm_eps, context, is_zero_centred=config.norm_is_zero_centred)
