"""Mistral: plain attention over a sliding window in every layer, or over everything where the file says null."""

from __future__ import annotations

from typing import Any, ClassVar

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, read_rope, window_length
from npu_runner.checkpoint.model_config import ModelConfig
from npu_runner.strategies.causal_lm import CausalLMStrategy

_WINDOW = 4096
"""Where config.json says nothing."""


class MistralStrategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("mistral",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        window = window_length(config, config.text.get("sliding_window", _WINDOW))
        layers = dense_layers(config, [window] * config.num_layers)
        return decoder_config(config, layers=layers, rope=read_rope(config))

    def attention_settings(self) -> dict[str, Any]:
        return {}  # no biases, whatever the file says
