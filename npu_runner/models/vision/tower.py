"""The common structure of vision towers: patch embedding, blocks, a merger. Knows no family and no text.

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
from npu_runner.models.vision.parts import PatchEmbed, TowerBlock, block_order, both_halves, tower_context, turns
from npu_runner.models.vision.resampled_table import ResampledTable


class Tower(nn.Module):
    """A family derives its own, with `forward`; `places` are what that takes. `context` becomes the one that the tower
    is built with."""

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

    @property
    def learned_grid(self) -> ResampledTable | None:
        """The table that is added to embedded patches."""
        return None

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

    def places(self, grids: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Patches' rows and columns (P, 2); places and weights in the learned grid, where there is one; cos, sin (side,
        Q). int32 and float32."""
        merge = self.config.spatial_merge_size
        places_P2 = np.concatenate([block_order(*grid, merge) for grid in grids])
        taps = [] if self.learned_grid is None else self.learned_grid.places(grids, merge)
        return [places_P2, *taps, *self.turns(grids)]

    def through_blocks(self, x_PC: Tensor, grids: Sequence[tuple[int, int]], places_P2: Tensor, cos_SQ: Tensor,
                       sin_SQ: Tensor) -> tuple[Tensor, Tensor]:
        """Run all blocks with attention within whole images. Returns x and update of the last one. Callers keep no
        reference to `x_PC`, which would hold its memory."""
        cos_PH, sin_PH = self.rotation(places_P2, cos_SQ, sin_SQ)
        plan, update_PC = self.whole_images(grids, x_PC.device), None
        for block in self.blocks:
            x_PC, update_PC = block(x_PC, update_PC, cos_PH, sin_PH, plan)
        assert update_PC is not None, "a tower has blocks"
        return x_PC, update_PC

    def whole_images(self, grids: Sequence[tuple[int, int]], device: torch.device) -> Any:
        """The plan of attention in which patches see all of their image."""
        return self.attention.plan_vision([height * width for height, width in grids], device)
