"""Qwen2 and Qwen2.5, text only: biases on queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, layer_windows, read_rope
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.strategies.causal_lm import CausalLMStrategy

QWEN2_BIASES = {"qkv_bias": True}


class Qwen2Strategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=dense_layers(config, layer_windows(config)), rope=read_rope(config))

    def attention_settings(self) -> dict[str, Any]:
        return QWEN2_BIASES
