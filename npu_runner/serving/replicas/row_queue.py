"""Which rows are still to be handed out: new ones in their order, those that came back, and suspects, one at a time.

Knows nothing of replicas, nor of what is in a row.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from npu_runner.serving.blame import MAX_DEATHS


class RowQueue:
    """Rows 0 to `num_rows` - 1, each handed out once until somebody brings it back."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.first = 0
        self._next = 0
        self._limit = num_rows
        self._again: deque[int] = deque()
        self._alone: deque[int] = deque()
        self._are_alone: set[int] = set()
        self._num_deaths: Counter[int] = Counter()

    def allow(self, limit: int) -> None:
        """Rows from `limit` on have to wait."""
        self._limit = min(limit, self.num_rows)

    def drop_before(self, first: int) -> None:
        """Rows before `first` are handed out no more, whoever brings them back."""
        self.first = first
        self._next, self._limit = max(self._next, first), max(self._limit, first)
        for waiting in (self._again, self._alone):
            kept = [row for row in waiting if row >= first]
            waiting.clear()
            waiting.extend(kept)

    def __len__(self) -> int:
        """Rows that may be handed out now, without those that run alone."""
        return len(self._again) + max(0, self._limit - self._next)

    @property
    def has_suspects(self) -> bool:
        return bool(self._alone)

    def take(self, num_rows: int) -> Sequence[int]:
        """Neighbours, as far as there are some: `num_rows` at most, none where there are none."""
        if self._again:
            return [self._again.popleft() for _ in range(min(num_rows, len(self._again)))]
        first, self._next = self._next, max(self._next, min(self._next + num_rows, self._limit))
        if not self._are_alone:
            return range(first, self._next)
        return [row for row in range(first, self._next) if row not in self._are_alone]

    def take_suspect(self) -> int:
        return self._alone.popleft()

    def requeue(self, rows: Iterable[int]) -> None:
        """Rows that were handed out and not done; suspects among them run alone."""
        for row in sorted((row for row in rows if row >= self.first), reverse=True):
            (self._alone if row in self._are_alone else self._again).appendleft(row)

    def isolate(self, rows: Iterable[int]) -> None:
        """These run alone. To be called before they are handed out."""
        for row in rows:
            if row not in self._are_alone:
                self._are_alone.add(row)
                self._alone.append(row)

    def drop(self, rows: Iterable[int]) -> None:
        """These are not handed out at all. To be called before they are."""
        self._are_alone.update(rows)

    def count_death(self, rows: Iterable[int]) -> list[int]:
        """These were under way when somebody died. Returns those that run alone from now on, once they are put back."""
        suspects = []
        for row in rows:
            self._num_deaths[row] += 1
            if self._num_deaths[row] >= MAX_DEATHS and row not in self._are_alone:
                self._are_alone.add(row)
                suspects.append(row)
        return suspects

    def isolate_on_return(self, row: int) -> None:
        """It was the only one under way in a death: it runs alone, once it is put back."""
        self._are_alone.add(row)
