"""Hands rows out to replicas by load. Knows nothing of what replicas say, nor of their deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from npu_runner.serving.replicas.replica_state import ReplicaState
from npu_runner.serving.replicas.row_queue import RowQueue

_MAX_ROWS_OF_RUN = 32
# Rows that one replica has and has not begun, with which it does not wait until others have none.
_FEW_ROWS = 10


class LoadBalancer:
    """`states`: the fleet's own list, which grows. `make_run`: the rows of these indices, for a replica."""

    def __init__(self, states: Sequence[ReplicaState], rows: RowQueue, make_run: Callable[[Sequence[int]], Any]):
        self._states = states
        self._rows = rows
        self._make_run = make_run

    def hand_out(self) -> None:
        """Suspects one by one; free rows, each run to the least loaded replica; then what others have not begun."""
        if self._rows.has_suspects:
            self._run_suspects()
        while len(self._rows):
            state = self._least_loaded()
            if state is None:
                return
            self._give(state, self._rows.take(self._run_length(state)))
        self._even_out()

    def _least_loaded(self) -> ReplicaState | None:
        """Who has the smallest part of what it has use for."""
        with_room = [state for state in self._states if len(state.held) < state.max_rows and not state.is_reserved]
        return min(with_room, key=lambda state: len(state.held) / state.max_rows, default=None)

    def _run_length(self, state: ReplicaState) -> int:
        """Neighbours go together, shorter runs towards the end."""
        share = len(self._rows) // (2 * len(self._states)) if len(self._states) > 1 else len(self._rows)
        return max(1, min(_MAX_ROWS_OF_RUN, share, state.max_rows - len(state.held)))

    def _give(self, state: ReplicaState, rows: Sequence[int]) -> None:
        if not rows:
            return
        assert state.replica is not None, f"{state.name} is dead"
        state.held.update(rows)
        state.gave_nothing = False
        state.replica.submit(self._make_run(rows))

    def _even_out(self) -> None:
        """No new row is left: who has none, or far fewer than another, gets some that this one has not begun."""
        living = [state for state in self._states if state.facts is not None and not state.is_reserved]
        if len(living) < 2:
            return
        least = min(living, key=lambda state: len(state.held))
        for loaded in living:
            surplus = (len(loaded.held) - len(least.held)) // 2
            may_ask = not loaded.is_asked and not loaded.gave_nothing
            if may_ask and surplus and (not least.held or len(loaded.held) - len(loaded.begun) >= _FEW_ROWS):
                self._ask_back(loaded, surplus)

    def _ask_back(self, state: ReplicaState, num_rows: int) -> None:
        assert state.replica is not None, f"{state.name} is dead"
        state.is_asked = True
        state.replica.recall(num_rows)

    def _run_suspects(self) -> None:
        """One replica is kept free of all others for them."""
        state = next((state for state in self._states if state.is_reserved), None)
        if state is None:
            state = min((state for state in self._states if state.facts is not None),
                       key=lambda state: len(state.held), default=None)
            if state is None:
                return
            state.is_reserved = True
        if state.held:
            if state.lone is None and not state.is_asked and not state.gave_nothing:
                self._ask_back(state, len(state.held))
            return
        state.lone = self._rows.take_suspect()
        self._give(state, [state.lone])
