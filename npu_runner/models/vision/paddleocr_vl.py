"""The PaddleOCR-VL vision tower: SigLIP's blocks with a resampled table and axial rotation, over patches of any number.
Knows no text.

Source: the PaddleOCR-VL report, section 2.1 (arXiv 2510.14528); the tower is NaViT's kind (arXiv 2307.06304).
transformers runs the patches row after row. Attention over a whole image does not see their order, so here they are in
merge-block order, and merging is a reshape.

P patches of all images, M = P / merge^2 image tokens, X values of a patch, H head dim, Q = H / 4 frequencies of an
axis, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.parts import PatchMerger, TowerBlock, layer_norm, plain_block, tower_context
from npu_runner.models.vision.resampled_table import ResampledTable, bilinear
from npu_runner.models.vision.tower import Tower

_PROJECTOR_EPS = 1e-5


class SiglipTower(Tower):
    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__(config, context, patch_bias=True, block=_block, merger=_projector)
        context = tower_context(config, context)
        self.position_embedding = ResampledTable(config.num_position_embeddings, config.hidden_size, bilinear, context)
        self.post_layernorm = layer_norm(context, config.norm_eps)(config.hidden_size)

    @property
    def learned_grid(self) -> ResampledTable:
        return self.position_embedding

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]],
                places: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D), and no deepstack level. Arguments as in the other towers."""
        places_P2, *taps, cos_SQ, sin_SQ = places
        x_PC, update_PC = self.through_blocks(self.position_embedding(self.patch_embed(patches_PX), *taps), grids,
                                              places_P2, cos_SQ, sin_SQ)
        return self.merger(self.post_layernorm.add_forward(update_PC, x_PC)[0]), []


def _block(config: VisionConfig, context: LayerContext) -> TowerBlock:
    return plain_block(config, context, ("fc1", "fc2"), eps=config.norm_eps, qkv_names=("q_proj", "k_proj", "v_proj"))


def _projector(config: VisionConfig, context: LayerContext) -> PatchMerger:
    return PatchMerger(config, layer_norm(context, _PROJECTOR_EPS), ("linear_1", "linear_2"), context)
