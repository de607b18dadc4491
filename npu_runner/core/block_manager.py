"""Owns the KV blocks: which sequence holds which, which are free, which hold a cached prefix. Knows no scheduling
policy.

Block 0 is the null block that padded rows write to; it is never allocated. A full block is keyed by a chain hash over
its tokens, the images that overlap it and the previous block's key. So two prompts share a block only if everything up
to its end agrees. Where a head drafts, its keys and values at a place depend on the token behind it: then the key of a
block has one token more. Freed blocks keep their content until they are needed, oldest first. Where the model has state
beside the KV cache, a prefix can be used up to the last of its snapshots only. Where every layer slides, blocks behind
the window are freed while their sequence runs. With a window of w tokens, the token at place p sees the places p - w +
1 to p. A block that lies completely before the next token's window is never read again. Its entry in the block table
becomes the null block.

If a last block is shared in part, its tokens are copied into a block of the sequence's own (partial_blocks.py). The
source is held until a step with the copy is launched. Where a model has states, or a head drafts, nothing is copied:
snapshots lie at the ends of blocks.

The device works in order. So later steps may find what a step under way writes, and reuse the blocks that it reads.
Only a rollback has to withdraw anything.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from npu_runner.core.partial_blocks import PartialBlock, PartialBlocks
from npu_runner.core.sequence import Sequence
from npu_runner.core.state_snapshots import StateSnapshots

_ROOT = b"npu_runner prefix cache"


def first_needed_block(num_computed_tokens: int, window: int | None, block_size: int) -> int:
    """Index of the first block that the next token, or any after it, sees."""
    return 0 if window is None else max(0, num_computed_tokens - window + 1) // block_size


def most_blocks(max_model_len: int, window: int | None, max_chunk: int, block_size: int) -> int:
    """Blocks that one sequence holds at most, while a step computes `max_chunk` tokens of it."""
    whole = -(-max_model_len // block_size)
    if window is None:
        return whole
    # What the chunk's first token sees before it, and the chunk; the first block may begin just before the window.
    return min(whole, -(-(window - 1 + max_chunk) // block_size) + 1)


def pop_blocks_behind(seq: Sequence, window: int, block_size: int) -> list[int]:
    """Take the blocks that no token will see again out of `seq`'s table, which keeps null entries; returns them."""
    start = seq.num_null_blocks
    end = min(first_needed_block(seq.num_computed_tokens, window, block_size), len(seq.block_table))
    if end <= start:
        return []
    behind = seq.block_table[start:end]
    seq.block_table[start:end] = [0] * len(behind)
    seq.num_null_blocks = end
    return behind


def longest_usable(blocks: list[int], window: int, block_size: int) -> list[int]:
    """The longest prefix of `blocks`, 0 for one that is not there, which has all that the token behind it sees.

    Before that stands the null block, which is not read.
    """
    num_usable = num_in_a_row = 0
    for count, block in enumerate(blocks, 1):
        num_in_a_row = num_in_a_row + 1 if block else 0
        if num_in_a_row >= count - first_needed_block(count * block_size, window, block_size):
            num_usable = count
    first = first_needed_block(num_usable * block_size, window, block_size)
    return [0] * first + blocks[first:num_usable]


@dataclass
class PrefixCacheCounters:
    """Prompt tokens looked up, and found."""

    queries: int = 0
    hits: int = 0


class BlockManager:
    """Hands out fixed-size KV blocks by id, with reference counts and a prefix cache.

    `num_blocks` counts the null block; `block_size` is in tokens. A model with state has a prefix cache only with
    `snapshots` of it. `sliding_window`: no layer sees more tokens, itself included; None: some layer sees all.
    `keys_look_ahead`: a block depends on the token behind it.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True,
                 snapshots: StateSnapshots | None = None, sliding_window: int | None = None,
                 keys_look_ahead: bool = False):
        assert num_blocks >= 2, f"{num_blocks} blocks leave none beside the null block"
        assert snapshots is None or enable_prefix_caching, "snapshots are for the prefix cache"
        assert snapshots is None or snapshots.alignment % block_size == 0, "a snapshot lies at the end of a block"
        assert snapshots is None or sliding_window is None, "a snapshot's prefix has all of its blocks"
        self.snapshots = snapshots
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self._num_ahead = int(keys_look_ahead)
        self.counters = PrefixCacheCounters()
        self.peak_used = 0
        self.reset()

    def reset(self) -> None:
        """Every block is free and knows nothing, whatever stood here; sequences that hold any are forgotten."""
        self._ref_counts = [0] * self.num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, self.num_blocks))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        can_copy = self.enable_prefix_caching and self.snapshots is None and not self._num_ahead
        self._partial_blocks = PartialBlocks(self.block_size) if can_copy else None
        self.copies: list[tuple[int, int]] = []
        """(source, target) blocks of the step being put together, copied before its forward."""
        self._later_copies: list[tuple[int, int]] = []
        self._offered: list[int] = []
        self._under_way: deque[list[int]] = deque()
        self.num_given_back = 0
        """Blocks that became free, in all."""
        if self.snapshots is not None:
            self.snapshots.reset()

    @property
    def num_free(self) -> int:
        """Free blocks, cached ones included."""
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    @property
    def num_used(self) -> int:
        return self.num_usable - len(self._free)

    def num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks `seq` still needs to hold its first `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(seq.block_table))

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_findable_tokens(self, seq: Sequence) -> int:
        """About how many tokens the waiting `seq` would find in the prefix cache. An estimate by bisection: blocks
        leave the cache from the end of a prefix on. Ignores snapshots and windows."""
        full = range(seq.most_cached_tokens // self.block_size)
        if not full or not self.enable_prefix_caching:
            return 0
        return self.block_size * bisect_left(full, True, key=lambda i: self._hash(seq, i) not in self._block_of_hash)

    def match_prefix(self, seq: Sequence) -> None:
        """Give `seq`, which holds no block, the cached blocks its tokens start with.

        The last token is always left to compute: its logits start decoding.
        """
        assert not seq.block_table, f"sequence {seq.seq_id} already holds blocks"
        seq.num_computed_tokens = seq.num_cached_tokens = 0
        most = seq.most_cached_tokens if self.enable_prefix_caching else 0
        if most <= 0:
            seq.state_source, seq.snapshot_positions = None, ()
            return
        blocks = self._cached_blocks(seq, most)
        if self.snapshots is not None:
            blocks = blocks[: self._match_state(seq, self.snapshots, len(blocks) * self.block_size) // self.block_size]
        seq.num_null_blocks = blocks.count(0)
        for block in blocks[seq.num_null_blocks:]:
            self._reference(block)
        seq.block_table.extend(blocks)
        seq.num_computed_tokens = seq.num_cached_tokens = len(seq.block_table) * self.block_size
        seq.num_committed_blocks = len(seq.block_table)
        if self._partial_blocks is not None:
            self._match_partial(seq, self._partial_blocks, most)

    def _match_partial(self, seq: Sequence, partial: PartialBlocks, most_cached: int) -> None:
        """Hold the block that has the next tokens of `seq`, if there is one: `start_copy` gives `seq` what it has."""
        start = seq.num_cached_tokens
        most = min(most_cached - start, self.block_size - 1)
        if most <= 0:
            return
        wanted = PartialBlock.from_sequence(seq, start, min(start + self.block_size, seq.num_tokens))
        found = partial.find(self._parent(seq, start // self.block_size), wanted, most,
                                can_be_new=start + most + 1 == seq.num_tokens)
        if found is not None:
            self._reference(found.block)
            seq.copy_source, seq.shared_block = found.block, found.block if found.is_new else 0
            seq.num_computed_tokens = seq.num_cached_tokens = start + found.num_tokens

    def start_copy(self, seq: Sequence) -> None:
        """`seq`, which has a block for what `match_prefix` has found, is in the step being put together.

        If that step writes the source, it is copied with the step behind.
        """
        if seq.copy_source:
            copies = self._later_copies if seq.shared_block else self.copies
            copies.append((seq.copy_source, seq.block_table[seq.num_cached_tokens // self.block_size]))
            seq.copy_source = 0
            self.free_behind_window([seq])

    def give_up_copy(self, seq: Sequence) -> None:
        """Let `seq`, which has not started, compute what it would copy: the source may be the block that is missing."""
        self._give_back([seq.copy_source])
        seq.copy_source = seq.shared_block = 0
        seq.num_computed_tokens = seq.num_cached_tokens = len(seq.block_table) * self.block_size

    def _cancel_copies(self, block: int) -> None:
        """`block` was given back: nothing is copied into it."""
        sources = [source for source, target in (*self.copies, *self._later_copies) if target == block]
        if sources:
            self.copies = [copy for copy in self.copies if copy[1] != block]
            self._later_copies = [copy for copy in self._later_copies if copy[1] != block]
            self._give_back(sources)

    def _cached_blocks(self, seq: Sequence, most_cached: int) -> list[int]:
        """The cached blocks of the prefix of `seq`; blocks outside the sliding window of its next token are null."""
        window = self.sliding_window
        blocks: list[int] = []
        for index in range(most_cached // self.block_size):
            block = self._block_of_hash.get(self._hash(seq, index), 0)
            if not block and window is None:
                break
            blocks.append(block)
        return blocks if window is None else longest_usable(blocks, window, self.block_size)

    def _match_state(self, seq: Sequence, snapshots: StateSnapshots, num_cached: int) -> int:
        """Tokens, at most `num_cached`, after which `seq`'s state is known; says where to take snapshots beyond.

        Snapshots are taken at the last place that a repeat of this prompt could use, and where prompts part: others
        share this prefix further than any snapshot.
        """
        step = snapshots.alignment
        parting, last = num_cached // step * step, seq.most_cached_tokens // step * step
        found = next((end for end in range(parting, 0, -step) if self._key_at(seq, end) in snapshots), 0)
        seq.state_source = snapshots.load(self._key_at(seq, found)) if found else None
        seq.snapshot_positions = tuple(sorted({end for end in (parting, last) if end > found}))
        return found

    def save_states(self, seq: Sequence, num_tokens: int) -> list[tuple[int, int]]:
        """(tokens of the chunk, snapshot slot): states to be kept while `seq` computes its next `num_tokens` tokens."""
        if self.snapshots is None:
            return []
        start = seq.num_computed_tokens
        slots = [(end - start, self.snapshots.save(self._key_at(seq, end))) for end in seq.snapshot_positions
                 if start < end <= start + num_tokens]
        return [(offset, slot) for offset, slot in slots if slot is not None]

    def is_saving_for(self, seq: Sequence) -> bool:
        """Whether the step that is being put together will take a snapshot that `seq`, which starts, can use."""
        snapshots = self.snapshots
        if snapshots is None or not snapshots.is_saving_any:
            return False
        return any(snapshots.is_saving(self._key_at(seq, end)) for end in
                   range(seq.num_cached_tokens + snapshots.alignment, seq.num_tokens, snapshots.alignment))

    # -- steps under way -------------------------------------------------------------------------------------------

    def start_step(self) -> None:
        """A step is put together from here on."""
        if self.snapshots is not None:
            self.snapshots.start_step()

    def launch_step(self) -> None:
        """The step that was put together is under way: those after it find the blocks and states that it writes."""
        self._under_way.append(self._offered)
        self._offered = []
        launched, self.copies, self._later_copies = self.copies, self._later_copies, []
        self._give_back(source for source, _ in launched)
        if self._partial_blocks is not None:
            self._partial_blocks.launch()
        if self.snapshots is not None:
            self.snapshots.launch()

    def complete_step(self) -> None:
        """The oldest step under way has run."""
        self._under_way.popleft()
        if self.snapshots is not None:
            self.snapshots.complete()

    def rollback_steps(self) -> None:
        """The steps under way did not run to their end: what they were to write must not be found."""
        if self.snapshots is not None:
            self.snapshots.rollback()
        for block in chain(self._offered, *self._under_way):
            self._withdraw(block)
        self._offered = []
        self._under_way.clear()
        sources = [source for source, _ in (*self.copies, *self._later_copies)]
        self.copies, self._later_copies = [], []
        self._give_back(sources)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def count_prefix_use(self, seq: Sequence) -> None:
        """Book what `match_prefix` found, once the sequence really starts."""
        if self.enable_prefix_caching:
            self.counters.queries += seq.num_tokens
            self.counters.hits += seq.num_cached_tokens
        if self.snapshots is not None and seq.state_source is not None:
            self.snapshots.counters.used += 1

    def allocate(self, seq: Sequence, num_tokens: int, num_spare: int = 0) -> bool:
        """Extend `seq` to hold `num_tokens` tokens. False, and nothing changed, unless `num_spare` blocks stay free."""
        missing = self.num_missing_blocks(seq, num_tokens)
        if missing + num_spare > len(self._free):
            return False
        for _ in range(missing):
            block, _none = self._free.popitem(last=False)
            self._withdraw(block)
            self._ref_counts[block] = 1
            seq.block_table.append(block)
        self.peak_used = max(self.peak_used, self.num_used)
        return True

    def withdraw(self, seq: Sequence, num_tokens: int = 0) -> None:
        """Removes the blocks of `seq` behind its first `num_tokens` tokens from the prefix cache, whichever sequence
        computed them. Blocks not offered yet never will be."""
        for key in seq.block_hashes[num_tokens // self.block_size :]:
            block = self._block_of_hash.get(key)
            if block is not None:
                self._withdraw(block)
        if self._partial_blocks is not None:
            for index in range(num_tokens // self.block_size, len(seq.block_hashes) + 1):
                self._partial_blocks.forget(self._parent(seq, index))
        seq.num_committed_blocks = len(seq.block_table)

    def _withdraw(self, block: int) -> None:
        """Removes `block` from the prefix cache."""
        stale = self._hash_of_block.pop(block, None)
        if stale is not None:
            del self._block_of_hash[stale]
            if self.snapshots is not None:
                self.snapshots.free(stale)
        if self._partial_blocks is not None:
            self._partial_blocks.withdraw(block)

    def commit(self, seq: Sequence, num_tokens: int = 0) -> None:
        """Offer the full blocks of `seq` to other sequences, as far as their tokens are known. `num_tokens`: those that
        the step being planned computes count as computed."""
        num_full = min(seq.num_computed_tokens + num_tokens, seq.num_known_tokens - self._num_ahead) // self.block_size
        if num_tokens and self._partial_blocks is not None and not seq.shared_block:
            self._offer_partial(seq, self._partial_blocks, seq.num_computed_tokens + num_tokens)
        if not self.enable_prefix_caching or num_full <= seq.num_committed_blocks:
            return
        # Blocks freed behind the window before their tokens had arrived may have another owner.
        for index in range(max(seq.num_committed_blocks, seq.num_null_blocks), num_full):
            block = seq.block_table[index]
            key = self._hash(seq, index)
            if key not in self._block_of_hash or self._replaces(key):
                self._block_of_hash[key] = block
                self._hash_of_block[block] = key
                self._offered.append(block)
        seq.num_committed_blocks = num_full

    def _offer_partial(self, seq: Sequence, partial: PartialBlocks, end: int) -> None:
        """Offer the blocks that a step fills with prompt tokens up to `end`, the last one if it is filled in part."""
        for index in range(max(seq.num_computed_tokens // self.block_size, seq.num_null_blocks),
                           self.num_blocks_for(end)):
            start, block = index * self.block_size, seq.block_table[index]
            offered = PartialBlock.from_sequence(seq, start, min(start + self.block_size, end))
            if partial.offer(self._parent(seq, index), block, offered):
                self._offered.append(block)

    def has_offered_all(self, seq: Sequence) -> bool:
        """No full block of `seq` waits for its tokens to arrive."""
        return not self.enable_prefix_caching or seq.num_computed_tokens // self.block_size == seq.num_committed_blocks

    def _replaces(self, key: bytes) -> bool:
        """Whether an equal block, just computed, takes the place of the one that is known by `key`.

        As a rule the first is kept. With state, a prefix whose blocks are cached may be computed again. The first
        copies would then age and be evicted while the new ones are in use.
        """
        first = self._block_of_hash[key]
        if self.snapshots is None or self._ref_counts[first]:
            return False
        del self._hash_of_block[first]
        self._free.move_to_end(first, last=False)
        return True

    def free_behind_window(self, sequences: Iterable[Sequence]) -> None:
        """Give back those blocks that no token to come will see; they stay in the prefix cache until reused."""
        if self.sliding_window is None:
            return
        for seq in sequences:
            self._give_back(pop_blocks_behind(seq, self.sliding_window, self.block_size))

    def free_behind_end(self, seq: Sequence) -> None:
        """Give back the blocks that its tokens do not reach: drafts that were not kept have left them."""
        end = self.num_blocks_for(seq.num_tokens)
        self._give_back(reversed(seq.block_table[end:]))
        del seq.block_table[end:]

    def free(self, seq: Sequence) -> None:
        """Give back all blocks of `seq`; the tail becomes reusable before the head, which more prompts share."""
        self._give_back(reversed(seq.block_table[seq.num_null_blocks:]))
        if seq.copy_source:
            self._give_back([seq.copy_source])
        seq.copy_source = seq.shared_block = 0
        seq.block_table.clear()
        seq.num_null_blocks = 0
        seq.num_computed_tokens = seq.num_committed_blocks = 0

    def _give_back(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self._ref_counts[block] -= 1
            assert self._ref_counts[block] >= 0, f"block {block} freed twice"
            if self._ref_counts[block] == 0:
                self._free[block] = None
                self.num_given_back += 1
                if self.copies or self._later_copies:
                    self._cancel_copies(block)

    def _reference(self, block: int) -> None:
        if self._ref_counts[block] == 0:
            del self._free[block]
            self.peak_used = max(self.peak_used, self.num_used)
        self._ref_counts[block] += 1

    def _key_at(self, seq: Sequence, end: int) -> bytes:
        return self._hash(seq, end // self.block_size - 1)

    def _parent(self, seq: Sequence, index: int) -> bytes:
        """The key of all before block `index`."""
        return self._hash(seq, index - 1) if index else _ROOT

    def _hash(self, seq: Sequence, index: int) -> bytes:
        """Key of full block `index`; every key before it is computed, and kept, first."""
        while len(seq.block_hashes) <= index:
            number = len(seq.block_hashes)
            start, end = number * self.block_size, (number + 1) * self.block_size + self._num_ahead
            digest = hashlib.blake2b(seq.block_hashes[-1] if number else _ROOT, digest_size=16)
            digest.update(seq.token_array(start, end).tobytes())
            for span in seq.prompt.spans:
                if span.start < end and span.start + span.num_tokens > start:
                    digest.update(seq.prompt.images[span.image_index].content_hash)
                    digest.update((span.start - start).to_bytes(8, "little", signed=True))
                    if span.later is not None:  # equal frames shown at other times have other keys and values
                        digest.update(span.later.to_bytes(8, "little"))
            seq.block_hashes.append(digest.digest())
        return seq.block_hashes[index]
