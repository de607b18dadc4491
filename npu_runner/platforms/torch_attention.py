"""Attention of the vision tower through torch's scaled_dot_product_attention. Knows no vendor and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor


def segment_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Full attention within each of consecutive segments, (T, N, H); neighbours of one length run as one batch."""
    outputs = []
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        rows = slice(start, start + count * length)
        q, k, v = (x[rows].unflatten(0, (count, length)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH))
        outputs.append(F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1))
        start = rows.stop
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]
