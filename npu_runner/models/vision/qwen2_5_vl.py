"""The Qwen2.5-VL vision tower: most of its layers attend within windows of an image. Knows no text.

Source: the Qwen2.5-VL report, section 2.1.1 (arXiv 2502.13923).

P patches of all images, G = merge^2 patches of a token, M = P / G image tokens, X values of a patch, C hidden size,
H head dim, Q = H / 4 frequencies of an axis, D hidden size of the decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from npu_runner.checkpoint.model_config import MLPConfig, VisionConfig
from npu_runner.layers.norm import RMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.mixers.mlp import DecoderMLP
from npu_runner.models.vision.parts import MakeNorm, QueryMerger, TowerBlock, block_order, cached_by_size
from npu_runner.models.vision.tower import Tower


class WindowedVisionTower(Tower):
    """Tokens lie window after window while they go through the layers, and image after image again at the end.

    A window is then a range of rows, and an image a range of windows. So attention needs only the lengths of the
    ranges.
    """

    def __init__(self, config: VisionConfig, context: LayerContext):
        super().__init__(config, context, patch_bias=False, block=_block,
                         merger=lambda config, context: QueryMerger(config, _rms_norm(context), context))

    def forward(self, patches_PX: Tensor, grids: Sequence[tuple[int, int]],
                places: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Main embeddings (M, D), and no deepstack level.

        `patches_PX` holds the images one after the other, each in merge-block order; `grids` their (height, width)
        in patches; `places` what `places` makes of these.
        """
        config, group = self.config, self.config.spatial_merge_size**2
        places_P2, order_M, back_M, cos_SQ, sin_SQ = places
        x_PC = self.patch_embed(patches_PX)
        x_PC = F.embedding(order_M, x_PC.reshape(len(order_M), -1)).view(x_PC.shape)
        cos_PH, sin_PH = self.rotation(places_P2, cos_SQ, sin_SQ)
        whole = self.whole_images(grids, x_PC.device)
        lengths = [count * group for count in chain.from_iterable(self._windows(grid)[1] for grid in grids)]
        windows = self.attention.plan_vision(lengths, x_PC.device)
        update_PC: Tensor | None = None
        for index, block in enumerate(self.blocks):
            plan = whole if index in config.full_attention_layers else windows
            x_PC, update_PC = block(x_PC, update_PC, cos_PH, sin_PH, plan)
        return F.embedding(back_M, self.merger(x_PC, update_PC)), []

    def _windows(self, grid: tuple[int, int]) -> tuple[np.ndarray, list[int]]:
        config = self.config
        assert config.window_size is not None, "a tower of windows has a window_size"
        side = config.window_size // config.spatial_merge_size // config.patch_size
        return _window_order(grid[0] // config.spatial_merge_size, grid[1] // config.spatial_merge_size, side)

    def places(self, grids: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Patches' rows and columns (P, 2) in the order of windows, that order (M,) and the way back; cos, sin (side,
        Q). int32 and float32."""
        config = self.config
        places, orders, first = [], [], 0
        for grid in grids:
            order_M, _ = self._windows(grid)
            by_token = block_order(*grid, config.spatial_merge_size).reshape(len(order_M), -1)
            places.append(by_token[order_M].reshape(-1, 2))
            orders.append(order_M + first)
            first += len(order_M)
        order_M = np.concatenate(orders).astype(np.int32)
        return [np.concatenate(places), order_M, np.argsort(order_M).astype(np.int32), *self.turns(grids)]


def _block(config: VisionConfig, context: LayerContext) -> TowerBlock:
    mlp = MLPConfig(intermediate_size=config.intermediate_size, bias=True)
    return TowerBlock(config, _rms_norm(context), DecoderMLP(config.hidden_size, mlp, context), context)


def _rms_norm(context: LayerContext) -> MakeNorm:
    return lambda size: RMSNorm(size, 1e-6, context)


@cached_by_size
def _window_order(height: int, width: int, side: int) -> tuple[np.ndarray, list[int]]:
    """Tokens of a height x width image window by window (M,) and how many each has; the last ones are cut short."""
    places = np.arange(height * width, dtype=np.int32).reshape(height, width)
    windows = [places[row : row + side, column : column + side].ravel()
               for row in range(0, height, side) for column in range(0, width, side)]
    return np.concatenate(windows), [len(window) for window in windows]
