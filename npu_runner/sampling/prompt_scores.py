"""Log probabilities of given tokens, a bounded number of rows at a time. Knows nothing of prompts, chunks or steps.

L rows in all, R rows of a slice, V vocabulary, K most probable tokens beside the given one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MAX_ROWS = 64


def score_tokens(hidden_LD: Tensor, targets_L: Tensor, num_top: int, *, read_out: Callable[[Tensor], Tensor],
                 max_rows: int, keeps: bool = True) -> Tensor | None:
    """int32 (L, 2 + 2 * K): each target's log probability as bits, its rank (1: most probable), the K most probable
    ids, best first, the bits of their log probabilities.

    `read_out` makes logits (R, V) of hidden states, of at most `max_rows` rows: (L, V) is never there. Where it is a
    collective all ranks come here; without `keeps` nothing else is done, and None comes back.
    """
    records = []
    for hidden_RD, targets_R in zip(hidden_LD.split(max_rows), targets_L.split(max_rows), strict=True):
        logits_RV = read_out(hidden_RD)
        if keeps:
            records.append(_records(logits_RV.float(), targets_R[:, None].long(), num_top))
    return torch.cat(records) if keeps else None


def _records(logits_RV: Tensor, targets_R1: Tensor, num_top: int) -> Tensor:
    """In float32: the model's own distribution."""
    log_total_R1 = logits_RV.logsumexp(-1, keepdim=True)
    given_R1 = logits_RV.gather(-1, targets_R1)
    rank_R1 = (logits_RV > given_R1).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32) + 1
    parts = [(given_R1 - log_total_R1).view(torch.int32), rank_R1]
    if num_top:
        top_RK, top_ids = logits_RV.topk(min(num_top, logits_RV.shape[-1]), dim=-1)
        parts += [top_ids.to(torch.int32), (top_RK - log_total_R1).contiguous().view(torch.int32)]
    return torch.cat(parts, dim=1)
