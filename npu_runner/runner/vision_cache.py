"""Keeps the embeddings of pictures that were seen, by content, within a bound of bytes. Knows nothing of models."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class HasBytes(Protocol):
    @property
    def num_bytes(self) -> int: ...


Value = TypeVar("Value", bound=HasBytes)


@dataclass
class VisionCacheCounters:
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    num_bytes: int = 0


class VisionCache(Generic[Value]):
    """Least recently used goes first. A value larger than the whole cache is not kept.

    A picture that a prefill chunk was cut through is pinned until the next prefill step, beyond the bound if need be:
    the tower must not run twice for one picture of a prompt under way.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self.counters = VisionCacheCounters()
        self._values: OrderedDict[bytes, Value] = OrderedDict()
        self._pinned: dict[bytes, Value] = {}

    def get(self, content_hash: bytes) -> Value | None:
        value = self._pinned.get(content_hash) or self._values.get(content_hash)
        if value is None:
            self.counters.misses += 1
            return None
        if content_hash in self._values:
            self._values.move_to_end(content_hash)
        self.counters.hits += 1
        return value

    def put(self, content_hash: bytes, value: Value) -> None:
        assert content_hash not in self._values, "encoded twice"
        if value.num_bytes > self.max_bytes:
            return
        self._values[content_hash] = value
        self.counters.num_bytes += value.num_bytes
        while self.counters.num_bytes > self.max_bytes:
            _, evicted = self._values.popitem(last=False)
            self.counters.num_bytes -= evicted.num_bytes
            self.counters.evictions += 1

    def pin_only(self, values: dict[bytes, Value]) -> None:
        """Hold `values` whatever happens, and none of those pinned before."""
        self._pinned = values

    def release(self) -> None:
        """Give up every value: whoever needs one has it made again."""
        self.counters.evictions += len(self._values)
        self.counters.num_bytes = 0
        self._values.clear()
        self._pinned = {}

    def clear(self) -> None:
        """Forget everything, counters included."""
        self._values.clear()
        self._pinned.clear()
        self.counters = VisionCacheCounters()
