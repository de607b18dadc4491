"""The draft history of one sequence: its tokens as an array, the tokens that a grammar forces, and the acceptance rate.

Knows no sequence, no scheduling.

L tokens of a sequence, C earlier places that end as the sequence does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

_JUDGED_TOKENS = 24
_LEAST_KEPT = 0.25
_FIRST_PAUSE, _LONGEST_PAUSE = 16, 256
_LEAST_ROOM = 256


@dataclass(eq=False)
class DraftHistory:
    """The drafts of one sequence, from its first draft on.

    Looked-up drafts and drafts of a head pause when too few are accepted. After 24 drafts, at least a quarter must have
    been accepted. Otherwise the next 16 tokens have no such drafts. Each further failure doubles the pause, up to 256
    tokens, and a success resets it.
    """

    forced: list[int] = field(default_factory=list)
    """The tokens that the grammar forces next."""
    proposed: list[int] = field(default_factory=list)
    """The tokens that a head proposes after the forced ones."""
    num_tokens: int = 0
    """The length of the sequence when these were proposed, in tokens."""
    num_forced: int = 0
    """The number of forced drafts in the current step."""
    _tokens: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    _num_read: int = 0
    _num_judged: int = 0
    _num_kept: int = 0
    _pause: int = _FIRST_PAUSE
    _paused_until: int = 0

    def lookup(self, num_tokens: int, tokens: Callable[[int, int], list[int]], *, behind: list[int],
               find: Callable[[np.ndarray], list[int]]) -> list[int]:
        """The drafts that `find` returns for the sequence's `num_tokens` tokens and `behind`; none during a pause.
        `tokens(start, end)` reads the sequence."""
        if self.pauses_at(num_tokens):
            return []
        self._read(num_tokens, tokens)
        end = num_tokens + len(behind)
        self._make_room(end)
        self._tokens[num_tokens:end] = behind  # written anew by the next reading
        return find(self._tokens[:end])

    def pauses_at(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` tokens currently has only forced drafts."""
        return num_tokens < self._paused_until

    def judge(self, num_drafts: int, num_kept: int, num_tokens: int) -> None:
        """Record that a step accepted `num_kept` of `num_drafts` looked-up drafts and left `num_tokens` tokens."""
        self._num_judged += num_drafts
        self._num_kept += num_kept
        if self._num_judged < _JUDGED_TOKENS:
            return
        if self._num_kept >= _LEAST_KEPT * self._num_judged:
            self._pause = _FIRST_PAUSE
        else:
            self._paused_until = num_tokens + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        self._num_judged = self._num_kept = 0

    def _read(self, num_tokens: int, tokens: Callable[[int, int], list[int]]) -> None:
        """Read the new tokens. Earlier ones never change; a sequence that loses tokens gets a new history."""
        self._make_room(num_tokens)
        self._tokens[self._num_read : num_tokens] = tokens(self._num_read, num_tokens)
        self._num_read = num_tokens

    def _make_room(self, num_tokens: int) -> None:
        if num_tokens > len(self._tokens):
            grown = np.empty(max(_LEAST_ROOM, 2 * num_tokens), dtype=np.int32)
            grown[: self._num_read] = self._tokens[: self._num_read]
            self._tokens = grown


def followers(tokens_L: np.ndarray, shortest: int, longest: int, most: int) -> list[int]:
    """Prompt lookup (A. Saxena 2023), as vLLM has it: the longest end of `shortest` to `longest` tokens that stands
    earlier, too; of several places the first; the `most` tokens behind it, as far as there are any."""
    last = len(tokens_L) - 1
    places_C = np.flatnonzero(tokens_L[:-1] == tokens_L[last])
    found = places_C[:0]
    for size in range(1, min(longest, last) + 1):
        if size > 1:
            places_C = places_C[places_C >= size - 1]
            places_C = places_C[tokens_L[places_C - (size - 1)] == tokens_L[last - (size - 1)]]
        if not len(places_C):
            break
        if size >= shortest:
            found = places_C
    if not len(found):
        return []
    start = int(found[0]) + 1
    return tokens_L[start : start + most].tolist()
