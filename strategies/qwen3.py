"""Qwen3, text only: norms on queries and keys; dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from npu_runner.checkpoint.config_reading import (
    WINDOW,
    RawConfig,
    decoder_config,
    is_sparse_layer,
    layer_windows,
    read_moe,
    read_rope,
    window_length,
)
from npu_runner.checkpoint.model_config import AttentionConfig, LayerConfig, MLPConfig, ModelConfig, MoEConfig
from npu_runner.models.mixers.attention import HeadNormAttention
from npu_runner.strategies.causal_lm import CausalLMStrategy

HEAD_DIM = 128
"""Where config.json says nothing."""


class Qwen3Strategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    attention_class = HeadNormAttention

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=qwen3_layers(config, windows=layer_windows(config)),
                              rope=read_rope(config), head_dim=HEAD_DIM)


class Qwen3MoEStrategy(Qwen3Strategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_moe",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        moe = read_moe(config, renormalise=bool(config.text.get("norm_topk_prob", False)))
        # All layers or none: max_window_layers means nothing here.
        slides = config.text.get("use_sliding_window")
        window = window_length(config, config.text.get("sliding_window", WINDOW)) if slides else None
        layers = qwen3_layers(config, moe, windows=[window] * config.num_layers)
        return decoder_config(config, layers=layers, rope=read_rope(config))


def qwen3_layers(config: RawConfig, moe: MoEConfig | None = None, *,
                 windows: Sequence[int | None] | None = None) -> list[LayerConfig]:
    """The decoder's layers; those that `moe` does not hold are dense. `windows`: of each layer; None: none slides."""
    mlp = MLPConfig(intermediate_size=int(config.text["intermediate_size"]))
    return [
        LayerConfig(mixer=AttentionConfig(sliding_window=window),
                    channel=moe if moe is not None and is_sparse_layer(config, index) else mlp)
        for index, window in enumerate(windows or [None] * config.num_layers)
    ]
