"""Qwen2.5-VL: Qwen2-VL with a tower of RMS norms whose layers mostly attend within windows."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.errors import ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.qwen2_5_vl import WindowedVisionTower
from npu_runner.prompts.media.video_settings import VideoForm
from npu_runner.strategies.qwen2_vl import Qwen2VLStrategy
from npu_runner.strategies.qwen3_vl import tower_fields

_FULL_ATTENTION_LAYERS = (7, 15, 23, 31)


class Qwen25VLStrategy(Qwen2VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen2_5_vl",)
    video_form = VideoForm.SECONDS

    def vision(self, raw: dict[str, Any]) -> VisionConfig:
        fields = tower_fields(raw, patch_size=14)
        window_size, side = int(raw.get("window_size", 112)), fields["patch_size"] * fields["spatial_merge_size"]
        if window_size < side:
            raise ModelError(f"vision_config.window_size {window_size} is less than a token's side of {side} pixels")
        if raw.get("hidden_act", "silu") != "silu":
            raise ModelError(f"vision hidden_act {raw['hidden_act']!r} is not supported in this tower; supported is "
                             "silu")
        return VisionConfig(
            hidden_size=int(raw["hidden_size"]), intermediate_size=int(raw["intermediate_size"]), hidden_act="silu",
            out_hidden_size=int(raw["out_hidden_size"]), window_size=window_size,
            full_attention_layers=tuple(int(i) for i in raw.get("fullatt_block_indexes", _FULL_ATTENTION_LAYERS)),
            **fields)

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        return WindowedVisionTower(vision, context)
