"""Qwen3-VL: images go through the tower as bytes and come back as main and deepstack embeddings.

Knows nothing of caches, schedulers or prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from typing import Any, ClassVar

from torch import nn

from npu_runner.checkpoint.config_reading import RawConfig, decoder_config, read_moe, read_rope
from npu_runner.checkpoint.files import require_json
from npu_runner.checkpoint.model_config import ModelConfig, VisionConfig
from npu_runner.errors import ModelError
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.decoder import VisionLanguageModel
from npu_runner.models.mixers.attention import DecoderAttention, HeadNormAttention
from npu_runner.models.vision.parts import known_activation
from npu_runner.models.vision.patches import cut_patches, groups_within
from npu_runner.models.vision.qwen3_vl import VisionTower
from npu_runner.prompts.media.image_settings import ImageSettings, read_image_settings
from npu_runner.prompts.media.video_settings import read_video_settings
from npu_runner.request.prompt_inputs import ImageInput
from npu_runner.strategies.base import StagedImages, TowerInputs, VisionEmbeddings
from npu_runner.strategies.causal_lm import CausalLMStrategy
from npu_runner.strategies.qwen3 import HEAD_DIM, qwen3_layers

# P patches; X values of a patch; M image tokens; D hidden size


_DEEPSTACK_LAYERS = (8, 16, 24)
_THETA = 500000.0
_SECTION = (24, 20, 20)


class Qwen3VLStrategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
    attention_class: ClassVar[type[DecoderAttention]] = HeadNormAttention
    is_multimodal = True
    accepts_videos = True

    def model_config(self, config: RawConfig) -> ModelConfig:
        return decoder_config(config, layers=qwen3_layers(config), head_dim=HEAD_DIM, **with_vision(config))

    @cached_property
    def image_settings(self) -> ImageSettings:
        config = require_json(self.path, "config.json")
        return read_image_settings(self.path, config, default=self.image_defaults)

    @cached_property
    def frame_settings(self) -> ImageSettings:
        """As `image_settings`, of the frames of videos."""
        config = require_json(self.path, "config.json")
        return read_video_settings(self.path, config, form=self.video_form).frame

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        assert model_config.vision is not None, f"a {model_config.model_type} checkpoint has a vision_config"
        tower = self.tower(model_config.vision, context)
        return VisionLanguageModel(model_config, tower, num_positions, context, self.layer)

    def tower(self, vision: VisionConfig, context: LayerContext) -> nn.Module:
        return VisionTower(vision, context)

    def renamed(self, names: Set[str]) -> Mapping[str, str]:
        if not all(any(name.startswith(part) for name in names) for part in ("visual.", "model.")):
            return super().renamed(names)
        if any(name.startswith("model.language_model.") for name in names):
            return {"model.visual.": "visual."}  # older folders of ModelSlim
        return {"model.visual.": "visual.", "model.language_model.": "model."}  # Qwen2-VL and 2.5-VL as published

    def stage_images(self, model: nn.Module, images: Sequence[ImageInput]) -> Sequence[ImageInput]:
        assert isinstance(model, VisionLanguageModel), f"{type(model).__name__} has no tower"
        return StagedImages(images, list(self._tower_inputs(model.visual, images)))

    def encode_images(self, model: nn.Module, images: Sequence[ImageInput]) -> list[VisionEmbeddings]:
        assert isinstance(model, VisionLanguageModel), f"{type(model).__name__} has no tower"
        encoded: dict[int, VisionEmbeddings] = {}
        groups = images.take() if isinstance(images, StagedImages) else self._tower_inputs(model.visual, images)
        for group in groups:
            together = [images[i] for i in group.indices]
            main_MD, levels = model.visual(group.patches_PX, _grids(together), group.places)
            sizes = [image.num_tokens for image in together]
            parts = zip(group.indices, main_MD.split(sizes), *(level.split(sizes) for level in levels), strict=True)
            for index, main, *deepstack in parts:
                # Copies: a cached image must not keep the whole call's output alive.
                encoded[index] = VisionEmbeddings(main.clone(), [level.clone() for level in deepstack])
        return [encoded[i] for i in range(len(images))]

    def _tower_inputs(self, tower: nn.Module, images: Sequence[ImageInput]) -> Iterator[TowerInputs]:
        """Group by group, all of it by one copy.

        If the attention needs small groups, each is cut just before the tower takes it.
        """
        weight, most = tower.patch_embed.weight, tower.attention.vision_patches
        sizes = [_num_patches(image) for image in images]
        groups = [group for order in _by_depth(images) for group in groups_within(order, sizes.__getitem__, most)]
        for taken in [groups] if most is None else [[group] for group in groups]:
            batches = [[images[i] for i in group] for group in taken]
            places = [tower.places(_grids(together)) for together in batches]
            cut = cut_patches(batches, places, self._settings_of, weight.device, weight.dtype)
            yield from (TowerInputs(group, *arrived) for group, arrived in zip(taken, cut, strict=True))

    def _settings_of(self, image: ImageInput) -> ImageSettings:
        """The settings of an image, or of video frames, whose normalisation is their own."""
        return self.image_settings if image.pixels_HWC.shape[2] == 3 else self.frame_settings


def _grids(images: Sequence[ImageInput]) -> list[tuple[int, int]]:
    """(height, width) of each in patches."""
    return [image.grid_thw[1:] for image in images]


def _by_depth(images: Sequence[ImageInput]) -> list[list[int]]:
    """Images, and frames of videos, which have longer patches: what can go through the tower together. Those of one
    size lie together, so that attention runs over them as one batch."""
    by_colours: dict[int, list[int]] = {}
    for index in sorted(range(len(images)), key=lambda i: images[i].grid_thw):
        by_colours.setdefault(images[index].pixels_HWC.shape[2], []).append(index)
    return [by_colours[colours] for colours in sorted(by_colours)]


def _num_patches(image: ImageInput) -> int:
    _, rows, columns = image.grid_thw
    return rows * columns


class Qwen3VLMoEStrategy(Qwen3VLStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl_moe",)

    def model_config(self, config: RawConfig) -> ModelConfig:
        moe = read_moe(config, renormalise=True)
        return decoder_config(config, layers=qwen3_layers(config, moe), **with_vision(config))


def with_vision(config: RawConfig) -> dict[str, Any]:
    """The fields of ModelConfig that a tower brings: itself, its token, and positions of three axes."""
    return {
        "rope": read_rope(config, theta=_THETA, section=_SECTION),
        "vision": read_vision(config.raw["vision_config"], _DEEPSTACK_LAYERS),
        "image_token_id": config.raw.get("image_token_id"),
    }


def read_vision(raw: dict[str, Any], deepstack_layers: tuple[int, ...]) -> VisionConfig:
    """`vision_config`; `deepstack_layers` where it does not name them."""
    return VisionConfig(
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        hidden_act=known_activation(raw.get("hidden_act", "gelu_pytorch_tanh"), "vision hidden_act"),
        out_hidden_size=int(raw["out_hidden_size"]),
        num_position_embeddings=int(raw.get("num_position_embeddings", 2304)),
        deepstack_layers=tuple(int(i) for i in raw.get("deepstack_visual_indexes", deepstack_layers)),
        **tower_fields(raw, patch_size=16))


def tower_fields(raw: dict[str, Any], *, patch_size: int) -> dict[str, Any]:
    """The fields of VisionConfig that `vision_config` has by the same names in all of these families. `patch_size`:
    where it says nothing."""

    def single(name: str, default: int) -> int:
        value = raw.get(name, default)
        if isinstance(value, (list, tuple)):
            if len(set(value)) != 1:
                raise ModelError(f"vision_config.{name} {value} is not supported; one number is")
            value = value[0]
        return int(value)

    channels = raw.get("in_channels", raw.get("in_chans", 3))
    if channels != 3:
        raise ModelError(f"vision_config.in_channels {channels} is not supported; images have 3 colours here")
    rope = raw.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise ModelError(f"vision rope_type {rope['rope_type']!r} is not supported")
    return {
        "depth": int(raw["depth"]), "num_heads": int(raw["num_heads"]), "in_channels": channels,
        "patch_size": single("patch_size", patch_size), "temporal_patch_size": single("temporal_patch_size", 2),
        "spatial_merge_size": int(raw.get("spatial_merge_size", 2)),
        "rope_theta": float(rope.get("rope_theta", 10000.0)),
    }
