"""Drafts from suffix matches: tokens that followed the end of a sequence before, in itself and in earlier answers.

Suffix decoding (arXiv 2411.04975), with vLLM's settings. The search finds the longest suffix of the sequence that
occurs elsewhere. The most frequent next token becomes a draft, then the most frequent token after it, and so on. A path
ends when its probability by these counts falls too low, or when it has as many tokens as the suffix.

Answers are stored one after the other in arrays of a fixed size. Positions with equal two tokens form a chain, newest
first, and a look-up reads only the first ones. So its time is bounded, and it finds the newest answers. Knows no
sequence and no step.

L tokens of a sequence, C places that end as it does, P tokens of a path at most.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np

_CAPACITY = 1 << 21
_NUM_CHAINS = 1 << 18
_MOST_PLACES = 128
# Between answers and behind them: no token.
_NONE = -1
_FACTOR, _SHIFT = 2_654_435_761, 14  # D. Knuth's multiplier; the upper 18 of 32 bits


@dataclass(frozen=True)
class Path:
    """Proposed tokens, and the sum of their probabilities."""

    tokens: list[int]
    score: float


NO_PATH = Path([], 0.0)


@dataclass(frozen=True, kw_only=True)
class SuffixSettings:
    """`max_tree_depth`: most tokens of an end that are compared; `max_spec_factor` times as many tokens follow at most.
    `min_token_prob`: of a path's last token, by the counts of all before it."""

    max_tree_depth: int
    max_cached_requests: int
    max_spec_factor: float
    min_token_prob: float

    def follow(self, source: np.ndarray, places_C: np.ndarray, end_L: np.ndarray, most: int) -> Path:
        """The tokens of `source` that follow places with the last token of `end_L`."""
        places_C, size = longest(source, places_C, end_L, self.max_tree_depth)
        most = min(most, int(self.max_spec_factor * size))
        if not len(places_C) or most < 1:
            return NO_PATH
        steps_P = np.arange(1, most + 1)
        beyond_CP = places_C[:, None] + steps_P >= len(source)
        follows_CP = source[np.minimum(places_C[:, None] + steps_P, len(source) - 1)]
        return self._most_frequent(np.where(beyond_CP, _NONE, follows_CP).tolist())

    def _most_frequent(self, follows: list[list[int]]) -> Path:
        tokens: list[int] = []
        score, share = 0.0, 1.0
        for place in range(len(follows[0])):
            counts = Counter(path[place] for path in follows)
            # Of equally frequent ones that of the first path, which is the newest.
            token, count = counts.most_common(1)[0]
            share *= count / len(follows)
            if token == _NONE or share < self.min_token_prob:
                break
            tokens.append(token)
            score += share
            if count < len(follows):
                follows = [path for path in follows if path[place] == token]
        return Path(tokens, score)


def longest(source: np.ndarray, places_C: np.ndarray, end_L: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """The places with the last token of `end_L` that the longest end of it precedes, and the length of that end, up to
    `most`."""
    size = 1 if len(places_C) else 0
    while 0 < size < min(most, len(end_L)):
        before_C = places_C - size
        same_C = (before_C >= 0) & (source[np.maximum(before_C, 0)] == end_L[-1 - size])
        if not same_C.any():
            break
        places_C, size = places_C[same_C], size + 1
    return places_C, size


class SuffixDrafts:
    """The newest answers of this engine, `max_cached_requests` and 2 M tokens at most; 0: none are kept."""

    def __init__(self, settings: SuffixSettings):
        self._settings = settings
        keeps = settings.max_cached_requests > 0
        self._tokens = np.full(_CAPACITY if keeps else 1, _NONE, dtype=np.int32)
        self._before = np.full(len(self._tokens), _NONE, dtype=np.int32)
        """The place before in a token's chain."""
        self._newest = np.full(_NUM_CHAINS if keeps else 1, _NONE, dtype=np.int32)
        self._end = 0
        self._starts: deque[int] = deque()
        """The start of each stored answer."""

    @property
    def num_bytes(self) -> int:
        return self._tokens.nbytes + self._before.nbytes + self._newest.nbytes

    def add(self, tokens: list[int]) -> None:
        """Keep an answer that has ended. The oldest ones go where there is no room."""
        length = len(tokens) + 1
        if len(tokens) < 2 or length > len(self._tokens) // 2:
            return
        if self._end + length > len(self._tokens):
            self._compact()
        start, self._end = self._end, self._end + length
        self._tokens[start : self._end] = [*tokens, _NONE]
        self._chain(start + 1, self._end - 1)
        self._starts.append(start)
        while len(self._starts) > self._settings.max_cached_requests:
            self._starts.popleft()

    def propose(self, tokens_L: np.ndarray, most: int) -> list[int]:
        """`most` tokens at most behind these. Of the own tokens and those of answers the more probable path."""
        own_C = np.flatnonzero(tokens_L[:-1] == tokens_L[-1])[::-1][:_MOST_PLACES]
        own = self._settings.follow(tokens_L, own_C, tokens_L, most)
        if len(tokens_L) < 2 or not self._starts:
            return own.tokens
        others = self._settings.follow(self._tokens[: self._end], self._places(tokens_L), tokens_L, most)
        return own.tokens if own.score >= others.score else others.tokens

    def _places(self, tokens_L: np.ndarray) -> np.ndarray:
        """Where answers have the last two tokens, newest first."""
        found: list[int] = []
        place, oldest = int(self._newest[int(_chains(tokens_L[-2:])[0])]), self._starts[0]
        while place > oldest and len(found) < _MOST_PLACES:
            found.append(place)
            place = int(self._before[place])
        places_C = np.array(found, dtype=np.int64)
        # A chain holds other pairs, too.
        is_pair_C = (self._tokens[places_C] == tokens_L[-1]) & (self._tokens[places_C - 1] == tokens_L[-2])
        return places_C[is_pair_C]

    def _chain(self, first: int, end: int) -> None:
        """Put the places from `first` on at the front of their chains, with the token before each."""
        for place, chain in zip(range(first, end), _chains(self._tokens[first - 1 : end]).tolist(), strict=True):
            self._before[place], self._newest[chain] = self._newest[chain], place

    def _compact(self) -> None:
        """Keep the newest half of the tokens, whole answers of them."""
        while self._starts and self._end - self._starts[0] > len(self._tokens) // 2:
            self._starts.popleft()
        first = self._starts[0] if self._starts else self._end
        num = self._end - first
        self._tokens[:num] = self._tokens[first : self._end].copy()
        self._tokens[num:] = _NONE
        self._newest[:] = self._before[:] = _NONE
        self._end, self._starts = num, deque(start - first for start in self._starts)
        ends = [*list(self._starts)[1:], num]
        for start, end in zip(self._starts, ends, strict=True):
            self._chain(start + 1, end - 1)


def _chains(tokens_L: np.ndarray) -> np.ndarray:
    """int64: which chain each token but the first is in, with the one before it."""
    pairs = tokens_L[:-1].astype(np.uint64) * np.uint64(31) + tokens_L[1:].astype(np.uint64)
    chains: np.ndarray = ((pairs * np.uint64(_FACTOR) & np.uint64(0xFFFFFFFF)) >> np.uint64(_SHIFT)).astype(np.int64)
    return chains
