"""Log probabilities of the prompts of one prefill step: what they take of its hidden states, and the way to the host.

Knows nothing of requests.

T tokens in the step, L of them scored in a row, R rows of a slice, V vocabulary, K most probable tokens beside the
given one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.transfers import Download

MAX_ROWS = 64


@dataclass(frozen=True)
class PromptScores:
    """A step's, one download for all rows that want as many most probable tokens."""

    batch: ScheduledBatch
    downloads: dict[int, Download]
    """By the number of most probable tokens."""

    def is_done(self) -> bool:
        return all(download.is_done() for download in self.downloads.values())

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_scores; waits for the step."""
        records = {num_top: download.wait() for num_top, download in self.downloads.items()}
        found, firsts = [], dict.fromkeys(records, 0)
        for score in self.batch.prompt_scores:
            first = firsts[score.num_top]
            end = firsts[score.num_top] = first + len(score.targets)
            found.append((score.row, score.place, records[score.num_top][first:end]))
        return found


def score_prompts(batch: ScheduledBatch, hidden_TD: Tensor, tokens: Tensor, targets: Tensor, *, keeps: bool,
                  max_num_seqs: int, read_out: Callable[[Tensor], Tensor],
                  download: Callable[[Tensor], Download]) -> PromptScores | None:
    """Hand out the scores of a step; None where this rank does not keep them. `tokens`, `targets`: PromptScore's of all
    rows, in order of the batch.

    At most as many logits at a time as a decode step may have, so that they take no memory that was not profiled.
    """
    parts: dict[int, list[slice]] = {}
    first = 0
    for score in batch.prompt_scores:
        parts.setdefault(score.num_top, []).append(slice(first, first := first + len(score.targets)))
    downloads = {}
    for num_top, slices in parts.items():
        tokens_L, targets_L = (torch.cat([x[part] for part in slices]) if len(parts) > 1 else x
                               for x in (tokens, targets))
        records = score_tokens(hidden_TD, tokens_L, targets_L, num_top, read_out=read_out,
                               max_rows=min(MAX_ROWS, max_num_seqs), keeps=keeps)
        if records is not None:
            downloads[num_top] = download(records)
    return PromptScores(batch, downloads) if keeps else None


def score_tokens(hidden_TD: Tensor, tokens_L: Tensor, targets_L: Tensor, num_top: int, *,
                 read_out: Callable[[Tensor], Tensor], max_rows: int, keeps: bool = True) -> Tensor | None:
    """int32 (L, 2 + 2 * K): each target's log probability behind its token as bits, its rank (1: most probable), the K
    most probable ids, best first, the bits of their log probabilities.

    `read_out` makes logits (R, V) of hidden states, of at most `max_rows` rows: (L, V) is never there. Where it is a
    collective all ranks come here; without `keeps` nothing else is done, and None comes back.
    """
    records = []
    for tokens_R, targets_R in zip(tokens_L.split(max_rows), targets_L.split(max_rows), strict=True):
        logits_RV = read_out(hidden_TD.index_select(0, tokens_R))
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
