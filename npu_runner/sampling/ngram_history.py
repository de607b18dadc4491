"""The last generated tokens of slots whose answers may not repeat an n-gram, on the device; no step waits for the host.

A row is shifted left by one with each token: the newest stands in the last column. Beside each token stands its run: so
many tokens up to it equal as many at the row's end. A new token changes all runs in one pass, whatever the size of the
n-grams. A token that is exempt is kept as another number, which is below zero, so that it counts and is not banned.

Both tables, 4 bytes an entry, are made when a sequence that asks for it joins. They are as wide as the widest window
that was asked for. Knows of logits only where to add.

Shapes: S slots, C columns, F rows that are followed, G of these that may repeat something, R newcomers, N tokens that
they bring, E exempt ids; a 1 is a kept dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.request.limits import LIMITS
from npu_runner.request.sampling_params import SamplingParams

_EMPTY = -1  # equals no token
_LEAST_COLUMNS = 64
_Ids = TypeVar("_Ids", np.ndarray, Tensor)


@dataclass(frozen=True)
class NgramRule:
    """One sequence's: no token may complete `size` tokens that stand among its last `window` tokens already."""

    size: int
    window: int
    exempt_ids: tuple[int, ...]


def ngram_rule(params: SamplingParams, max_model_len: int) -> NgramRule | None:
    """None where `params` ask for none, or no answer is long enough to break it."""
    size = params.no_repeat_ngram_size
    window = min(params.no_repeat_ngram_window or LIMITS.max_ngram_window, max_model_len)
    return NgramRule(size, window, tuple(params.no_repeat_ngram_exempt_ids)) if 0 < size <= window else None


@dataclass(frozen=True)
class NgramBans:
    """The n-gram rules of a step's G rows, on the device, int32."""

    run_G1: Tensor
    """Length of a repeated run after which the next token would complete an n-gram: n - 1."""
    back_G1: Tensor
    """Number of last columns in which such a run may end."""


def bans_of(rules: Sequence[NgramRule]) -> list[np.ndarray]:
    """The fields of `NgramBans`, for these rows."""
    return [np.array([[rule.size - 1] for rule in rules], dtype=np.int32),
            np.array([[rule.window - rule.size + 2] for rule in rules], dtype=np.int32)]


def exempt_ids_of(rules: Sequence[NgramRule]) -> np.ndarray:
    """int32 (F, E): of these rows, filled up with what is no token."""
    ids_FE = np.full((len(rules), max(len(rule.exempt_ids) for rule in rules)), _EMPTY, dtype=np.int32)
    for row, rule in enumerate(rules):
        ids_FE[row, : len(rule.exempt_ids)] = rule.exempt_ids
    return ids_FE


class NgramHistory:
    """Tokens and runs by slot, kept up by the sampled tokens themselves."""

    def __init__(self, max_num_seqs: int, device: torch.device):
        self._num_columns = 0
        """Columns of the tables; 0 before `install`."""
        self._tokens_SC = torch.zeros((max_num_seqs, 0), dtype=torch.int32, device=device)
        self._runs_SC = self._tokens_SC
        self._columns_1C = self._tokens_SC[:1]
        self._joining: tuple[int, ...] = ()  # slots of the newcomers that `stage` prepared

    def stage(self, newcomers: Mapping[int, tuple[NgramRule, Sequence[int]]]) -> list[np.ndarray]:
        """Arrays of int32 for `install`. newcomers: by slot, with the output so far."""
        self._joining = tuple(newcomers)
        if not newcomers:
            return []
        widest = max(rule.window for rule, _ in newcomers.values())
        self._num_columns = max(self._num_columns, _LEAST_COLUMNS, 1 << (widest - 1).bit_length())
        places, tokens, runs = [], [], []
        for slot, (rule, output) in newcomers.items():
            known = np.asarray(output[-rule.window :], dtype=np.int32)
            end = (slot + 1) * self._num_columns
            places.append(np.arange(end - len(known), end, dtype=np.int32))
            tokens.append(np.where(np.isin(known, rule.exempt_ids), _exempt(known), known))
            runs.append(np.array(_runs(known.tolist()), dtype=np.int32))
        return [np.concatenate(parts).astype(np.int32) for parts in (places, tokens, runs)]

    def install(self, staged: Sequence[Tensor]) -> None:
        """Take over what `stage` prepared, now on the device."""
        if not staged:
            return
        places_N, tokens_N, runs_N = staged
        missing = self._num_columns - self._tokens_SC.shape[1]
        if missing:
            columns_1C = torch.arange(self._num_columns, dtype=torch.int32, device=places_N.device)[None]
            tables = F.pad(self._tokens_SC, (missing, 0), value=_EMPTY), F.pad(self._runs_SC, (missing, 0))
            (self._tokens_SC, self._runs_SC), self._columns_1C = tables, columns_1C
        for slot in self._joining:  # index_fill_ would copy whole tables on Ascend
            self._tokens_SC[slot].fill_(_EMPTY)
            self._runs_SC[slot].zero_()
        if len(places_N):
            self._tokens_SC.view(-1).index_copy_(0, places_N.long(), tokens_N)
            self._runs_SC.view(-1).index_copy_(0, places_N.long(), runs_N)

    def ban(self, logits_GV: Tensor, slots_G: Tensor, bans: NgramBans) -> Tensor:
        """`logits_GV`, float32, changed in place: -inf for each token that would complete an n-gram once more."""
        tokens_GC, runs_GC = self._tokens_SC.index_select(0, slots_G), self._runs_SC.index_select(0, slots_G)
        is_long_GC = (runs_GC >= bans.run_G1) & (self._columns_1C >= self._num_columns - bans.back_G1)
        # Behind the run in the last column, which is the row's end itself, nothing stands.
        completing_GC = tokens_GC[:, 1:]
        is_banned_GC = is_long_GC[:, :-1] & (completing_GC >= 0)
        added_GC = torch.zeros_like(completing_GC, dtype=torch.float32).masked_fill_(is_banned_GC, -torch.inf)
        return logits_GV.scatter_add_(1, completing_GC.clamp(min=0).long(), added_GC)

    def prepare_advance(self, slots_F: Tensor, tokens_F: Tensor, exempt_FE: Tensor) -> Callable[[], None]:
        """A function that appends one generated token per row. Its memory is allocated now."""
        slots_F = slots_F.long()
        newest_F1 = tokens_F.to(torch.int32)[:, None]
        if exempt_FE.shape[1]:
            is_exempt_F1 = (exempt_FE == newest_F1).sum(-1, keepdim=True) > 0
            newest_F1 = torch.where(is_exempt_F1, _exempt(newest_F1), newest_F1)
        tokens_FC = torch.cat([self._tokens_SC.index_select(0, slots_F)[:, 1:], newest_F1], dim=1)
        # A run is now in the column of the token behind those that it counts.
        runs_FC = (self._runs_SC.index_select(0, slots_F) + 1) * (tokens_FC == newest_F1)

        def record() -> None:
            self._tokens_SC.index_copy_(0, slots_F, tokens_FC)
            self._runs_SC.index_copy_(0, slots_F, runs_FC)

        return record


def _exempt(tokens: _Ids) -> _Ids:
    """The numbers that stand for exempt tokens in the table."""
    return _EMPTY - 1 - tokens


def _runs(tokens: list[int]) -> list[int]:
    """For each token, the length of the run up to it that equals the end: the Z function (Gusfield 1997), reversed."""
    back = tokens[::-1]
    found = [0] * len(back)
    left = right = 0  # back[left:right] equals the beginning
    for place in range(1, len(back)):
        length = min(right - place, found[place - left]) if place < right else 0
        while place + length < len(back) and back[length] == back[place + length]:
            length += 1
        found[place] = length
        if place + length > right:
            left, right = place, place + length
    return found[::-1]
