"""Queues unassigned rows and balances them over replicas: new rows in order, requeued ones, suspects one at a time.
Knows nothing of a row's data, nor of replicas' messages.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from npu_runner.serving.blame import MAX_DEATHS
from npu_runner.serving.replicas.replica_state import ReplicaState

_MAX_ROWS_OF_RUN = 32
# With this many rows outside its engine, a replica gives some back before others are idle.
_FEW_ROWS = 10


class RowQueue:
    """Rows 0 to `num_rows` - 1; each is assigned once, and again after `requeue`."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.first = 0
        self._next = 0
        self._limit = num_rows
        self._again: deque[int] = deque()
        self._alone: deque[int] = deque()
        self._are_alone: set[int] = set()
        self._waits = b""
        self._num_deaths: Counter[int] = Counter()

    def allow(self, limit: int) -> None:
        """Rows from `limit` on have to wait."""
        self._limit = min(limit, self.num_rows)

    def drop_before(self, first: int) -> None:
        """Rows before `first` are never assigned again."""
        self.first = first
        self._next, self._limit = max(self._next, first), max(self._limit, first)
        for waiting in (self._again, self._alone):
            kept = [row for row in waiting if row >= first]
            waiting.clear()
            waiting.extend(kept)

    def __len__(self) -> int:
        """Rows that may be assigned now, without those that run alone."""
        return len(self._again) + max(0, self._limit - self._next)

    @property
    def has_suspects(self) -> bool:
        return bool(self._alone)

    def pop(self, num_rows: int) -> Sequence[int]:
        """At most `num_rows` rows, neighbours if possible."""
        if self._again:
            return [self._again.popleft() for _ in range(min(num_rows, len(self._again)))]
        first, self._next = self._next, max(self._next, min(self._next + num_rows, self._limit))
        rows = range(first, self._next)
        if not self._are_alone and not self._waits:
            return rows
        return [row for row in rows if row not in self._are_alone and not (self._waits and self._waits[row])]

    def pop_suspect(self) -> int:
        return self._alone.popleft()

    def requeue(self, rows: Iterable[int]) -> None:
        """Rows that were assigned and not done; suspects among them run alone."""
        for row in sorted((row for row in rows if row >= self.first), reverse=True):
            (self._alone if row in self._are_alone else self._again).appendleft(row)

    def isolate(self, rows: Iterable[int]) -> None:
        """Have these rows run alone. Call it before they are assigned."""
        for row in rows:
            if row not in self._are_alone:
                self._are_alone.add(row)
                self._alone.append(row)

    def hold(self, waits: bytes) -> None:
        """A row whose byte is 1 is assigned once `requeue` names it. Call it before rows are assigned."""
        self._waits = waits

    def drop(self, rows: Iterable[int]) -> None:
        """Never assign these rows. Call it before they are assigned."""
        self._are_alone.update(rows)

    def count_death(self, rows: Iterable[int]) -> list[int]:
        """These rows were under way when a replica died. Returns the ones that run alone once they are requeued."""
        suspects = []
        for row in rows:
            self._num_deaths[row] += 1
            if self._num_deaths[row] >= MAX_DEATHS and row not in self._are_alone:
                self._are_alone.add(row)
                suspects.append(row)
        return suspects

    def isolate_on_return(self, row: int) -> None:
        """It was the only row under way in a death: it runs alone once it is requeued."""
        self._are_alone.add(row)


class LoadBalancer:
    """`states`: the fleet's own list, which grows. `make_run`: the rows of these indices, for a replica."""

    def __init__(self, states: Sequence[ReplicaState], rows: RowQueue, make_run: Callable[[Sequence[int]], Any]):
        self._states = states
        self._rows = rows
        self._make_run = make_run

    def assign_rows(self) -> None:
        """Assign suspects one by one, and each run of free rows to the least loaded replica; then balance the rest."""
        if self._rows.has_suspects:
            self._run_suspects()
        while len(self._rows):
            state = self._least_loaded()
            if state is None:
                return
            self._assign(state, self._rows.pop(self._run_length(state)))
        self._balance()

    def _least_loaded(self) -> ReplicaState | None:
        """The state with the smallest share of its `max_rows`."""
        with_room = [state for state in self._states if len(state.held) < state.max_rows and not state.is_reserved]
        return min(with_room, key=lambda state: len(state.held) / state.max_rows, default=None)

    def _run_length(self, state: ReplicaState) -> int:
        """Neighbours go together, shorter runs towards the end."""
        share = len(self._rows) // (2 * len(self._states)) if len(self._states) > 1 else len(self._rows)
        return max(1, min(_MAX_ROWS_OF_RUN, share, state.max_rows - len(state.held)))

    def _assign(self, state: ReplicaState, rows: Sequence[int]) -> None:
        if rows:
            state.submit(rows, self._make_run(rows))

    def _balance(self) -> None:
        """No new row is left: recall rows outside of engines for a replica with none, or with far fewer."""
        living = [state for state in self._states if state.facts is not None and not state.is_reserved]
        if len(living) < 2:
            return
        least = min(living, key=lambda state: len(state.held))
        for loaded in living:
            surplus = (len(loaded.held) - len(least.held)) // 2
            may_recall = not loaded.is_recalling and not loaded.returned_none
            if may_recall and surplus and (not least.held or len(loaded.held) - len(loaded.started) >= _FEW_ROWS):
                loaded.recall(surplus)

    def _run_suspects(self) -> None:
        """Reserve one replica for suspects."""
        state = next((state for state in self._states if state.is_reserved), None)
        if state is None:
            state = min((state for state in self._states if state.facts is not None),
                        key=lambda state: len(state.held), default=None)
            if state is None:
                return
            state.is_reserved = True
        if state.held:
            if state.lone is None and not state.is_recalling and not state.returned_none:
                state.recall(len(state.held))
            return
        state.lone = self._rows.pop_suspect()
        self._assign(state, [state.lone])
