"""The cache of image embeddings: what is kept, what goes first, and that the counters say so."""

from __future__ import annotations

import random
from dataclasses import dataclass

from npu_runner.runner.images import VisionCache, VisionCacheCounters


@dataclass(frozen=True)
class Value:
    num_bytes: int


def key(number: int) -> bytes:
    return bytes([number])


def test_the_least_recently_used_goes_first() -> None:
    cache = VisionCache(max_bytes=30)
    for number in (1, 2, 3):
        assert cache.get(key(number)) is None
        cache.put(key(number), Value(10))
    assert cache.get(key(1)) == Value(10)
    cache.put(key(4), Value(15))
    assert [number for number in (1, 2, 3, 4) if cache.get(key(number))] == [1, 4], "2 and 3 were used longest ago"
    assert cache.counters == VisionCacheCounters(hits=3, misses=5, evictions=2, num_bytes=25)


def test_what_is_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = VisionCache(max_bytes=30)
    cache.put(key(1), Value(30))
    cache.put(key(2), Value(31))
    assert cache.get(key(2)) is None
    assert cache.get(key(1)) is not None
    assert cache.counters == VisionCacheCounters(hits=1, misses=1, evictions=0, num_bytes=30)


def test_a_pinned_image_outlives_eviction_until_others_are_pinned() -> None:
    cache = VisionCache(max_bytes=10)
    first = Value(10)
    cache.put(key(1), first)
    cache.pin_only({key(1): first})
    cache.put(key(2), Value(10))
    assert cache.get(key(1)) is first
    assert cache.counters.num_bytes == 10, "the bound is on what is kept, not on what a prompt under way holds"
    cache.pin_only({})
    assert cache.get(key(1)) is None


def test_random_traffic_against_a_list() -> None:
    """The reference: a list of keys, the latest used at its end."""
    rng = random.Random(5)
    cache = VisionCache(max_bytes=150)
    kept: list[tuple[bytes, Value]] = []
    hits = misses = evictions = 0
    for _ in range(5000):
        number = rng.randrange(12)
        wanted, value = key(number), Value(7 + 9 * (number % 17))
        found = next((pair for pair in kept if pair[0] == wanted), None)
        assert cache.get(wanted) == (found[1] if found else None)
        if found:
            hits += 1
            kept.remove(found)
            kept.append(found)
            continue
        misses += 1
        cache.put(wanted, value)
        if value.num_bytes <= 150:
            kept.append((wanted, value))
        while sum(value.num_bytes for _, value in kept) > 150:
            kept.pop(0)
            evictions += 1
        total = sum(value.num_bytes for _, value in kept)
        assert cache.counters == VisionCacheCounters(hits, misses, evictions, total)
    assert min(hits, misses, evictions) > 500
