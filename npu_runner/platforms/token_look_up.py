"""Masks of tokens, bits in words, laid over logits in plain torch. Knows no vendor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


class TokenLookUp:
    """`Ops.allow_tokens` by a look-up for each byte. Bits are not shifted and masked separately: each would be a pass
    over all tokens, slow on some devices."""

    def __init__(self) -> None:
        self._masks_of_bytes: Tensor | None = None
        """float32 (256, 8): what is added for the bits of each byte, 0 or -inf."""

    def __call__(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        num_rows, num_words = words_CW.shape
        if self._masks_of_bytes is None:
            bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            masks = torch.from_numpy(np.where(bits == 1, np.float32(0.0), np.float32(-np.inf)))
            self._masks_of_bytes = masks.to(words_CW.device)
        bytes_ = words_CW.view(torch.uint8).view(-1).to(torch.int32)
        masks_CV = self._masks_of_bytes.index_select(0, bytes_).view(num_rows, 32 * num_words)
        taken_CV = logits_BV if rows_C is None else logits_BV.index_select(0, rows_C)
        return taken_CV + masks_CV[:, : logits_BV.shape[1]]
