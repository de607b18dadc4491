"""What one token of each sequence sees of its blocks through a sliding window. Knows tables and lengths, no kernels.

The attention kernel has no window for queries of one token (its documents: pre_tokens and sparse_mode have no effect
then). So it is given a table that begins with the window's first block, lengths that count from there, and a mask of
what that block still has before the window. A step reads the window and less than a block more.

B sequences, W blocks per sequence, V blocks that a window may touch, S block size, L = V * S.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class SeenBlocks(NamedTuple):
    """block_tables_BV: int32. lens_B: int32, tokens from the first of these blocks on. is_before_B11L: bool, hidden."""

    block_tables_BV: Tensor
    lens_B: Tensor
    is_before_B11L: Tensor


# Captured graphs take a length of 1 for a constant: more is left of each context that has more.
_LEAST_LEFT = 2


def seen_lens(context_lens_B: Sequence[int], window: int, block_size: int) -> list[int]:
    """Tokens of each context from the window's first block on; 1 for a context of 1 alone."""
    window = max(window, _LEAST_LEFT)
    return [length - max(0, length - window) // block_size * block_size for length in context_lens_B]


class WindowDecode:
    """Makes SeenBlocks on the device, from tensors of a step alone, so that graphs can hold it; once for all layers."""

    def __init__(self, window: int, block_size: int, device: torch.device):
        self.window = window
        self.block_size = block_size
        self.least_left = max(window, _LEAST_LEFT)
        most_blocks = -(-(self.least_left - 1) // block_size) + 1
        self.blocks_V = torch.arange(most_blocks, dtype=torch.int32).to(device)
        self.places_L = torch.arange(most_blocks * block_size, dtype=torch.int32).to(device)

    def seen_blocks(self, context_lens_B: Tensor, block_tables_BW: Tensor) -> SeenBlocks:
        first_B = (context_lens_B - self.least_left).clamp(min=0) // self.block_size
        skipped_B = first_B * self.block_size
        # Behind a row's last block the table's last column stands again: nobody reads beyond a length.
        columns_BV = (first_B[:, None] + self.blocks_V).clamp(max=block_tables_BW.shape[1] - 1)
        is_before_BL = self.places_L < (context_lens_B - skipped_B - self.window)[:, None]
        return SeenBlocks(block_tables_BW.gather(1, columns_BV.long()), context_lens_B - skipped_B,
                          is_before_BL[:, None, None])
