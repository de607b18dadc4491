"""The Qwen2-VL vision tower: layer norms, and blocks that all attend within whole images. Knows no text.

Source: the Qwen2-VL report, section 2.1 (arXiv 2409.12191).

P patches of all images, M = P / merge^2 image tokens, X values of a patch, H head dim, Q = H / 4 frequencies of an
axis, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.parts import QueryMerger, layer_norm, plain_block
from npu_runner.models.vision.tower import Tower


class PlainVisionTower(Tower):
    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__(config, context, patch_bias=False, block=partial(plain_block, linears=("fc1", "fc2")),
                         merger=lambda config, context: QueryMerger(config, layer_norm(context), context))

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]],
                places: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D), and no deepstack level. Arguments as in the other towers."""
        return self.merger(*self.through_blocks(self.patch_embed(patches_PX), grids, *places)), []
