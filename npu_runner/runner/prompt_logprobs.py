"""Log probabilities of the prompts of one prefill step: what they take of its hidden states, and the way to the host.

Knows nothing of requests; what a record is stands in sampling/prompt_scores.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from npu_runner.core.batch import ScheduledBatch
from npu_runner.platforms.transfers import Download
from npu_runner.sampling.prompt_scores import MAX_ROWS, score_tokens

# T tokens in the step, L of them scored in a row


@dataclass(frozen=True)
class PromptScores:
    """A step's, one download for each row that wants any."""

    batch: ScheduledBatch
    downloads: list[Download]

    def is_done(self) -> bool:
        return all(download.is_done() for download in self.downloads)

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_scores; waits for the step."""
        return [(score.row, score.place, download.wait())
                for score, download in zip(self.batch.prompt_scores, self.downloads, strict=True)]


def score_prompts(batch: ScheduledBatch, hidden_TD: Tensor, targets: Tensor, *, keeps: bool, max_num_seqs: int,
                  read_out: Callable[[Tensor], Tensor], download: Callable[[Tensor], Download]) -> PromptScores | None:
    """Hand out the scores of a step; None where this rank does not keep them.

    At most as many logits at a time as a decode step may have, so that they take no memory that was not profiled.
    """
    downloads, first = [], 0
    for score in batch.prompt_scores:
        count = len(score.targets)
        records = score_tokens(
            hidden_TD[score.first_token : score.first_token + count], targets[first : first + count], score.num_top,
            read_out=read_out, max_rows=min(MAX_ROWS, max_num_seqs), keeps=keeps)
        first += count
        if records is not None:
            downloads.append(download(records))
    return PromptScores(batch, downloads) if keeps else None
