"""Qwen3-Next: Gated DeltaNet and gated attention by turns over a mixture of experts; text only.

Knows nothing of caches, states or prompts.
"""

from __future__ import annotations

from typing import ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, is_sparse_layer, read_moe
from npu_runner.checkpoint.model_config import LayerConfig, MLPConfig, ModelConfig
from npu_runner.models.mixers.gated_delta_net import InterleavedGatedDeltaNet
from npu_runner.strategies.qwen3_5 import HEAD_DIM, Qwen35TextStrategy, hybrid_mixers, hybrid_rope


class Qwen3NextStrategy(Qwen35TextStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_next",)
    gated_delta_class = InterleavedGatedDeltaNet

    def model_config(self, config: RawConfig) -> ModelConfig:
        moe = read_moe(config, renormalise=bool(config.text.get("norm_topk_prob", True)), has_shared=True)
        mlp = MLPConfig(intermediate_size=int(config.text["intermediate_size"]))
        layers = [LayerConfig(mixer=mixer, channel=moe if is_sparse_layer(config, index) else mlp)
                  for index, mixer in enumerate(hybrid_mixers(config))]
        return decoder_config(config, layers=layers, rope=hybrid_rope(config), head_dim=HEAD_DIM)
