"""The Qwen3-VL vision tower: patches in, embeddings for the decoder and its deepstack levels out. Knows no text.

P patches of all images, M = P / merge^2 image tokens, X values of a patch (row, column, channel), C hidden size,
N heads, H head dim, Q = H / 4 frequencies of an axis, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.parts import PatchMerger, layer_norm, plain_block, tower_context
from npu_runner.models.vision.resampled_table import ResampledTable, bilinear_corners
from npu_runner.models.vision.tower import Tower

_LINEARS = ("linear_fc1", "linear_fc2")


class VisionTower(Tower):
    def __init__(self, config: VisionConfig, context: LayerContext):
        context = tower_context(config, context)
        super().__init__(config, context, patch_bias=True, block=partial(plain_block, linears=_LINEARS),
                         merger=lambda config, context: PatchMerger(config, layer_norm(context), _LINEARS, context))
        self.pos_embed = ResampledTable(config.num_position_embeddings, config.hidden_size, bilinear_corners, context)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, layer_norm(context), _LINEARS, context, norm_after_merge=True)
            for _ in config.deepstack_layers)

    @property
    def learned_grid(self) -> ResampledTable:
        return self.pos_embed

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]],
                places: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D) and one (M, D) per deepstack level.

        `patches_PX` holds the images one after the other, each in merge-block order; `grids` their (height, width)
        in patches; `places` what `places` makes of these.
        """
        places_P2, taps_1P4, weights_1P4, cos_SQ, sin_SQ = places
        x_PC = self.pos_embed(self.patch_embed(patches_PX), taps_1P4, weights_1P4)
        cos_PH, sin_PH = self.rotation(places_P2, cos_SQ, sin_SQ)
        plan = self.whole_images(grids, x_PC.device)
        levels: dict[int, Tensor] = {}
        update_PC: Tensor | None = None
        for index, block in enumerate(self.blocks):
            x_PC, update_PC = block(x_PC, update_PC, cos_PH, sin_PH, plan)
            if index in self.config.deepstack_layers:
                level = self.config.deepstack_layers.index(index)
                x_PC, update_PC = x_PC + update_PC, None
                levels[level] = self.deepstack_merger_list[level](x_PC)
        if update_PC is not None:
            x_PC = x_PC + update_PC
        return self.merger(x_PC), [levels[level] for level in range(len(levels))]
