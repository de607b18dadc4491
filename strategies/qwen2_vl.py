"""Qwen2-VL and models trained from it: Qwen2's decoder with positions of three axes, and a tower of layer norms.

Knows nothing of caches, schedulers or prompts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, layer_windows, read_rope
from npu_runner.checkpoint.model_config import ModelConfig, VisionConfig
from npu_runner.checkpoint.weights_reader import has_module
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.vision.parts import known_activation
from npu_runner.models.vision.qwen2_vl import PlainVisionTower
from npu_runner.prompts.media.video_settings import VideoForm
from npu_runner.strategies.qwen2 import QWEN2_BIASES
from npu_runner.strategies.qwen3_vl import Qwen3VLStrategy, tower_fields

_THETA = 1e6
_SECTION = (16, 24, 24)


class Qwen2VLStrategy(Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_vl",)
    video_form = VideoForm.STEPS
    attention_class = DecoderAttention

    def model_config(self, config: RawConfig) -> ModelConfig:
        rope = read_rope(config, theta=_THETA, section=_SECTION, section_is_interleaved=False)
        read = decoder_config(config, layers=dense_layers(config, layer_windows(config)), rope=rope, rms_norm_eps=1e-5,
                              vision=self.vision(config.raw["vision_config"]),
                              image_token_id=config.raw.get("image_token_id"))
        return dataclasses.replace(read, tie_word_embeddings=is_tied(config))

    def vision(self, raw: dict[str, Any]) -> VisionConfig:
        """`vision_config`. What it calls hidden_size is the decoder's; embed_dim is the tower's."""
        width = int(raw.get("embed_dim", 1280))
        return VisionConfig(
            hidden_size=width, intermediate_size=int(width * raw.get("mlp_ratio", 4)),
            hidden_act=known_activation(raw.get("hidden_act", "quick_gelu"), "vision hidden_act"),
            out_hidden_size=int(raw["hidden_size"]), **tower_fields(raw, patch_size=14))

    def attention_settings(self) -> dict[str, Any]:
        return QWEN2_BIASES

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        return PlainVisionTower(vision, context)


def is_tied(config: RawConfig) -> bool:
    """Whether config.json ties the head to the embedding, at its root or in text_config: one of them may be a default
    of another release. Where neither says anything, a file without a head is tied."""
    said = [bool(part["tie_word_embeddings"]) for part in (config.raw, config.text) if "tie_word_embeddings" in part]
    return any(said) if said else has_module(config.path.parent, "lm_head") is False
