"""PaddleOCR-VL: ERNIE 4.5's small decoder with positions of three axes, and a SigLIP tower whose table is resampled.

Knows nothing of caches, schedulers or prompts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Set
from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, check_layer_types, decoder_config, dense_layers, read_rope
from npu_runner.checkpoint.model_config import ModelConfig, VisionConfig
from npu_runner.errors import ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.mixers.attention import DecoderAttention
from npu_runner.models.vision.paddleocr_vl import SiglipTower
from npu_runner.models.vision.parts import known_activation
from npu_runner.prompts.media.image_settings import ImageSettings, Resizing
from npu_runner.strategies.qwen2_vl import is_tied
from npu_runner.strategies.qwen3_vl import Qwen3VLStrategy, tower_fields

_THETA = 5e5
_SECTION = (16, 24, 24)
# As published, and as transformers writes them; the other names are those that it gives the parts in memory.
_PUBLISHED_STEMS = ("visual.", "mlp_AR.", "model.")
_STEMS = ("model.visual.", "model.projector.", "model.language_model.")
_UNUSED = ("vision_model.head.", "vision_model.embeddings.packing_position_embedding.")


class PaddleOCRVLStrategy(Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("paddleocr_vl",)
    accepts_videos = False
    no_videos = "the processor that transformers has for PaddleOCR-VL takes images only"
    attention_class = DecoderAttention
    image_defaults = ImageSettings(min_pixels=384 * 384, max_pixels=1536 * 1536, temporal_patch_size=1,
                                   resizing=Resizing.SHORT_SIDE)
    left_out_prefixes = tuple(stem + part for stem in ("visual.", "model.visual.") for part in _UNUSED)

    def model_config(self, config: RawConfig) -> ModelConfig:
        text = config.text
        check_layer_types(text.get("layer_types") or ["full_attention"] * config.num_layers, config.num_layers,
                          ("full_attention",))
        rope = read_rope(config, theta=_THETA, section=_SECTION, section_is_interleaved=False)
        vision = _read_vision(config.raw["vision_config"], out_hidden_size=int(text["hidden_size"]))
        read = decoder_config(config, layers=dense_layers(config, bias=_uses_bias(text)), rope=rope, head_dim=128,
                              rms_norm_eps=1e-5, vision=vision, image_token_id=config.raw.get("image_token_id"))
        return dataclasses.replace(read, tie_word_embeddings=is_tied(config))

    def attention_settings(self) -> dict[str, Any]:
        return dict.fromkeys(("qkv_bias", "o_bias"), _uses_bias(self.text))

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        return SiglipTower(vision, context)

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        is_published = any(name.startswith("mlp_AR.") for name in names)
        visual, projector, text = _PUBLISHED_STEMS if is_published else _STEMS
        vision = f"{visual}vision_model."
        layer, ours = f"{vision}encoder.layers.*.", "model.visual.blocks.*."
        return {
            f"{ours}attn.proj.": f"{layer}self_attn.out_proj.", f"{ours}attn.": f"{layer}self_attn.",
            f"{ours}norm1.": f"{layer}layer_norm1.", f"{ours}norm2.": f"{layer}layer_norm2.", ours: layer,
            "model.visual.patch_embed.proj.": f"{vision}embeddings.patch_embedding.",
            "model.visual.position_embedding.": f"{vision}embeddings.position_embedding.",
            "model.visual.merger.norm.": f"{projector}pre_norm.", "model.visual.merger.": projector,
            "model.visual.": vision, "model.language_model.": text}


def _uses_bias(text: Mapping[str, Any]) -> bool:
    """Whether all linears of the decoder have a bias."""
    return bool(text.get("use_bias", False))


def _read_vision(raw: dict[str, Any], *, out_hidden_size: int) -> VisionConfig:
    """`vision_config`. Its temporal_patch_size, where the file has one, is read by nothing: a patch has one frame."""
    known = {**raw, "depth": raw.get("num_hidden_layers", 27), "num_heads": raw.get("num_attention_heads", 16),
             "in_channels": raw.get("num_channels", 3), "temporal_patch_size": 1}
    fields = tower_fields(known, patch_size=14)
    width, image_size = int(raw.get("hidden_size", 1152)), int(raw.get("image_size", 384))
    if width % (4 * fields["num_heads"]):
        raise ModelError(f"vision_config.hidden_size {width} of {fields['num_heads']} heads is not supported; the axes "
                         "of an image turn pairs of a head's halves, so a head is a multiple of 4")
    return VisionConfig(
        hidden_size=width, intermediate_size=int(raw.get("intermediate_size", 4304)), out_hidden_size=out_hidden_size,
        hidden_act=known_activation(raw.get("hidden_act", "gelu_pytorch_tanh"), "vision hidden_act"),
        norm_eps=float(raw.get("layer_norm_eps", 1e-6)),
        num_position_embeddings=(image_size // fields["patch_size"]) ** 2, **fields)
