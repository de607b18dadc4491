"""Attention over the paged cache as a sequence mixer: plain, with norms of heads, gated. Knows nothing of the layer
around it. A family whose attention differs in something else derives its own from one of these.

T tokens in the step, D hidden size, N query heads, K kv heads, H head dim, R dims that turn; all of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import AttentionConfig, ModelConfig
from npu_runner.layers.attention import PagedAttention
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear, qkv_parts
from npu_runner.layers.norm import RMSNorm, ZeroCentredRMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.ops import HeadNorms
from npu_runner.platforms.quantised import RoundedRows
from npu_runner.platforms.step_inputs import AttentionMetadata


class DecoderAttention(nn.Module):
    """Plain attention, its parts as methods. `cache_layer` counts the layers that have a KV cache."""

    def __init__(self, config: ModelConfig, mixer: AttentionConfig, cache_layer: int, context: LayerContext, *,
                 qkv_bias: bool = False, o_bias: bool = False):
        super().__init__()
        self.head_dim = config.head_dim
        parts = self.parts(config, context)
        self.sizes = [part.length for part in parts]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, bias=qkv_bias, context=context)
        self.o_proj = RowParallelLinear("o_proj", config.num_heads * config.head_dim, config.hidden_size, bias=o_bias,
                                        context=context)
        self.attention = PagedAttention(cache_layer, self.sizes[1] // config.head_dim, config.head_dim, context,
                                        window=mixer.sliding_window)

    @staticmethod
    def parts(config: ModelConfig, context: LayerContext) -> list[OutputPart]:
        """This rank's parts of queries, keys and values."""
        return qkv_parts(config.num_heads, config.num_kv_heads, config.head_dim, context)

    def forward(self, x_TD: Tensor | RoundedRows, cos_TR: Tensor, sin_TR: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.project(x_TD)
        q_TNH = q.unflatten(-1, (-1, self.head_dim))
        return self.o_proj(self.attend(q_TNH, k, v, cos_TR, sin_TR, metadata).flatten(-2))

    def project(self, x_TD: Tensor | RoundedRows) -> Sequence[Tensor]:
        """Queries, keys and values, the heads of each side by side."""
        return self.qkv_proj(x_TD).split(self.sizes, dim=-1)

    def attend(self, q_TNH: Tensor, k: Tensor, v: Tensor, cos_TR: Tensor, sin_TR: Tensor,
               metadata: AttentionMetadata) -> Tensor:
        """(T, N, H), behind the rotary embedding; with `metadata.ends` (B, N, H)."""
        k_TKH, v_TKH = (x.unflatten(-1, (-1, self.head_dim)) for x in (k, v))
        return self.attention.norm_rotary_forward(q_TNH, k_TKH, v_TKH, self.head_norms(), cos_TR, sin_TR, metadata)

    def head_norms(self) -> HeadNorms | None:
        """Norms of each head of queries and keys, which the platform may fuse with what follows."""
        return None


class HeadNormAttention(DecoderAttention):
    """With an RMS norm of each query head and of each key head, as in Qwen3."""

    norm_class: ClassVar[type[RMSNorm]] = RMSNorm

    def __init__(self, config: ModelConfig, mixer: AttentionConfig, cache_layer: int, context: LayerContext,
                 **biases: bool):
        super().__init__(config, mixer, cache_layer, context, **biases)
        self.q_norm, self.k_norm = (
            self.norm_class(config.head_dim, config.rms_norm_eps, context) for _ in range(2))

    def head_norms(self) -> HeadNorms:
        return HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)


class PairRotationAttention(DecoderAttention):
    """Rotary embedding turns the pairs of dims (0, 1), (2, 3), ... of a head, as in GLM-4. Here each head's dims lie so
    that they are the pairs of halves, as in all other families: scores are sums over dims, in whatever order. Values
    stay as they are."""

    def __init__(self, config: ModelConfig, mixer: AttentionConfig, cache_layer: int, context: LayerContext,
                 **biases: bool):
        super().__init__(config, mixer, cache_layer, context, **biases)
        self.rotary_dim = config.rope.rotary_dim or config.head_dim
        self.qkv_proj.splits = False  # its rows are moved below

    def weights_are_loaded(self) -> None:
        """Moves the rows of queries and keys, once."""
        query, key, _ = self.sizes
        for rows in self.qkv_proj.rows:
            turning = rows[: query + key].unflatten(0, (-1, self.head_dim))[:, : self.rotary_dim]
            turning.copy_(torch.cat((turning[:, ::2], turning[:, 1::2]), dim=1))


class GatedAttention(HeadNormAttention):
    """q_proj yields each head's query and gate side by side; the output is multiplied with the gate's sigmoid before
    o_proj, as in Qwen3-Next."""

    norm_class = ZeroCentredRMSNorm

    @staticmethod
    def parts(config: ModelConfig, context: LayerContext) -> list[OutputPart]:
        query, *rest = DecoderAttention.parts(config, context)
        return [OutputPart(query.name, 2 * query.total, 2 * query.start, 2 * query.length), *rest]

    def forward(self, x_TD: Tensor | RoundedRows, cos_TR: Tensor, sin_TR: Tensor,
                metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.project(x_TD)
        q_TNH, gate_TNH = q.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        out_TNH = self.attend(q_TNH, k, v, cos_TR, sin_TR, metadata)
        return self.o_proj(self.attention.ops.times_sigmoid(out_TNH, metadata.of_ends(gate_TNH)).flatten(-2))
