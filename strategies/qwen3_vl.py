"""Qwen3-VL: pictures go through the tower as bytes and come back as main and deepstack embeddings.

Knows nothing of caches, schedulers or prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from npu_runner.checkpoint_files import require_json
from npu_runner.layers.parallel import LayerContext
from npu_runner.model_config import ModelConfig
from npu_runner.models.qwen3_vl import Qwen3VL
from npu_runner.multimodal.image_settings import ImageSettings, read_image_settings
from npu_runner.multimodal.inputs import ImageInput
from npu_runner.platforms.upload import upload, upload_together
from strategies.base import VisionEmbeddings
from strategies.causal_lm import CausalLMStrategy

# H, W pixels of a picture; P patches; X values of a patch; M picture tokens; D hidden size


class Qwen3VLStrategy(CausalLMStrategy):
    model_types: ClassVar[tuple[str, ...]] = ("qwen3_vl",)
    is_multimodal = True

    @cached_property
    def image_settings(self) -> ImageSettings:
        return read_image_settings(self.path, require_json(self.path, "config.json"))

    def build(self, model_config: ModelConfig, num_positions: int, context: LayerContext) -> nn.Module:
        return Qwen3VL(model_config, num_positions, context)

    def encode_images(self, model: nn.Module, images: Sequence[ImageInput]) -> list[VisionEmbeddings]:
        assert isinstance(model, Qwen3VL), f"{type(model).__name__} has no Qwen3-VL tower"
        # Pictures of one size lie together, so that attention runs over them as one batch.
        order = sorted(range(len(images)), key=lambda i: images[i].grid_thw)
        device = model.visual.pos_embed.weight.device
        patches_PX = self.normalise(torch.cat([self.patchify(images[i], device) for i in order]))
        grids = [images[i].grid_thw[1:] for i in order]
        main_MD, levels = model.visual(patches_PX, grids)
        sizes = [images[i].num_tokens for i in order]
        parts = zip(main_MD.split(sizes), *(level.split(sizes) for level in levels), strict=True)
        encoded: dict[int, VisionEmbeddings] = {}
        for i, (main, *deepstack) in zip(order, parts, strict=True):
            # Copies: a cached picture must not keep the whole call's output alive.
            encoded[i] = VisionEmbeddings(main.clone(), [level.clone() for level in deepstack])
        return [encoded[i] for i in range(len(images))]

    def patchify(self, image: ImageInput, device: torch.device) -> Tensor:
        """(P, X) uint8 in merge-block order, which is that of transformers' Qwen2-VL image processor.

        X = row, column, channel: runs of bytes stay together, and PatchEmbed arranges its weight accordingly.
        """
        patch, merge = self.image_settings.patch_size, self.image_settings.merge_size
        _, rows, columns = image.grid_thw
        pixels_HWC = upload(image.pixels_HWC, device)
        blocks = pixels_HWC.view(rows // merge, merge, patch, columns // merge, merge, patch * 3)
        return blocks.permute(0, 3, 1, 4, 2, 5).reshape(rows * columns, -1)

    def normalise(self, patches_PX: Tensor) -> Tensor:
        """(P, X) float32: rescaled, less the mean, over the deviation, each in float32 as transformers does it."""
        mean_X, std_X = upload_together(self._mean_and_deviation, patches_PX.device)
        return patches_PX.float().mul_(self.image_settings.rescale_factor).sub_(mean_X).div_(std_X)

    @cached_property
    def _mean_and_deviation(self) -> list[np.ndarray]:
        settings = self.image_settings
        return [np.tile(np.array(values, dtype=np.float32), settings.patch_size**2)
                for values in (settings.image_mean, settings.image_std)]
