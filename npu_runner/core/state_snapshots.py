"""Which prefixes have a snapshot of the state, and in which slot it lies. Knows no sequences, blocks or devices.

A layer with a recurrent state can go on from a cached prefix only where the state at its end was kept. The state pool
has slots beside those of running sequences for that. A snapshot is known by the key of the block that ends at its
position, which stands for all tokens and images before it. The least recently used one goes when a slot is needed,
except those that the step which is being put together reads or writes.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from itertools import chain

STATE_CHUNK = 64
"""Kernels can hand out the state at multiples of this many tokens from the start of a row."""


def state_alignment(block_size: int) -> int:
    """Chunks of a prompt begin, and snapshots lie, at multiples of this: block borders that kernels can stop at."""
    return math.lcm(STATE_CHUNK, block_size)


@dataclass
class SnapshotCounters:
    """Snapshots written, prompts that went on from one, and snapshots that are no more."""

    taken: int = 0
    used: int = 0
    evicted: int = 0


class StateSnapshots:
    """Slots [first_slot, first_slot + num_snapshots) of the state pool, by prefix.

    What a step writes can be found as soon as it is under way: the device works in order, so later steps may read it.
    Should the step be rolled back, it is taken back.
    """

    def __init__(self, num_snapshots: int, first_slot: int, alignment: int):
        assert num_snapshots > 0, "without snapshots there is no prefix cache"
        self.num_snapshots = num_snapshots
        self.first_slot = first_slot
        self.alignment = alignment
        self.counters = SnapshotCounters()
        self.reset()

    def reset(self) -> None:
        """Nothing is kept and nothing under way, whatever stood here."""
        self._slot_of_key: OrderedDict[bytes, int] = OrderedDict()
        self._saving: dict[bytes, int] = {}
        self._loading: set[int] = set()
        self._under_way: deque[list[bytes]] = deque()
        self._free = list(range(self.first_slot + self.num_snapshots - 1, self.first_slot - 1, -1))

    def __contains__(self, key: bytes) -> bool:
        return key in self._slot_of_key

    def load(self, key: bytes) -> int:
        """The slot that the next step will read `key`'s state from."""
        slot = self._slot_of_key[key]
        self._slot_of_key.move_to_end(key)
        self._loading.add(slot)
        return slot

    def save(self, key: bytes) -> int | None:
        """A slot for the next step to write `key`'s state to; None if there is one, or no slot can be had."""
        if key in self._slot_of_key or key in self._saving:
            return None
        if not self._free and not self._evict():
            return None
        slot = self._saving[key] = self._free.pop()
        return slot

    def is_saving(self, key: bytes) -> bool:
        """Whether the step that is being put together will write `key`'s state."""
        return key in self._saving

    @property
    def is_saving_any(self) -> bool:
        return bool(self._saving)

    def free(self, key: bytes) -> None:
        """The last block before the snapshot has left the cache, so the snapshot cannot be found."""
        slot = self._slot_of_key.pop(key, None)
        if slot is not None:
            self._free.append(slot)
            self.counters.evicted += 1

    def start_step(self) -> None:
        """A step is put together from here on: nothing is read or written for it yet."""
        self._loading = set()

    def launch(self) -> None:
        """The step that was put together is under way: those after it find what it writes."""
        self._slot_of_key.update(self._saving)
        self._under_way.append(list(self._saving))
        self._saving = {}

    def complete(self) -> None:
        """The oldest step under way ran: what it wrote is kept from now on."""
        self.counters.taken += len(self._under_way.popleft())

    def rollback(self) -> None:
        """No step under way ran to its end: what they were to write is worth nothing."""
        self._free.extend(self._saving.values())
        for key in chain.from_iterable(self._under_way):
            if key in self._slot_of_key:
                self._free.append(self._slot_of_key.pop(key))
        self._under_way.clear()
        self._saving = {}

    def _evict(self) -> bool:
        victim = next((key for key, slot in self._slot_of_key.items() if slot not in self._loading), None)
        if victim is None:
            return False
        self.free(victim)
        return True
