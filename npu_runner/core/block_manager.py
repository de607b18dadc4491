"""Owns the KV blocks: who holds which, which are free, which hold a prefix worth keeping. Knows no scheduling policy.

Block 0 is the null block that padded rows write to; it is never handed out. A full block is keyed by a chain hash over
its tokens, the pictures that overlap it and the key of the block before it, so two prompts share a block only if
everything up to its end agrees. Freed blocks keep their content until they are needed, oldest first.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from npu_runner.core.sequence import Sequence

_ROOT = b"npu_runner prefix cache"


@dataclass
class PrefixCacheCounters:
    """Prompt tokens looked up, and found."""

    queries: int = 0
    hits: int = 0


class BlockManager:
    """Hands out fixed-size KV blocks by id, with reference counts and a prefix cache.

    `num_blocks` counts the null block; `block_size` is in tokens.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True):
        assert num_blocks >= 2, f"{num_blocks} blocks leave none beside the null block"
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.counters = PrefixCacheCounters()
        self.peak_used = 0
        self.reset()

    def reset(self) -> None:
        """Every block is free and knows nothing, whatever stood here; sequences that hold any are forgotten."""
        self._ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, self.num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks nobody holds, cached ones included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks `seq` still needs to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(seq.block_table))

    def match_prefix(self, seq: Sequence) -> None:
        """Give `seq`, which holds no block, the cached blocks its tokens start with.

        The last token is always left to compute: its logits start decoding.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        if not self.enable_prefix_caching:
            return
        num_full = (seq.num_tokens - 1) // self.block_size
        for index in range(num_full):
            block = self._block_of_hash.get(self._hash(seq, index))
            if block is None:
                break
            self._take(block)
            seq.block_table.append(block)
        seq.num_computed_tokens = seq.num_cached_tokens = len(seq.block_table) * self.block_size
        seq.num_committed_blocks = len(seq.block_table)
        self._note_peak()

    def count_prefix_use(self, seq: Sequence) -> None:
        """Book what `match_prefix` found, once the sequence really starts."""
        if self.enable_prefix_caching:
            self.counters.queries += seq.num_tokens
            self.counters.hits += seq.num_cached_tokens

    def allocate(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend `seq` to hold `num_tokens` tokens. False, and nothing changed, when too few blocks are free."""
        missing = self.num_missing_blocks(seq, num_tokens)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block, _none = self._free.popitem(last=False)
            stale = self._hash_of_block.pop(block, None)
            if stale is not None:
                del self._block_of_hash[stale]
            self._ref_counts[block] = 1
            seq.block_table.append(block)
        self._note_peak()
        return True

    def without_room(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Those of `running` whose blocks do not hold their last token yet."""
        size = self.block_size
        return [seq for seq in running if seq.num_tokens > len(seq.block_table) * size]

    def commit(self, seq: Sequence) -> None:
        """Offer the blocks that `seq` has computed in full to other sequences."""
        num_full = seq.num_computed_tokens // self.block_size
        if not self.enable_prefix_caching or num_full <= seq.num_committed_blocks:
            return
        for index in range(seq.num_committed_blocks, num_full):
            block = seq.block_table[index]
            key = self._hash(seq, index)
            if key not in self._block_of_hash:  # else an equal block was computed at the same time: keep the first
                self._block_of_hash[key] = block
                self._hash_of_block[block] = key
        seq.num_committed_blocks = num_full

    def free(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`; the tail becomes reusable before the head, which more prompts share."""
        for block in reversed(seq.block_table):
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} freed twice"
            if self._ref_counts[block] == 0:
                self._free[block] = None
        seq.block_table.clear()
        seq.num_computed_tokens = seq.num_committed_blocks = 0

    def _take(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1

    def _note_peak(self) -> None:
        self.peak_used = max(self.peak_used, self.num_used)

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """Key of full block `index`; every key before it is computed, and kept, first."""
        while len(seq.block_hashes) <= index:
            number = len(seq.block_hashes)
            start, end = number * self.block_size, (number + 1) * self.block_size
            digest = hashlib.blake2b(seq.block_hashes[-1] if number else _ROOT, digest_size=16)
            digest.update(np.asarray(seq.tokens(start, end), dtype=np.int32).tobytes())
            for span in seq.prompt.spans:
                if span.start < end and span.start + span.num_tokens > start:
                    digest.update(seq.prompt.images[span.image_index].content_hash)
                    digest.update((span.start - start).to_bytes(8, "little", signed=True))
            seq.block_hashes.append(digest.digest())
        return seq.block_hashes[index]
