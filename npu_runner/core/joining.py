"""Decides when waiting prompts interrupt the sequences that decode, and how much of a prompt one step takes.

A prefill of one prompt costs nearly as much as a prefill of many, so prompts are gathered while others decode. A
prefill starts once all of them can join and no more arrive, or once they fill half a step. Knows counts of slots,
tokens, images and blocks, no contents.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from itertools import islice

from npu_runner.core.block_manager import BlockManager
from npu_runner.core.sequence import Sequence

# With sequences decoding, a prefill is due when this share of max_num_seqs can join together ...
JOIN_SHARE = 8
# ... or this share of what a step may compute, in tokens ...
STEP_SHARE = 2
# ... or this many decode steps after the last prefill.
MAX_WAIT_STEPS = 16
# A prompt of at most this share of a step is not cut: it waits for the next one.
SHORT_SHARE = 64


class Joining:
    """Decides before each step, from arrivals, the kinds of past steps, and refused admissions."""

    def __init__(self, block_manager: BlockManager):
        self._blocks = block_manager
        self.reset()

    def reset(self) -> None:
        """No step was made and nothing has arrived, whatever stood here."""
        self._steps_since_prefill = 0
        self._steps_since_arrival = self._last_gap = 0
        self._num_arrivals = 0
        self._refused: tuple[int, int] | None = None
        self._looked_at: tuple[int, ...] = ()
        self._can_join = False

    def record_arrival(self) -> None:
        self._last_gap, self._steps_since_arrival = self._steps_since_arrival, 0
        self._num_arrivals += 1

    def record_step(self, *, is_prefill: bool) -> None:
        """Record that a step was scheduled."""
        self._steps_since_arrival += 1
        self._steps_since_prefill = 0 if is_prefill else self._steps_since_prefill + 1

    def record_refusal(self, num_running: int) -> None:
        """Record that the head of the queue got no blocks beside `num_running` sequences."""
        self._refused = self._blocks.num_given_back, num_running

    def is_due(self, waiting: SequenceOf[Sequence], num_running: int, num_slots: int, *, max_num_seqs: int,
               max_num_tokens: int) -> bool:
        """Whether a prefill is scheduled before the next decode step. `num_slots`: slots that are free."""
        if not waiting:
            return False
        if not num_running:
            return True
        if self._refused == (self._blocks.num_given_back, num_running):
            return False  # nothing was freed since
        if waiting[0].block_table:
            return True  # the rest of a prompt that is half computed
        is_overdue = self._steps_since_prefill >= MAX_WAIT_STEPS
        seen = (self._num_arrivals, len(waiting), num_slots, num_running, self._blocks.num_given_back, is_overdue,
                self._is_quiet)
        if seen != self._looked_at:
            self._looked_at = seen
            self._can_join = self._scan(waiting, num_running, num_slots, max_num_seqs, max_num_tokens, is_overdue)
        return self._can_join

    @property
    def _is_quiet(self) -> bool:
        """Whether no request has arrived for at least one step and twice the gap of the last two arrivals."""
        return self._steps_since_arrival >= max(1, 2 * self._last_gap)

    def _scan(self, waiting: SequenceOf[Sequence], num_running: int, num_slots: int, max_num_seqs: int,
              max_num_tokens: int, is_overdue: bool) -> bool:
        """Counts the sequences that can join, until the answer is clear."""
        num_free = self._blocks.num_free - num_running  # each of them may need one for its next token
        num_joining = num_tokens = 0
        for seq in islice(waiting, num_slots):
            num_new = min(seq.num_tokens - self._blocks.num_findable_tokens(seq), max_num_tokens)
            num_free -= self._blocks.num_blocks_for(num_new)
            if num_free < 0:
                break
            num_joining += 1
            num_tokens += num_new
            if (is_overdue or num_joining * JOIN_SHARE >= max_num_seqs or num_tokens * STEP_SHARE >= max_num_tokens):
                return True
        return num_joining == len(waiting) and self._is_quiet


def chunk_length(seq: Sequence, budget: int, seen_images: dict[bytes, int], *, max_image_tokens: int,
                 alignment: int | None) -> int:
    """Tokens of `seq`'s next chunk: `budget` at most; 0 where it has to wait for the next step.

    `seen_images`: the step's distinct images so far, with their tokens; this chunk's are added.
    `alignment`: the next chunk has to begin at a multiple of it, which the first images of a step may not prevent.
    """
    left = seq.num_uncomputed_tokens
    are_first_images = not seen_images
    num = _cut_at_image_budget(seq, min(left, budget), seen_images, max_image_tokens)
    if alignment is None or num == left:
        return num
    least = min(left, alignment)
    return num // alignment * alignment or (least if are_first_images and least <= budget else 0)


def _cut_at_image_budget(seq: Sequence, num: int, seen: dict[bytes, int], max_image_tokens: int) -> int:
    """Shorten the chunk so that the step's distinct images stay within max_image_tokens (one always may)."""
    start = seq.num_computed_tokens
    for span in seq.prompt.spans:
        if span.start + span.num_tokens <= start:
            continue
        if span.start >= start + num:
            break
        content_hash = seq.prompt.images[span.image_index].content_hash
        if content_hash in seen:
            continue
        if seen and sum(seen.values()) + span.num_tokens > max_image_tokens:
            return max(0, span.start - start)
        seen[content_hash] = span.num_tokens
    return num
