"""Qwen2 and Qwen2.5, text only: biases on queries, keys and values."""

from __future__ import annotations

from typing import Any, ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, layer_windows, read_rope
from npu_runner.checkpoint.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig
from npu_runner.strategies.causal_lm import CausalLMStrategy

QWEN2_BIASES = {"qkv_bias": True}


class Qwen2Strategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=qwen2_layers(config), rope=read_rope(config))

    def attention_settings(self) -> dict[str, Any]:
        return QWEN2_BIASES


def qwen2_layers(config: RawConfig) -> list[LayerConfig]:
    mlp = MLPConfig(intermediate_size=int(config.text["intermediate_size"]))
    return [LayerConfig(mixer=AttentionConfig(sliding_window=window), channel=mlp)
            for window in layer_windows(config)]
