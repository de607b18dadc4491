"""Llama 2 and 3: plain attention, plain MLP, biases where the config asks for them."""

from __future__ import annotations

from typing import ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, read_rope
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.strategies.causal_lm import CausalLMStrategy


class LlamaStrategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("llama",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        layers = dense_layers(config, bias=bool(config.text.get("mlp_bias", False)))
        return decoder_config(config, layers=layers, rope=read_rope(config))
