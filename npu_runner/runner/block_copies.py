"""Copies blocks of the KV cache, of all layers at once. Knows numbers of blocks; nothing of what they contain.

Scales of an FP8 cache belong to layers, so a block's bytes are all of it.

L layers, NB blocks, N copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.devices import Memory
from npu_runner.request.limits import MIB
from npu_runner.runner.step_arrays import to_device

# Copied values lie beside the cache for a moment: far less than what the memory ledger leaves free.
_PIECE_BYTES = 32 * MIB


def copy_blocks(caches: Sequence[Tensor], memory: Memory, copies: Sequence[tuple[int, int]]) -> None:
    """Copy whole blocks of each of `caches`, (L, NB, ...): (source, target) each. No target is a source."""
    pairs_N2 = np.array(copies, dtype=np.int64)
    sent = to_device(memory, {"sources": pairs_N2[:, 0], "targets": pairs_N2[:, 1]}, caches[0].device)
    for cache in caches:
        # As integers: operators exist for every dtype's bits, and index_copy_ in bfloat16 sorts on Ascend.
        words = cache.flatten(2).view(torch.int32)
        num_at_once = max(1, _PIECE_BYTES // words[:, 0].nbytes)
        for sources, targets in zip(*(sent[name].split(num_at_once) for name in ("sources", "targets")), strict=True):
            words.index_copy_(1, targets, words.index_select(1, sources))
