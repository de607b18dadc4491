"""Additions to single logits: logit_bias, the bans before min_tokens, and bad_words, all as one kind of rule.

What holds whatever was generated lies on the device, in one flat table to which a newcomer's rules are appended. Bans
that depend on the last tokens are looked up on the host and sent where they hold, which is seldom. The words of a
request form a tree, keyed by the tokens before their last one in reverse order. A look-up costs what agrees with the
end of the text, whatever the number of words. Nodes are made on first use. Knows nothing of how tokens are drawn.

Shapes: S slots, A rows whose logits are adjusted, V vocabulary, E rules on the device, N of them new, H bans that hold
because of the last tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from npu_runner.request.sampling_params import SamplingParams

_FEW_WORDS = 4  # so many bad words are compared one by one


@dataclass(frozen=True)
class LogitRules:
    """One sequence's rules. `values` are added to the logits of `tokens`. `bans` are tokens that are banned until
    `banned_until` tokens are generated. `bad_words` are those of two tokens and more."""

    tokens: np.ndarray
    values: np.ndarray
    bans: np.ndarray
    banned_until: int
    bad_words: BadWords | None

    @property
    def largest_token(self) -> int:
        words = self.bad_words.largest_token if self.bad_words else -1
        return max(int(self.tokens.max(initial=-1)), int(self.bans.max(initial=-1)), words)


def logit_rules(params: SamplingParams, eos_token_ids: Sequence[int]) -> LogitRules:
    """The rules that `params` asks for."""
    bad_words = [tuple(ids) for ids in params.bad_words_token_ids]
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    single = [word[0] for word in bad_words if len(word) == 1]
    longer = [word for word in bad_words if len(word) > 1]
    bias = params.logit_bias
    return LogitRules(
        tokens=np.array([*bias, *single], dtype=np.int32),
        values=np.array([*bias.values(), *[-np.inf] * len(single)], dtype=np.float32),
        bans=np.array(sorted(ends) if params.min_tokens > 0 else [], dtype=np.int32),
        banned_until=params.min_tokens if ends else 0,
        bad_words=BadWords(longer) if longer else None)


@dataclass(frozen=True)
class Additions:
    """What a step adds to its adjusted logits: `values` at `places`, which count through the (A, V) logits."""

    places: Tensor
    values: Tensor

    def add_to(self, logits_AV: Tensor) -> None:
        logits_AV.view(-1).scatter_add_(0, self.places, self.values)


@dataclass(frozen=True)
class StagedRules:
    """What crosses to the device for a step, as 4-byte arrays, and what the table keeps of its own."""

    arrays: list[np.ndarray]
    """New rules (3, N) as in the table; the adjusted row of each part, -1 where it does not hold; places and values of
    the H bans."""
    kept: list[tuple[int, int]]
    """Start and length of what stays in the table."""
    parts: list[tuple[int, int]]
    """(part, number of rules) in the table's order, once that is done."""


class RuleTable:
    """The rules of every slot that hold whatever was generated.

    A slot has two parts: 2 * slot, which always holds, and 2 * slot + 1, the bans before min_tokens. The table's rows
    are the part, the token and the value's bits.
    """

    def __init__(self, vocab_size: int, device: torch.device):
        self._vocab_size = vocab_size
        self._parts: list[tuple[int, int]] = []
        self._gone: set[int] = set()
        self._new: dict[int, LogitRules] = {}
        self._table_3E = torch.zeros((3, 0), dtype=torch.int32, device=device)

    def add(self, slot: int, rules: LogitRules) -> None:
        """For a slot that has none."""
        self._new[slot] = rules

    def remove(self, slot: int) -> None:
        # They leave the device with the next step that rebuilds its additions, not with a copy of their own.
        if self._new.pop(slot, None) is None:
            self._gone |= {2 * slot, 2 * slot + 1}

    def stage(self, row_of_part: np.ndarray, hits: Sequence[tuple[int, int]]) -> StagedRules:
        """row_of_part: int32 (2 * S,), -1 where a part does not hold in this step; hits: (adjusted row, token) of
        further bans."""
        kept, parts, start = [], [], 0
        for is_gone, group in groupby(self._parts, key=lambda part: part[0] in self._gone):
            members = list(group)
            size = sum(count for _, count in members)
            if not is_gone:
                kept.append((start, size))
                parts += members
            start += size
        columns = [np.zeros((3, 0), dtype=np.int32)]
        for slot, rules in self._new.items():
            bans = np.full(len(rules.bans), -np.inf, dtype=np.float32)
            for part, tokens, values in ((2 * slot, rules.tokens, rules.values), (2 * slot + 1, rules.bans, bans)):
                if len(tokens):
                    columns.append(np.stack([np.full(len(tokens), part, dtype=np.int32), tokens,
                                             values.view(np.int32)]))
                    parts.append((part, len(tokens)))
        places_H = np.array([row * self._vocab_size + token for row, token in hits], dtype=np.int32)
        values_H = np.full(len(places_H), -np.inf, dtype=np.float32)
        return StagedRules([np.concatenate(columns, axis=1), row_of_part, places_H, values_H], kept, parts)

    def install(self, staged: StagedRules, arrays: Sequence[Tensor]) -> Additions:
        """The step's additions, and the table with newcomers and without those who left. `arrays`: now on the device.

        All of it or, where memory runs out, nothing.
        """
        new_3N, row_of_part, places_H, values_H = arrays
        table_3E = self._table_3E
        if new_3N.shape[1] or sum(size for _, size in staged.kept) < table_3E.shape[1]:
            table_3E = torch.cat([*(table_3E.narrow(1, *part) for part in staged.kept), new_3N], dim=1)
        row_E = row_of_part.index_select(0, table_3E[0])
        places_E = row_E.clamp(min=0).long() * self._vocab_size + table_3E[1]
        values_E = torch.where(row_E >= 0, table_3E[2].view(torch.float32), 0.0)
        if len(places_H):
            places_E, values_E = torch.cat([places_E, places_H.long()]), torch.cat([values_E, values_H])
        self._table_3E, self._parts = table_3E, staged.parts
        self._new.clear()
        self._gone.clear()
        return Additions(places_E, values_E)


class BadWords:
    """Words of two tokens and more; shared by all sequences of a request."""

    def __init__(self, words: Sequence[tuple[int, ...]]):
        self._root = _Node(words, 0)
        self.longest_prefix = max(map(len, words)) - 1
        self.last_of_prefixes = frozenset(word[-2] for word in words)
        self.largest_token = max(map(max, words))

    def completing(self, recent: Sequence[int]) -> list[int]:
        """The tokens that would complete a word behind `recent`, the tokens generated so far or the last of them."""
        return self._root.completing(recent)


class _Node:
    """Words whose last tokens but one, `depth` of them, are the same."""

    def __init__(self, words: Sequence[tuple[int, ...]], depth: int):
        self._words = words
        self._depth = depth
        self._children: dict[int, _Node] | None = None
        self._ends: list[int] = []

    def completing(self, recent: Sequence[int]) -> list[int]:
        found: list[int] = []
        node: _Node | None = self
        while node is not None:
            if len(node._words) <= _FEW_WORDS:
                return found + [word[-1] for word in node._words if _ends_with(recent, word[:-1])]
            found += node._split()
            node = node._child(recent[-node._depth - 1]) if node._depth < len(recent) else None
        return found

    def _child(self, token: int) -> _Node | None:
        return self._children.get(token) if self._children else None

    def _split(self) -> list[int]:
        """Make the children; returns the last tokens of the words that have no more tokens before."""
        if self._children is None:
            groups: dict[int, list[tuple[int, ...]]] = {}
            for word in self._words:
                if len(word) - 1 == self._depth:
                    self._ends.append(word[-1])
                else:
                    groups.setdefault(word[-2 - self._depth], []).append(word)
            self._children = {token: _Node(words, self._depth + 1) for token, words in groups.items()}
        return self._ends


def _ends_with(recent: Sequence[int], prefix: tuple[int, ...]) -> bool:
    return tuple(recent[len(recent) - len(prefix):]) == prefix if len(prefix) <= len(recent) else False


class Watch:
    """The last tokens of one sequence, and what may not come next."""

    def __init__(self, words: BadWords, output_token_ids: Sequence[int]):
        self._words = words
        self._recent = list(output_token_ids[-words.longest_prefix:])
        self.banned = words.completing(self._recent)

    def must_know(self, num_untold: int) -> bool:
        """Any token may begin a word."""
        return num_untold > 0

    def observe(self, token: int) -> None:
        self._recent.append(token)
        if len(self._recent) > 2 * self._words.longest_prefix + 64:
            del self._recent[: -self._words.longest_prefix]
        # Behind most tokens no word can end, and a request may have many sequences.
        self.banned = self._words.completing(self._recent) if token in self._words.last_of_prefixes else []
