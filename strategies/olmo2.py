"""OLMo 2 (arXiv 2501.00656): norms behind the mixers instead of before them, one norm over all heads of queries and one
over all of keys. Knows nothing of caches or prompts.

T tokens in the step, D hidden size, R dims of a head that turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from torch import Tensor

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, read_rope
from npu_runner.checkpoint.model_config import AttentionConfig, ModelConfig
from npu_runner.layers.norm import Float32RMSNorm, PartsRMSNorm, RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.decoder import DecoderLayer
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.platforms.quantised import Int8Rows
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.strategies.causal_lm import CausalLMStrategy


class Olmo2Attention(DecoderAttention):
    def __init__(self, config: ModelConfig, mixer: AttentionConfig, cache_layer: int, context: LayerContext,
                 **biases: bool):
        super().__init__(config, mixer, cache_layer, context, **biases)
        query, key, _ = self.parts(config, context)
        self.qk_norm = PartsRMSNorm([replace(query, name="q_norm"), replace(key, name="k_norm")], config.rms_norm_eps,
                                    context)

    def project(self, x_TD: Tensor | Int8Rows) -> Sequence[Tensor]:
        q, k, v = super().project(x_TD)
        return [*self.qk_norm(q, k), v]


class Olmo2Layer(DecoderLayer):
    norms = ("post_attention_layernorm", "post_feedforward_layernorm")
    norm_class = Float32RMSNorm
    post_feedforward_layernorm: RMSNorm

    def forward(self, x_TD: Tensor, residual_TD: Tensor | None, cos_TR: Tensor, sin_TR: Tensor,
                metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
        if residual_TD is not None:
            x_TD = x_TD + residual_TD
        mixed_TD = self.mix(x_TD, cos_TR, sin_TR, metadata)
        x_TD = metadata.of_ends(x_TD) + self.post_attention_layernorm(mixed_TD)
        return self.post_feedforward_layernorm(self.mlp(x_TD)), x_TD


class Olmo2Strategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("olmo2",)
    attention_class = Olmo2Attention
    layer_class = Olmo2Layer

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=dense_layers(config), rope=read_rope(config), rms_norm_eps=1e-5)
