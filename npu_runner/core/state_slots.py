"""Which slot of the state pool holds the state of each running sequence. Knows no sequences, states or devices.

A state goes back to no earlier token. So a step with drafts, where these go into no rings, leaves one behind each of
its tokens: behind a row's last token in the row's own slot, behind each draft in a spare one. The state behind the last
draft that was kept is the row's from then on, where it lies; the row's slot before is spare. Nothing is copied. A plain
step goes on in the row's slot.

B rows of a step, T tokens of a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np


class StateSlots:
    """By row of the running batch, `num_rows` of them; at first each row has the slot of its own number.
    `spares`: slots for what drafts leave."""

    def __init__(self, num_rows: int, spares: range):
        self._num_rows, self._spares = num_rows, spares
        self.reset()

    def reset(self) -> None:
        """No row holds a state, and no step is under way, whatever stood here."""
        self._slot_of_row = np.arange(self._num_rows, dtype=np.int32)
        self._free = list(reversed(self._spares))
        self._lent: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        """Drafts that the next step may have, of all rows together."""
        return len(self._free)

    def of(self, rows_B: np.ndarray) -> np.ndarray:
        """(B,) int32: where the states of these rows lie."""
        slots_B: np.ndarray = self._slot_of_row[rows_B]
        return slots_B

    def lend(self, rows_B: np.ndarray, num_drafts_B: Iterable[int]) -> np.ndarray:
        """(T,) int32: the slots in which a step with drafts leaves the state of each token. `resolve` ends the loan."""
        assert not self._lent, "a step with drafts is under way"
        rows = rows_B.tolist()
        for row, num in zip(rows, num_drafts_B, strict=True):
            self._lent[row] = [self._free.pop() for _ in range(num)]
        return np.fromiter(chain(*([int(self._slot_of_row[row]), *self._lent[row]] for row in rows)), dtype=np.int32)

    def resolve(self, kept: Iterable[tuple[int, int]]) -> None:
        """Keep the state of the last accepted draft of each row. kept: (row, number of accepted drafts)."""
        for row, num in kept:
            if num:
                lent, before = self._lent[row], int(self._slot_of_row[row])
                self._slot_of_row[row], lent[num - 1] = lent[num - 1], before
        self._free.extend(chain(*self._lent.values()))
        self._lent = {}
