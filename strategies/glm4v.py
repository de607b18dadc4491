"""GLM-4.1V: a decoder with norms before and behind its mixers, whose rotary embedding turns neighbouring dims, and a
tower of gated MLPs with a learned grid.

Source: the GLM-4.1V report (arXiv 2507.01006). Knows nothing of caches, schedulers or prompts.

T tokens in the step, D hidden size, R dims of a head that turn.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, dense_layers, read_rope
from npu_runner.checkpoint.model_config import (
    GatedVisionConfig,
    ModelConfig,
    VisionConfig,
)
from npu_runner.errors import ModelError
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.layers.rotary import sectioned_axes
from npu_runner.models.decoder import DecoderLayer
from npu_runner.models.mixers.attention import PairRotationAttention
from npu_runner.models.vision.glm import GatedVisionTower
from npu_runner.prompts.media.image_settings import ImageSettings, Resizing
from npu_runner.prompts.media.video_settings import VideoForm
from npu_runner.strategies.qwen3_vl import Qwen3VLStrategy, tower_fields

_SECTION = (8, 12, 12)
_EPS = 1e-5
_IMAGE_SIDE = 336


class SandwichLayer(DecoderLayer):
    """The output of each mixer is normalised before it is added to the residual."""

    norms = ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    post_self_attn_layernorm: RMSNorm
    post_mlp_layernorm: RMSNorm

    def behind_mixer(self, x_TD: Tensor) -> Tensor:
        return self.post_self_attn_layernorm(x_TD)  # type: ignore[no-any-return]

    def behind_channel(self, x_TD: Tensor) -> Tensor:
        return self.post_mlp_layernorm(x_TD)  # type: ignore[no-any-return]


class Glm4vStrategy(Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("glm4v",)
    attention_class = PairRotationAttention
    layer_class = SandwichLayer
    video_form = VideoForm.WHOLE_SECONDS_BEHIND
    image_defaults = ImageSettings(min_pixels=112 * 112, max_pixels=28 * 28 * 15000, resizing=Resizing.FRAMES)

    def model_config(self, config: RawConfig) -> ModelConfig:
        text = config.text
        head_dim = int(text.get("head_dim") or int(text["hidden_size"]) // int(text["num_attention_heads"]))
        rope = read_rope(config, section=_SECTION, section_is_interleaved=False, head_dim=head_dim)
        # Refused before memory is taken.
        sectioned_axes(rope.mrope_section or _SECTION, (rope.rotary_dim or head_dim) // 2)
        return decoder_config(config, layers=dense_layers(config, is_fused=True),
                              rope=rope, rms_norm_eps=_EPS, vision=self.vision(config.raw["vision_config"]),
                              image_token_id=config.raw.get("image_token_id"))

    def vision(self, raw: dict[str, Any]) -> GatedVisionConfig:
        """`vision_config`. What it calls intermediate_size is the merger's; blocks are as wide as the decoder."""
        fields = gated_tower_fields(raw)
        side = int(raw.get("image_size", _IMAGE_SIDE)) // fields["patch_size"]
        return GatedVisionConfig(
            intermediate_size=fields["out_hidden_size"], merger_intermediate_size=int(raw["intermediate_size"]),
            num_position_embeddings=side**2, has_head_norms=False, qkv_bias=bool(raw.get("attention_bias", False)),
            bias=False, **fields)

    def attention_settings(self) -> dict[str, Any]:
        return {"qkv_bias": True}

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        assert isinstance(vision, GatedVisionConfig), "which this family reads"
        return GatedVisionTower(vision, context)


def gated_tower_fields(raw: dict[str, Any]) -> dict[str, Any]:
    """The fields of GatedVisionConfig that `vision_config` has by the same meaning in all GLM families."""
    act = raw.get("hidden_act", "silu")
    if act != "silu":
        raise ModelError(f"vision hidden_act {act!r} is not supported in this tower; supported is silu")
    return {
        "hidden_size": int(raw["hidden_size"]), "hidden_act": act, "out_hidden_size": int(raw["out_hidden_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", _EPS)), **tower_fields(raw, patch_size=14),
    }
