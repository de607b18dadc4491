"""Masks of allowed tokens on their way from the host to the device: bits, in one copy. Knows no logits and no grammars.

Shapes: C rows with a mask, W 32-bit words of a mask.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class TokenMasks:
    """host_buffer: the platform's, see Platform."""

    def __init__(self, vocab_size: int, device: torch.device, host_buffer: Callable[[int], Tensor]):
        self.num_words = -(-vocab_size // 32)
        self._device = device
        self._host_buffer = host_buffer

    def to_device(self, num_rows: int, write: Callable[[np.ndarray], None]) -> Tensor:
        """int32 (C, W) as `write` fills it, a bit per token, the lowest first."""
        host = self._host_buffer(num_rows * self.num_words).view(num_rows, self.num_words)
        write(host.numpy())
        return host.to(self._device, non_blocking=True)
