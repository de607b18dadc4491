"""Qwen2.5-VL: a decoder like Qwen2.5's with positions of three axes, and a tower that attends within windows."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, read_rope
from npu_runner.checkpoint.model_config import ModelConfig, VisionConfig
from npu_runner.errors import ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.vision.qwen2_5_vl import WindowedVisionTower
from npu_runner.strategies.qwen2 import QWEN2_BIASES, qwen2_layers
from npu_runner.strategies.qwen3_vl import Qwen3VLStrategy

_THETA = 1e6
_SECTION = (16, 24, 24)
_FULL_ATTENTION_LAYERS = (7, 15, 23, 31)
# As published, and as transformers 5 writes it.
_PUBLISHED_NAMES = {"model.visual.": "visual.", "model.language_model.": "model."}


class Qwen25VLStrategy(Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    takes_videos = False  # its videos have positions of their own
    attention_class = DecoderAttention

    def model_config(self, config: RawConfig) -> ModelConfig:
        rope = read_rope(config, theta=_THETA, section=_SECTION, section_is_interleaved=False)
        return decoder_config(config, layers=qwen2_layers(config), rope=rope,
                              vision=_read_vision(config.raw["vision_config"]),
                              image_token_id=config.raw.get("image_token_id"))

    def attention_settings(self) -> dict[str, Any]:
        return QWEN2_BIASES

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        return WindowedVisionTower(vision, context)

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        is_published = any(name.startswith("visual.") for name in names) and any(
            name.startswith("model.") for name in names)
        return _PUBLISHED_NAMES if is_published else super().renamed(names)


def _read_vision(raw: dict[str, Any]) -> VisionConfig:
    patch_size = int(raw.get("patch_size", 14))
    merge_size, window_size = int(raw.get("spatial_merge_size", 2)), int(raw.get("window_size", 112))
    if window_size < patch_size * merge_size:
        raise ModelError(f"vision_config.window_size {window_size} is less than a token's side of "
                         f"{patch_size * merge_size} pixels")
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"vision hidden_act {raw['hidden_act']!r} is not supported in this tower; supported is silu")
    rope = raw.get("rope_parameters") or {}
    return VisionConfig(
        depth=int(raw["depth"]), hidden_size=int(raw["hidden_size"]), intermediate_size=int(raw["intermediate_size"]),
        num_heads=int(raw["num_heads"]), hidden_act="silu", in_channels=int(raw.get("in_channels", 3)),
        patch_size=patch_size, temporal_patch_size=int(raw.get("temporal_patch_size", 2)),
        spatial_merge_size=merge_size, out_hidden_size=int(raw["out_hidden_size"]),
        rope_theta=float(rope.get("rope_theta", 10000.0)), window_size=window_size,
        full_attention_layers=tuple(int(i) for i in raw.get("fullatt_block_indexes", _FULL_ATTENTION_LAYERS)),
    )
