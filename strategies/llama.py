"""Llama 2 and 3: plain attention, plain MLP, biases where the config asks for them."""

from __future__ import annotations

from typing import ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, read_rope
from npu_runner.checkpoint.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from npu_runner.strategies.causal_lm import CausalLMStrategy


class LlamaStrategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        text = config.text
        mlp = MLPConfig(intermediate_size=int(text["intermediate_size"]), bias=bool(text.get("mlp_bias", False)))
        layer = LayerConfig(mixer=AttentionConfig(), channel=mlp)
        return decoder_config(config, layers=[layer] * config.num_layers, rope=read_rope(config))
