"""Copy-on-write of a partly shared block: finds a block whose first tokens are the next ones of a prompt, so that they
are copied and not computed. Knows no scheduling policy, and nothing of which blocks are in use.

A whole block is found by its key (block_manager.py). Here a block is known by the key of the block before it and by its
tokens, so a prompt may part from them anywhere within the block. Later slots of a block may be written at any time; the
tokens that it is known by stay.

A block that the step being put together writes cannot be copied before that step. A prompt of which only the last token
is left may still read it there, if that token is equal as well (`is_new`).
"""

from __future__ import annotations

from typing import NamedTuple

from npu_runner.core.sequence import Sequence

# The prompts that part behind one system prompt may be thousands. Any of them has what is common to all.
_MOST_OF_A_PARENT = 4
# To copy a block costs as much whatever is shared of it: fewer tokens than this share of a block are computed, unless
# they are all that is left. Most chats have the first words of a template in common.
_LEAST_SHARE = 4
_FIRST_TOKEN = 2**32 - 1  # where most prompts without a template part: nothing else of them is compared


class PartialBlock(NamedTuple):
    """The `num_tokens` leading tokens of a block, and its images: (start, hash, place in time), `start` counted from
    the block. `tokens`: their int32 ids as one integer, the first one lowest: one operation finds where two part."""

    num_tokens: int
    tokens: int
    images: frozenset[tuple[int, bytes, int | None]]

    @classmethod
    def from_sequence(cls, seq: Sequence, start: int, end: int) -> PartialBlock:
        """The tokens [start, end) of `seq`, at most a block of them."""
        tokens = int.from_bytes(seq.token_array(start, end).tobytes(), "little")
        images = frozenset([(span.start - start, seq.prompt.images[span.image_index].content_hash, span.later)
                            for span in seq.prompt.spans if span.start < end and span.start + span.num_tokens > start])
        return cls(end - start, tokens, images)

    def num_common(self, other: PartialBlock) -> int:
        """Leading tokens that are equal, with equal images up to there."""
        most = min(self.num_tokens, other.num_tokens)
        if different := self.tokens ^ other.tokens:
            most = min(most, ((different & -different).bit_length() - 1) // 32)
        if self.images == other.images:
            return most
        return min(most, *(max(0, start) for start, *_ in self.images ^ other.images))


class Found(NamedTuple):
    """`num_tokens` first tokens of `block`. `is_new`: the step being put together writes them."""

    block: int
    num_tokens: int
    is_new: bool


class PartialBlocks:
    """Blocks by the key of the block before; the latest few of each."""

    def __init__(self, block_size: int) -> None:
        self._least = max(1, block_size // _LEAST_SHARE)
        self._of_parent: dict[bytes, dict[int, PartialBlock]] = {}
        self._parent_of: dict[int, bytes] = {}
        self._new: set[int] = set()

    def offer(self, parent: bytes, block: int, offered: PartialBlock) -> bool:
        """Make `block`, written by the step being put together, known. False if another one has its tokens."""
        known, first = self._of_parent.setdefault(parent, {}), offered.tokens & _FIRST_TOKEN
        if any([its.tokens & _FIRST_TOKEN == first and other != block
                and its.num_common(offered) == offered.num_tokens for other, its in known.items()]):
            return False
        known.pop(block, None)
        if len(known) == _MOST_OF_A_PARENT:
            self.withdraw(next(iter(known)))
        self._of_parent.setdefault(parent, known)[block] = offered
        self._parent_of[block] = parent
        self._new.add(block)
        return True

    def find(self, parent: bytes, wanted: PartialBlock, most: int, *, can_be_new: bool) -> Found | None:
        """The block with the most of the first `most` tokens of `wanted`. `can_be_new`: only the token behind these is
        left of the sequence."""
        best = None
        for block, known in self._of_parent.get(parent, {}).items():
            if (known.tokens ^ wanted.tokens) & _FIRST_TOKEN:
                continue
            num, is_new = known.num_common(wanted), block in self._new
            if is_new and not (can_be_new and num > most):
                continue
            if num >= min(self._least, most) > 0 and (best is None or min(num, most) > best.num_tokens):
                best = Found(block, min(num, most), is_new)
        return best

    def launch(self) -> None:
        """The step that was put together is under way: those after it may copy what it writes."""
        self._new.clear()

    def withdraw(self, block: int) -> None:
        parent = self._parent_of.pop(block, None)
        if parent is not None:
            self._new.discard(block)
            del self._of_parent[parent][block]
            if not self._of_parent[parent]:
                del self._of_parent[parent]

    def forget(self, parent: bytes) -> None:
        """Withdraw all that come behind `parent`."""
        for block in list(self._of_parent.get(parent, ())):
            self.withdraw(block)
