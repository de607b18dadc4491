"""Where the blocks of every running sequence stand on one device, and on its host. A step sends what is new in them.

Knows slots and numbers of blocks; nothing of who holds them. Slots are the scheduler's; behind them one more, whose row
is the null block throughout: for the padded rows of a graph.

A step's rows are gathered into memory with a fixed address, so that graphs can read them. While the slots stay the
same, one launch writes new entries to both places, and nothing is gathered. A step without new entries launches
nothing. All of it is queued before the step's forward. The device works in order, so a step under way has read its rows
before the next step's are written.

S slots, the null one included, R rows of a step at most (with drafts its tokens), B rows of a step, W blocks of the
longest sequence, N entries that are new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

NOTHING = np.zeros(0, dtype=np.int32)


class TableNews(NamedTuple):
    """`flat`, int32: the places of `num_entries` entries (as the bits of int64), their blocks, and the slots whose rows
    are gathered (all of the step's, or none). Empty if nothing is new."""

    num_entries: int
    flat: np.ndarray


class BlockTables:
    """`on_host_SW` and `rows_RW`: int32, zeros at first, which is the null block."""

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, most_rows: int = 0):
        """`most_rows`: R, where that is more than `max_num_seqs`."""
        self.null_slot, most_rows = max_num_seqs, max(max_num_seqs, most_rows)
        self.on_host_SW = np.zeros((max_num_seqs + 1, max_blocks), dtype=np.int32)
        # Rows first: what a graph reads begins where its memory begins, which torchair leaves in its place.
        both = torch.zeros((most_rows + max_num_seqs + 1, max_blocks), dtype=torch.int32, device=device)
        self.rows_RW, self._slots_SW = both[:most_rows], both[most_rows:]
        self._flat = both.view(-1)
        self._first_slot = most_rows
        self._gathered_B: np.ndarray | None = None
        self._row_of_S = np.full(max_num_seqs + 1, -1, dtype=np.int64)
        self._has_one_row_each = True

    @property
    def width(self) -> int:
        return self.on_host_SW.shape[1]

    def learn(self, new_blocks_N3: np.ndarray) -> None:
        """Note on the host what is new: (slot, column, block) each. Done twice it is the same."""
        slots_N, columns_N, blocks_N = new_blocks_N3.T
        self.on_host_SW[slots_N, columns_N] = blocks_N

    def news(self, new_blocks_N3: np.ndarray, slots_B: np.ndarray) -> TableNews:
        """The table entries to send with a step that reads the tables of `slots_B`; `write` applies them on the device.
        """
        is_gathered = self._gathered_B is not None and np.array_equal(self._gathered_B, slots_B)
        gathered_B = NOTHING if is_gathered else slots_B
        if not len(new_blocks_N3):
            return TableNews(0, gathered_B)
        slots_N, columns_N, blocks_N = new_blocks_N3.T
        rows_N = self._first_slot + slots_N
        if is_gathered:
            rows, which = self._rows_that_read(slots_B, slots_N)
            rows_N, columns_N = np.concatenate([rows_N, rows]), np.concatenate([columns_N, columns_N[which]])
            blocks_N = np.concatenate([blocks_N, blocks_N[which]])
        places_N = rows_N.astype(np.int64) * self.width + columns_N  # numpy 1 ignores the type of a scalar
        return TableNews(len(places_N), np.concatenate([places_N.view(np.int32), blocks_N, gathered_B]))

    def _rows_that_read(self, slots_B: np.ndarray, slots_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of `slots_B`, those that were gathered, and which of `slots_N` each of them has."""
        if not self._has_one_row_each:
            rows, which = np.nonzero(slots_B[:, None] == slots_N)
            return rows, which
        rows_N = self._row_of_S[slots_N]
        which = np.flatnonzero(rows_N >= 0)
        return rows_N[which], which

    def write(self, news: Tensor, num_entries: int, slots_B: np.ndarray) -> Tensor:
        """Update the device with the `flat` and `num_entries` that `news` gave for `slots_B`. Returns their tables (B,
        W), valid until the next call, in the device's order."""
        ends = 2 * num_entries, 3 * num_entries
        if num_entries:
            self._flat.index_copy_(0, news[: ends[0]].view(torch.int64), news[ends[0] : ends[1]])
        rows_BW = self.rows_RW[: len(slots_B)]
        if len(news) > ends[1]:
            self._gathered_B = None
            torch.index_select(self._slots_SW, 0, news[ends[1] :], out=rows_BW)
            self._row_of_S[:] = -1
            self._row_of_S[slots_B] = np.arange(len(slots_B))
            # But for the null slot, of which there is never any news.
            self._has_one_row_each = np.count_nonzero(self._row_of_S[:-1] >= 0) == np.count_nonzero(
                slots_B != self.null_slot)
            self._gathered_B = slots_B.copy()  # last: an interrupt may come between any two lines
        return rows_BW

    def rows_of(self, slots_B: Tensor) -> Tensor:
        """(B, W): the tables of `slots_B`, int32 on the device, as the step's own `write` has left them."""
        return self._slots_SW.index_select(0, slots_B)

    def clear(self) -> None:
        """Every row is the null block."""
        self._put(np.zeros_like(self.on_host_SW))

    @contextmanager
    def preserve(self) -> Iterator[None]:
        """Inside every row is the null block; afterwards all of them are back."""
        kept_SW = self.on_host_SW.copy()
        self.clear()
        try:
            yield
        finally:
            self._put(kept_SW)

    def _put(self, tables_SW: np.ndarray) -> None:
        self.on_host_SW[:] = tables_SW
        self._gathered_B = None
        self._slots_SW.copy_(torch.from_numpy(tables_SW))
