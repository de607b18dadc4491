"""Hands rows out to replicas by load. Knows nothing of what replicas say, nor of their deaths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from npu_runner.replicas.base import RowRun
from npu_runner.replicas.row_queue import RowQueue
from npu_runner.replicas.slot import Slot

_MAX_ROWS_OF_RUN = 32
# Rows that one replica has and has not begun, with which it does not wait until others have none.
_FEW_ROWS = 10


class Dealer:
    """`slots`: the fleet's own list, which grows. `make_run`: the rows of these indices, for a replica."""

    def __init__(self, slots: Sequence[Slot], rows: RowQueue, make_run: Callable[[Sequence[int]], RowRun]):
        self._slots = slots
        self._rows = rows
        self._make_run = make_run

    def hand_out(self) -> None:
        """Rows that nobody has to whom they are of most use; suspects one by one; then what others have not begun."""
        if self._rows.has_suspects:
            self._run_suspects()
        while len(self._rows):
            slot = self._hungriest()
            if slot is None:
                return
            self._give(slot, self._rows.take(self._run_length(slot)))
        self._even_out()

    def _hungriest(self) -> Slot | None:
        """Who has the smallest part of what it has use for."""
        hungry = [slot for slot in self._slots if len(slot.held) < slot.max_rows and not slot.is_reserved]
        return min(hungry, key=lambda slot: len(slot.held) / slot.max_rows, default=None)

    def _run_length(self, slot: Slot) -> int:
        """Neighbours go together, shorter runs towards the end."""
        share = len(self._rows) // (2 * len(self._slots)) if len(self._slots) > 1 else len(self._rows)
        return max(1, min(_MAX_ROWS_OF_RUN, share, slot.max_rows - len(slot.held)))

    def _give(self, slot: Slot, rows: Sequence[int]) -> None:
        if not rows:
            return
        assert slot.replica is not None, f"{slot.name} is dead"
        slot.held.update(rows)
        slot.gave_nothing = False
        slot.replica.submit(self._make_run(rows))

    def _even_out(self) -> None:
        """No new row is left: who has none, or far fewer than another, gets some that this one has not begun."""
        living = [slot for slot in self._slots if slot.facts is not None and not slot.is_reserved]
        if len(living) < 2:
            return
        poor = min(living, key=lambda slot: len(slot.held))
        for rich in living:
            surplus = (len(rich.held) - len(poor.held)) // 2
            may_ask = not rich.is_asked and not rich.gave_nothing
            if may_ask and surplus and (not poor.held or len(rich.held) - len(rich.begun) >= _FEW_ROWS):
                self._ask_back(rich, surplus)

    def _ask_back(self, slot: Slot, num_rows: int) -> None:
        assert slot.replica is not None, f"{slot.name} is dead"
        slot.is_asked = True
        slot.replica.recall(num_rows)

    def _run_suspects(self) -> None:
        """One replica is kept free of all others for them."""
        slot = next((slot for slot in self._slots if slot.is_reserved), None)
        if slot is None:
            slot = min((slot for slot in self._slots if slot.facts is not None),
                       key=lambda slot: len(slot.held), default=None)
            if slot is None:
                return
            slot.is_reserved = True
        if slot.held:
            if slot.lone is None and not slot.is_asked and not slot.gave_nothing:
                self._ask_back(slot, len(slot.held))
            return
        slot.lone = self._rows.take_suspect()
        self._give(slot, [slot.lone])
