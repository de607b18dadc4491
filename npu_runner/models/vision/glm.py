"""The vision towers of GLM-4.1V and GLM-OCR: RMS norms and gated MLPs, blocks that all attend within whole images, and
2 x 2 neighbours brought together by a strided convolution. Knows no text.

Source: the GLM-4.1V report, section 2 (arXiv 2507.01006).

P patches of all images, G = merge^2 patches of a token, M = P / G image tokens, X values of a patch, C hidden size, H
head dim, Q = H / 4 frequencies of an axis, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from npu_runner.checkpoint.model_config import GatedVisionConfig, MLPConfig, VisionConfig
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart
from npu_runner.layers.norm import LayerNorm, RMSNorm
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.models.mixers.mlp import DecoderMLP
from npu_runner.models.vision.parts import (
    HeadNormVisionAttention,
    TowerBlock,
    VisionAttention,
    on_every_rank,
    tower_context,
)
from npu_runner.models.vision.resampled_table import ResampledTable, bicubic
from npu_runner.models.vision.tower import Tower

_LAYER_NORM_EPS = 1e-5


class GatedVisionTower(Tower):
    """With a learned grid, resampled to each image's, where the config has one: then a norm stands before it."""

    def __init__(self, config: GatedVisionConfig, context: LayerContext):
        context = tower_context(config, context)
        super().__init__(config, context, patch_bias=True, block=_block, merger=_merger)
        size = config.hidden_size
        self.post_conv_layernorm = self.embeddings = None
        if config.num_position_embeddings:
            self.post_conv_layernorm = RMSNorm(size, config.norm_eps, context)
            self.embeddings = _Embeddings(config, context)
        self.post_layernorm = RMSNorm(size, config.norm_eps, context)
        self.downsample = Downsample(config, context)

    @property
    def learned_grid(self) -> ResampledTable | None:
        return None if self.embeddings is None else self.embeddings.position_embedding

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]],
                places: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D), and no deepstack level. Arguments as in the other towers."""
        places_P2, *taps, cos_SQ, sin_SQ = places
        x_PC, update_PC = self.through_blocks(self._embed(patches_PX, taps), grids, places_P2, cos_SQ, sin_SQ)
        normed_PC, _ = self.post_layernorm.add_forward(update_PC, x_PC)
        return self.merger(self.downsample(normed_PC)), []

    def _embed(self, patches_PX: Tensor, taps: Sequence[Tensor]) -> Tensor:
        x_PC = self.patch_embed(patches_PX)
        if self.post_conv_layernorm is None or self.learned_grid is None:
            return x_PC
        return self.learned_grid(self.post_conv_layernorm(x_PC), *taps)  # type: ignore[no-any-return]


class _Embeddings(nn.Module):
    """The learned grid under its checkpoint's name."""

    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        self.position_embedding = ResampledTable(config.num_position_embeddings, config.hidden_size, bicubic,
                                                 context)


class Downsample(nn.Module):
    """The checkpoint's convolution, whose stride equals its kernel, as one matmul over the patches of a token, which
    follow each other row by row. The weight is laid out for it when it is loaded."""

    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        size, out, merge = config.hidden_size, config.out_hidden_size, config.spatial_merge_size
        self.weight = context.parameter(out, merge, merge, size)
        self.bias = context.parameter(out)
        self.weight_parts = {
            "weight": [WeightPart("downsample.weight", (out, size, merge, merge), axes=(0, 3, 1, 2))],
            "bias": [WeightPart("downsample.bias", (out,))]}

    def forward(self, x_PC: Tensor) -> Tensor:
        """(M, D)."""
        weight_DX = self.weight.flatten(1)
        return self.ops.linear(x_PC.reshape(-1, weight_DX.shape[1]), weight_DX, self.bias)


class GatedMerger(DecoderMLP):
    """A matmul, a norm and GELU in front of a gated MLP, all of the decoder's size."""

    def __init__(self, config: GatedVisionConfig, context: LayerContext):
        size, width = config.out_hidden_size, config.merger_intermediate_size
        divides = width % context.tp.size == 0
        super().__init__(size, MLPConfig(intermediate_size=width), context if divides else on_every_rank(context))
        # The norm needs all of it, so each rank computes it whole.
        self.proj = ColumnParallelLinear(size, [OutputPart("proj", size, 0, size)], bias=False, context=context)
        self.post_projection_norm = LayerNorm(size, _LAYER_NORM_EPS, context)

    def forward(self, x_MD: Tensor) -> Tensor:
        return super().forward(self.quantised.ops.gelu(self.post_projection_norm(self.proj(x_MD)), "none"))


def _merger(config: VisionConfig, context: LayerContext) -> GatedMerger:
    assert isinstance(config, GatedVisionConfig), "such a tower's config is one of gated MLPs"
    return GatedMerger(config, context)


def _block(config: VisionConfig, context: LayerContext) -> TowerBlock:
    assert isinstance(config, GatedVisionConfig), "such a tower's config is one of gated MLPs"
    attends = HeadNormVisionAttention if config.has_head_norms else VisionAttention
    attention = attends(config, context, qkv_bias=config.qkv_bias, proj_bias=config.bias)
    mlp = DecoderMLP(config.hidden_size, MLPConfig(intermediate_size=config.intermediate_size, bias=config.bias),
                     context)
    return TowerBlock(config, lambda size: RMSNorm(size, config.norm_eps, context), mlp, context, attention)
