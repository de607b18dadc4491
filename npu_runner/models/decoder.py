"""The decoder that all families share, put together by layer from mixers as ModelConfig.layers says. Knows no pictures.

T tokens in the step, D hidden size, R dims of a head that turn.
"""

from __future__ import annotations

from collections import Counter

import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import AttentionConfig, LayerConfig, ModelConfig, MoEConfig
from npu_runner.layers.embedding import OutputHead, TokenEmbedding
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.rotary import RotaryTable
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.mixers.experts import SparseMoE
from npu_runner.models.mixers.gated_delta_net import GatedDeltaNet
from npu_runner.models.mixers.mlp import DecoderMLP
from npu_runner.platforms.step_inputs import AttentionMetadata


class DecoderLayer(nn.Module):
    """`cache_layer` counts the layers of this layer's kind before it: its place in the KV cache or state pool."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, cache_layer: int, context: LayerContext):
        super().__init__()
        self.self_attn = self.linear_attn = None
        if isinstance(layer.mixer, AttentionConfig):
            self.self_attn = DecoderAttention(config, layer.mixer, cache_layer, context)
        else:
            self.linear_attn = GatedDeltaNet("linear_attn", config, layer.mixer, cache_layer, context)
        self.mlp = _channel_mixer(config, layer, context)
        self.input_layernorm = decoder_norm(config, context)
        self.post_attention_layernorm = decoder_norm(config, context)

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, cos_TR: Tensor, sin_TR: Tensor,
                metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        """(output of the channel mixer, residual to add to it); the next norm adds the two."""
        if residual_TD is None:
            x_TD, residual_TD = self.input_layernorm(x_TD), x_TD
        else:
            x_TD, residual_TD = self.input_layernorm.add_forward(x_TD, residual_TD)
        if self.self_attn is not None:
            x_TD = self.self_attn(x_TD, cos_TR, sin_TR, metadata)
        elif self.linear_attn is not None:
            x_TD = self.linear_attn(x_TD, metadata)
        x_TD, residual_TD = self.post_attention_layernorm.add_forward(x_TD, residual_TD)
        return self.mlp(x_TD), residual_TD


def _channel_mixer(config: ModelConfig, layer: LayerConfig, context: LayerContext) -> nn.Module:
    if isinstance(layer.channel, MoEConfig):
        return SparseMoE(config.hidden_size, layer.channel, context)
    return DecoderMLP(config.hidden_size, layer.channel, context)


def decoder_norm(config: ModelConfig, context: LayerContext) -> RMSNorm:
    return RMSNorm(config.hidden_size, config.rms_norm_eps, context, is_zero_centred=config.norm_is_zero_centred)


class Decoder(nn.Module):
    """Embeddings to final norm. `num_positions` bounds the positions that will be asked for."""

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        super().__init__()
        self.embed_tokens = TokenEmbedding("embed_tokens", config.vocab_size, config.hidden_size, context)
        self.layers = nn.ModuleList()
        counts: Counter[type] = Counter()
        for layer in config.layers:
            self.layers.append(DecoderLayer(config, layer, counts[type(layer.mixer)], context))
            counts[type(layer.mixer)] += 1
        self.norm = decoder_norm(config, context)
        self.rotary = RotaryTable(config, num_positions, dtype=context.dtype, device=context.device)

    def forward(self, x_TD: Tensor, positions: Tensor, metadata: AttentionMetadata,
                deepstack: tuple[Tensor, list[Tensor]] | None = None) -> Tensor:
        """Final hidden states (T, D) of embedded tokens `x_TD`.

        `deepstack`: (T,) int32 rows of the levels, and for each of the first layers a level (M + 1, D): after that
        layer every token adds its row. The last row is zeros, for tokens of no picture; DeepStack, arXiv 2406.04334.
        """
        cos_TR, sin_TR = self.rotary(positions)
        residual_TD = None
        rows_T, levels = deepstack if deepstack is not None else (None, [])
        for index, layer in enumerate(self.layers):
            x_TD, residual_TD = layer(x_TD, residual_TD, cos_TR, sin_TR, metadata)
            if index < len(levels):
                # Gathered and added to all rows: scattering adds sorts its indices on some devices.
                x_TD = x_TD + F.embedding(rows_T, levels[index])
        return self.norm.add_forward(x_TD, residual_TD)[0]


def output_head(config: ModelConfig, decoder: Decoder, context: LayerContext) -> OutputHead | None:
    """None where vectors are pooled: nobody asks for logits, and such checkpoints come without their weights."""
    if config.pooling is not None:
        return None
    return OutputHead("lm_head", config.vocab_size, config.hidden_size, context,
                      tied_to=decoder.embed_tokens if config.tie_word_embeddings else None)


class CausalLM(nn.Module):
    """A text-only checkpoint: decoder and output head."""

    def __init__(self, config: ModelConfig, num_positions: int, context: LayerContext):
        super().__init__()
        self.model = Decoder(config, num_positions, context)
        self.lm_head = output_head(config, self.model, context)

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
        assert self.lm_head is not None, "a model that pools vectors has no logits"
        return self.lm_head(hidden_BD)
