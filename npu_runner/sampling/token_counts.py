"""How often each slot has generated each token, for penalties: slots x vocabulary, 4 bytes each, on the device.

Allocated when a sequence with a penalty joins. Knows no parameters.

Shapes: S slots, B rows, V vocabulary, R newcomers with penalties, N distinct tokens of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

_IN_PROMPT = 0.5  # added once where the prompt holds the token, to the count of how often it was generated


class TokenCounts:
    """Counts by slot and token, kept on the device by the sampled tokens themselves."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        assert max_num_seqs * vocab_size < 2**31, "flat indices are int32"
        self._shape, self._device = (max_num_seqs, vocab_size), device
        self._counts_SV: Tensor | None = None

    def stage(self, histories: Mapping[int, tuple[Sequence[int], Sequence[int]]]) -> list[np.ndarray]:
        """Arrays of 4-byte values for `install`. histories: newcomers that have penalties, (prompt, output so far)."""
        if not histories:
            return []
        indices, amounts = [], []
        for slot, (prompt, output) in histories.items():
            in_prompt = np.unique(np.asarray(prompt, dtype=np.int32))
            generated, times = np.unique(np.asarray(output, dtype=np.int32), return_counts=True)
            indices += [slot * self._shape[1] + in_prompt, slot * self._shape[1] + generated]
            amounts += [np.full(len(in_prompt), _IN_PROMPT), times]
        return [np.array(list(histories), dtype=np.int32), np.concatenate(indices).astype(np.int32),
                np.concatenate(amounts).astype(np.float32)]

    def install(self, staged: Sequence[Tensor]) -> None:
        """Take over what `stage` prepared, now on the device."""
        if not staged:
            return
        slots_R, indices_N, amounts_N = staged
        if self._counts_SV is None:
            self._counts_SV = torch.zeros(self._shape, dtype=torch.float32, device=self._device)
        self._counts_SV.index_fill_(0, slots_R.long(), 0.0)
        self._counts_SV.view(-1).scatter_add_(0, indices_N.long(), amounts_N)

    def rows(self, slots_B: Tensor) -> Tensor:
        """(B, V) float32: 0 for a token neither in prompt nor output; rounded down, how often it was generated."""
        assert self._counts_SV is not None, "no sequence with a penalty has joined"
        return self._counts_SV.index_select(0, slots_B)

    def prepare_advance(self, slots_B: Tensor, tokens_B: Tensor) -> Callable[[], object]:
        """What counts one more generated token per row, its memory taken already."""
        assert self._counts_SV is not None, "no sequence with a penalty has joined"
        indices_B = slots_B * self._shape[1] + tokens_B
        ones_B = torch.ones_like(indices_B, dtype=torch.float32)
        return partial(self._counts_SV.view(-1).scatter_add_, 0, indices_B, ones_B)
