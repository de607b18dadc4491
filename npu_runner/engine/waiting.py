"""How many requests may wait in the engine: a step never lacks prompts, and they fit into memory.

Knows nothing of where they come from.
"""

from __future__ import annotations

from collections import deque

# Enough that a prefill step never lacks prompts, few enough that their pixels fit ...
_LEAST_WAITING_REQUESTS = 64
# ... and this share of max_num_seqs, since an eighth of it must be able to join before a prefill interrupts others.
_WAITING_SHARE = 4
MAX_WAITING_BYTES = 1 << 29


def max_waiting_requests(max_num_seqs: int) -> int:
    """Most requests that wait in the engine, and most that wait, prepared, for it."""
    return max(_LEAST_WAITING_REQUESTS, max_num_seqs // _WAITING_SHARE)


class WaitingRoom:
    """Says whether one more may wait. First come, first served: those that wait are those that entered last."""

    def __init__(self, max_num_seqs: int):
        self._max_waiting = max_waiting_requests(max_num_seqs)
        self._sizes: deque[int] = deque(maxlen=self._max_waiting)

    def has_room(self, num_waiting: int) -> bool:
        """`num_waiting`: requests that wait in the engine now."""
        return num_waiting < self._max_waiting and self._bytes_of_last(num_waiting) < MAX_WAITING_BYTES

    def enter(self, num_bytes: int) -> None:
        self._sizes.append(num_bytes)

    def _bytes_of_last(self, count: int) -> int:
        return sum(list(self._sizes)[-count:]) if count else 0
