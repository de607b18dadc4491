"""Masks of allowed tokens, bits on the host and floats on the device: one copy, and a look-up for each byte.

Bits are not shifted and masked apart on the device: not every one of them does that with all of its speed.

Shapes: C rows with a mask, W 32-bit words of a mask, V vocabulary.
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
        self._vocab_size = vocab_size
        self._device = device
        self._host_buffer = host_buffer
        self._bits_of_byte: Tensor | None = None

    def to_device(self, num_rows: int, write: Callable[[np.ndarray], None]) -> Tensor:
        """float32 (C, V): 0 where a token may come, -inf elsewhere. `write` fills int32 (C, W), lowest bit first."""
        host = self._host_buffer(num_rows * self.num_words)
        write(host.numpy().reshape(num_rows, self.num_words))
        bytes_ = host.view(torch.uint8).to(self._device, non_blocking=True)
        masks = self._table().index_select(0, bytes_.to(torch.int32))
        return masks.view(num_rows, 32 * self.num_words)[:, : self._vocab_size]

    def _table(self) -> Tensor:
        """float32 (256, 8): what the bits of each byte stand for."""
        if self._bits_of_byte is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            table = np.where(bits == 1, np.float32(0.0), np.float32(-np.inf))
            self._bits_of_byte = torch.from_numpy(table).to(self._device)
        return self._bits_of_byte
