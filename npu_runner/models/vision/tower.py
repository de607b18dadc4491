"""What vision towers have in common as a whole: patches embedded, blocks, a merger. Knows no family and no text.

P patches of all images, H head dim, Q = H / 4 frequencies of an axis.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import VisionConfig
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.vision.parts import PatchEmbed, TowerBlock, both_halves, tower_context, turns


class Tower(nn.Module):
    """A family derives its own, with `forward` and `places`. `context` becomes the one that the tower is built with."""

    def __init__(self, config: VisionConfig, context: LayerContext, *, patch_bias: bool,
                 block: Callable[[VisionConfig, LayerContext], TowerBlock],
                 merger: Callable[[VisionConfig, LayerContext], nn.Module]):
        super().__init__()
        context = tower_context(config, context)
        self.config = config
        self.attention = context.attention
        self.patch_embed = PatchEmbed(config, context, bias=patch_bias)
        self.blocks = nn.ModuleList(block(config, context) for _ in range(config.depth))
        self.merger = merger(config, context)

    def rotation(self, places_P2: Tensor, cos_SQ: Tensor, sin_SQ: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin (P, H) of patches at these rows and columns. Half of the H / 2 frequencies turn with the row,
        half with the column, Q each."""
        cos_PH, sin_PH = (both_halves(F.embedding(places_P2, table).flatten(1), self.config, self.attention)
                          for table in (cos_SQ, sin_SQ))
        return cos_PH, sin_PH

    def turns(self, grids: Sequence[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin (side, Q), up to the longest side of `grids`."""
        config = self.config
        return turns(max(map(max, grids)), config.hidden_size // config.num_heads // 2, config.rope_theta)

    def whole_images(self, grids: Sequence[tuple[int, int]], device: torch.device) -> Any:
        """The plan of attention in which patches see all of their image."""
        return self.attention.plan_vision([height * width for height, width in grids], device)
