"""Additions to single logits: logit_bias, the bans before min_tokens, and bad_words, all as one kind of rule.

Rules of a sequence lie on the host. Those that hold in a step are sent when the rows of a step change. Bans that depend
on the last tokens are looked up and sent where they hold, which is seldom. The words of a request form a tree, keyed by
the tokens before their last one in reverse order. A look-up costs what agrees with the end of the text, whatever the
number of words. Nodes are made on first use. Knows nothing of sampling.

Shapes: A rows whose logits are adjusted, V vocabulary, W most additions of one row, N additions of all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from npu_runner.request.sampling_params import SamplingParams

_FEW_WORDS = 4  # at most this number of bad words is compared one by one


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
    """A step adds `values_AW`, float32, to its adjusted logits at `tokens_AW`, int64. Zeros fill rows up."""

    tokens_AW: Tensor
    values_AW: Tensor

    def add_to(self, logits_AV: Tensor) -> None:
        # Along a row: a flat view is one axis as long as the table, which some devices leave to a slow processor.
        logits_AV.scatter_add_(1, self.tokens_AW, self.values_AW)


def addition_arrays(parts: Sequence[tuple[int, np.ndarray, np.ndarray]], num_rows: int) -> list[np.ndarray]:
    """Tokens and values as `Additions` has them, int32 and float32. parts: (row, tokens, values), in any order."""
    rows_N = np.repeat([row for row, _, _ in parts], [len(tokens) for _, tokens, _ in parts])
    order = np.argsort(rows_N, kind="stable")
    rows_N = rows_N[order]
    counts_A = np.bincount(rows_N, minlength=num_rows)
    columns_N = np.arange(len(rows_N)) - (np.cumsum(counts_A) - counts_A)[rows_N]
    arrays = []
    for each, dtype in ((1, np.int32), (2, np.float32)):
        padded_AW = np.zeros((num_rows, counts_A.max()), dtype=dtype)
        padded_AW[rows_N, columns_N] = np.concatenate([part[each] for part in parts])[order]
        arrays.append(padded_AW)
    return arrays


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
