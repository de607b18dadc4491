"""Log probabilities and hidden states of a step's tokens: what they take of its hidden states, and the way to the host.

Knows nothing of requests. The values are log probabilities or, with `as_logits`, logits. Hidden states are sent as they
are, in the model's dtype, and become float32 on the host: exact, and the device takes no memory for them beside the
step's own. So a prompt of any length takes what a step takes.

T tokens in the step, L of them in a row or a chunk, R rows of a slice, V vocabulary, K most probable tokens beside the
given one, D numbers of a token: the hidden size, or that of each of several layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from npu_runner.core.batch import PromptScore, PromptStates, ScheduledBatch
from npu_runner.platforms.transfers import Download
from npu_runner.request.sampling_params import WHOLE_VOCABULARY, num_top_logprobs
from npu_runner.sampling.sampler import most_probable_first, whole_rows

MAX_ROWS = 64
_Kind: TypeAlias = tuple[int, bool]
"""The number of most probable tokens, and whether a label is scored."""


def _kind(score: PromptScore) -> _Kind:
    return score.num_top, score.is_label


@dataclass(frozen=True)
class PromptScores:
    """A step's, one download for all rows that want as many most probable tokens, or several where these are all."""

    batch: ScheduledBatch
    downloads: dict[_Kind, list[Download]]

    def is_done(self) -> bool:
        return all(download.is_done() for parts in self.downloads.values() for download in parts)

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_scores; waits for the step."""
        waited = {kind: [part.wait() for part in parts] for kind, parts in self.downloads.items()}
        records = {kind: parts[0] if len(parts) == 1 else np.concatenate(parts) for kind, parts in waited.items()}
        found, firsts = [], dict.fromkeys(records, 0)
        for score in self.batch.prompt_scores:
            kind = _kind(score)
            first = firsts[kind]
            end = firsts[kind] = first + len(score.targets)
            found.append((score.row, score.place, records[kind][first:end]))
        return found


def score_prompts(batch: ScheduledBatch, hidden_TD: Tensor, tokens: Tensor, targets: Tensor, *, keeps: bool,
                  max_num_seqs: int, read_out: Callable[[Tensor], Tensor],
                  download: Callable[[Tensor], Download], as_logits: bool) -> PromptScores | None:
    """Hand out the scores of a step; None where this rank does not keep them. `tokens`, `targets`: PromptScore's of all
    rows, in order of the batch.

    At most as many logits at a time as a decode step may have, so that they take no memory that was not profiled.
    Those of the whole vocabulary go to the host slice by slice.
    """
    parts: dict[_Kind, list[slice]] = {}
    first = 0
    for score in batch.prompt_scores:
        parts.setdefault(_kind(score), []).append(slice(first, first := first + len(score.targets)))
    downloads = {}
    for (num_top, is_label), slices in parts.items():
        tokens_L, targets_L = (torch.cat([x[part] for part in slices]) if len(parts) > 1 else x
                               for x in (tokens, targets))
        most_rows = whole_rows(max_num_seqs) if num_top == WHOLE_VOCABULARY else max_num_seqs
        records = _score_slices(hidden_TD, tokens_L, targets_L, num_top, read_out=read_out, keeps=keeps,
                                max_rows=min(MAX_ROWS, most_rows), as_logits=as_logits and not is_label)
        if num_top == WHOLE_VOCABULARY:
            downloads[num_top, is_label] = [download(each) for each in records]
        elif together := list(records):
            downloads[num_top, is_label] = [download(torch.cat(together))]
    return PromptScores(batch, downloads) if keeps else None


def _score_slices(hidden_TD: Tensor, tokens_L: Tensor, targets_L: Tensor, num_top: int, *,
                  read_out: Callable[[Tensor], Tensor], max_rows: int, keeps: bool,
                  as_logits: bool) -> Iterator[Tensor]:
    """int32 (R, 2 + 2 * K) of each slice: each target's value behind its token as bits, its rank (1: most probable),
    the K most probable ids, best first, the bits of their values.

    `read_out` makes logits (R, V) of hidden states, of at most `max_rows` rows: (L, V) is never there. Where it is a
    collective all ranks come here; without `keeps` nothing else is done, and nothing comes back.
    """
    for tokens_R, targets_R in zip(tokens_L.split(max_rows), targets_L.split(max_rows), strict=True):
        logits_RV = read_out(hidden_TD.index_select(0, tokens_R))
        if keeps:
            yield _records(logits_RV.float(), targets_R[:, None].long(),
                           num_top_logprobs(num_top, logits_RV.shape[-1]), as_logits)


def _records(logits_RV: Tensor, targets_R1: Tensor, num_top: int, as_logits: bool) -> Tensor:
    """In float32: the model's own distribution, or its logits."""
    log_total_R1 = torch.zeros_like(logits_RV[:, :1]) if as_logits else logits_RV.logsumexp(-1, keepdim=True)
    given_R1 = logits_RV.gather(-1, targets_R1)
    rank_R1 = (logits_RV > given_R1).to(torch.int32).sum(-1, keepdim=True, dtype=torch.int32) + 1
    parts = [(given_R1 - log_total_R1).view(torch.int32), rank_R1]
    if num_top:
        top_RK, top_ids = most_probable_first(logits_RV, num_top)
        parts += [top_ids.to(torch.int32), (top_RK - log_total_R1).contiguous().view(torch.int32)]
    return torch.cat(parts, dim=1)


@dataclass(frozen=True)
class TokenStates:
    """One download for each run of chunks that lie side by side: bits of the states, int16 or int32 (L, D), of values
    of `dtype`."""

    runs: Sequence[Sequence[PromptStates]]
    downloads: Sequence[Download]
    dtype: torch.dtype

    def is_done(self) -> bool:
        return all(download.is_done() for download in self.downloads)

    def to_host(self) -> list[tuple[int, int, np.ndarray]]:
        """See ModelRunnerOutput.prompt_states; waits for the step."""
        found = []
        for run, download in zip(self.runs, self.downloads, strict=True):
            states_LD = as_float32(download.wait(), self.dtype)
            for chunk in run:
                first = chunk.first_token - run[0].first_token
                found.append((chunk.row, chunk.place, states_LD[first : first + chunk.num_tokens]))
        return found


def send_states(chunks: Sequence[PromptStates], hidden_TD: Tensor,
                download: Callable[[Tensor], Download]) -> TokenStates:
    """Hand out the copies of the states that `chunks` name, which are in the order of their tokens."""
    # Numpy has no bfloat16: values cross as integers of their size.
    bits_TD = hidden_TD.view(torch.int32 if hidden_TD.itemsize == 4 else torch.int16)
    runs: list[list[PromptStates]] = []
    for chunk in chunks:
        if runs and runs[-1][-1].first_token + runs[-1][-1].num_tokens == chunk.first_token:
            runs[-1].append(chunk)
        else:
            runs.append([chunk])
    downloads = [download(bits_TD[run[0].first_token : run[-1].first_token + run[-1].num_tokens].contiguous())
                 for run in runs]
    return TokenStates(runs, downloads, hidden_TD.dtype)


def as_float32(bits_LD: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """The values of bits, float32 (L, D), a copy. `dtype`: float32, float16 or bfloat16; each value of the latter two
    is one of float32."""
    if dtype == torch.bfloat16:  # the upper half of a float32
        return (bits_LD.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return bits_LD.view(np.float32 if dtype == torch.float32 else np.float16).astype(np.float32)
