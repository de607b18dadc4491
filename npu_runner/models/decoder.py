"""The decoder that Llama, Qwen2, Qwen3 and Qwen3-VL share; ModelConfig's flags tell them apart. Knows no pictures.

T tokens in the step, D hidden size, N query heads, K kv heads, H head dim, I MLP width; all of this rank.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.layers.attention import PagedAttention
from npu_runner.layers.embedding import OutputHead, TokenEmbedding
from npu_runner.layers.linear import ColumnParallelLinear, RowParallelLinear, qkv_parts, split_parts
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.rotary import RotaryTable
from npu_runner.model_config import ModelConfig
from npu_runner.platforms.base import AttentionMetadata


class DecoderAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.head_dim = config.head_dim
        parts = qkv_parts(config.num_heads, config.num_kv_heads, config.head_dim, context)
        self.sizes = [part.length for part in parts]
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, bias=config.qkv_bias, context=context)
        self.o_proj = RowParallelLinear(
            "o_proj", config.num_heads * config.head_dim, config.hidden_size, bias=config.o_bias, context=context
        )
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, context) if config.qk_norm else None
        self.attention = PagedAttention(layer_index, self.sizes[1] // config.head_dim, config.head_dim, context)

    def forward(self, x_TD: Tensor, cos_TH: Tensor, sin_TH: Tensor, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x_TD).split(self.sizes, dim=-1)
        q_TNH, k_TKH, v_TKH = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q_TNH, k_TKH = self.q_norm(q_TNH), self.k_norm(k_TKH)
        q_TNH, k_TKH = self.ops.rotary(q_TNH, k_TKH, cos_TH, sin_TH)
        return self.o_proj(self.attention(q_TNH, k_TKH, v_TKH, metadata).flatten(-2))


class DecoderMLP(nn.Module):
    def __init__(self, config: ModelConfig, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        parts = split_parts(("gate_proj", "up_proj"), config.intermediate_size, context)
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, parts, bias=config.mlp_bias, context=context)
        self.down_proj = RowParallelLinear(
            "down_proj", config.intermediate_size, config.hidden_size, bias=config.mlp_bias, context=context
        )

    def forward(self, x_TD: Tensor) -> Tensor:
        return self.down_proj(self.ops.silu_and_mul(self.gate_up_proj(x_TD)))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, layer_index: int, context: LayerContext):
        super().__init__()
        self.self_attn = DecoderAttention(config, layer_index, context)
        self.mlp = DecoderMLP(config, context)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, cos_TH: Tensor, sin_TH: Tensor,
                metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """(output of the MLP, residual to add to it); the next norm adds the two."""
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add_forward(x_TD, residual_TD)
        x_TD = self.self_attn(x_TD, cos_TH, sin_TH, metadata)
        x_TD, residual_TD = self.post_attention_layernorm.add_forward(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


class Decoder(nn.Module):
    """Embeddings to final norm. `num_positions` bounds the positions that will be asked for."""

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        super().__init__()
        self.embed_tokens = TokenEmbedding("embed_tokens", config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleList(DecoderLayer(config, index, context) for index in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context)
        self.rotary = RotaryTable(config, num_positions, dtype=context.dtype, device=context.device)

    def forward(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """Final hidden states (T, D) of embedded tokens `x_TD`.

        `deepstack`: (T,) int32 rows of the levels, and for each of the first layers a level (M + 1, D): after that
        layer every token adds its row. The last row is zeros, for tokens of no picture; DeepStack, arXiv 2406.04334.
        """
        cos_TH, sin_TH = self.rotary(positions)
        residual_TD = None
        rows_T, levels = deepstack if deepstack is not None else (None, [])
        for index, layer in enumerate(self.layers):
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_TH, sin_TH, metadata)
            if index < len(levels):
                # Gathered and added to all rows: scattering adds sorts its indices on some devices.
                x_TD = x_TD + F.embedding(rows_T, levels[index])
        return self.norm.add_forward(x_TD, residual_TD)[0]


class CausalLM(nn.Module):
    """A text-only checkpoint: llama, qwen2, qwen3."""

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        super().__init__()
        self.model = Decoder(config, num_positions, context)
        self.lm_head = OutputHead(
            "lm_head", config.vocab_size, config.hidden_size, context,
            tied_to=self.model.embed_tokens if config.tie_word_embeddings else None,
        )

    @property
    def decoder(self) -> Decoder:
        return self.model

    def embed(self, input_ids_T: Tensor) -> Tensor:
        return self.decoder.embed_tokens(input_ids_T)

    def forward(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """See Decoder.forward."""
        return self.decoder(x_TD, positions, metadata, deepstack)

    def compute_logits(self, hidden_BD: Tensor) -> Tensor:
        return self.lm_head(hidden_BD)
