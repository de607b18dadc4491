"""Chooses which tokens run next. Knows nothing of tensors or devices.

A step is either a prefill of one or more prompts (or a chunk of one), or one token for every running sequence. With a
drafter (drafts.py) the latter also has drafts of the next tokens. First come, first served: only the head of the queue
may be cut into chunks, and the latest arrival is preempted first, by recompute. Prefills are gathered (joining.py).

Rows of one prefill step share what that step computes: each row's full blocks are offered before the next row is
chosen. A step writes the keys and values of all its rows, layer by layer, before any row reads them. A last block that
is shared in part is copied before the step. If the step writes it, a row with one token left reads it where it is, and
the copy comes with the step behind.

Steps are planned from counts alone: while one is under way, its tokens are expected and not known. Several steps may be
under way; one that cannot be planned before their tokens have arrived is not planned.

If the model has state beside the KV cache, a prefill step also lists the snapshots that it loads and saves. Every chunk
begins at a multiple of `state_alignment`, so that a prompt is cut alike whatever was cached.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from npu_runner.core.batch import RunningTable, ScheduledBatch, decode_batch, drafted_batch, prefill_batch
from npu_runner.core.block_manager import BlockManager
from npu_runner.core.drafts import Drafter
from npu_runner.core.joining import SHORT_SHARE, chunk_length
from npu_runner.core.queues import SequenceQueues
from npu_runner.core.sequence import Sequence, SequenceStatus


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """`max_image_tokens`: images that one prefill step may send through the vision tower, in merged tokens.
    `state_alignment`: None for a model without state beside the KV cache. `state_spares`: for what its drafts leave.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_image_tokens: int
    uses_mrope: bool = False
    state_alignment: int | None = None
    state_spares: range | None = None

    def __post_init__(self) -> None:
        least = self.least_batched_tokens
        assert self.max_num_batched_tokens >= least, f"{self.max_num_batched_tokens} tokens, no chunk is below {least}"

    @property
    def least_batched_tokens(self) -> int:
        """The least number of tokens of a prefill step with which every prompt makes progress."""
        return self.state_alignment or 1


class Scheduler(SequenceQueues):
    """Continuous batching over one BlockManager. `complete()` books the oldest of the steps that `schedule()` has put
    under way, `rollback()` gives up all of them."""

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager, drafter: Drafter | None = None):
        table = RunningTable(limits.max_num_seqs, block_manager.block_size, state_spares=limits.state_spares,
                             loses_blocks=block_manager.sliding_window is not None)
        super().__init__(block_manager, table, drafter)
        self.limits = limits
        self._block_size = block_manager.block_size

    def schedule(self) -> ScheduledBatch | None:
        """The next step, which is under way from now on. None when nothing is left to run, or when steps under way must
        be completed first."""
        self.block_manager.start_step()
        self._offer_arrived()
        self._release_those_at_their_end()
        if self._must_wait():
            return None
        if self._prefill_is_due() and (batch := self._prefill()):
            return batch
        running = self._choose_decode()
        if running is None:
            return None
        if not running:
            # The last one that ran may have been preempted for a head of the queue that holds blocks already.
            batch = self._prefill()
            can_go_on = batch is not None or bool(self.under_way) or not self.has_unfinished()
            assert can_go_on, "unfinished sequences, and none can run"
            return batch
        self._joining.record_step(is_prefill=False)
        drafts = [] if self.drafter is None or self.under_way else self._drafts(self.drafter, running)
        return self._decode(running, drafts)

    def _prefill(self) -> ScheduledBatch | None:
        chunks, state_saves = self._choose_prefill()
        if not chunks:
            self._joining.record_refusal(len(self.running))
            return None
        self._joining.record_step(is_prefill=True)
        batch = prefill_batch(chunks, self._table, state_saves, uses_mrope=self.limits.uses_mrope)
        batch.copies = self.block_manager.copies
        self._launch_prefill(chunks)
        return batch

    def _launch_prefill(self, chunks: SequenceOf[tuple[Sequence, int]]) -> None:
        """Count what the step that was just put together will have done: (sequence, number of tokens) of each row.

        It will bring a token to those whose prompt it ends.
        """
        for seq, num in chunks:
            seq.shared_block = 0
            seq.num_computed_tokens += num
            if not self.block_manager.has_offered_all(seq):  # it was offered when its row was chosen
                self._unoffered.append(seq)
            if not seq.num_uncomputed_tokens:
                seq.num_expected += 1
                seq.num_tokens += 1
                if seq.num_tokens == seq.max_num_tokens:
                    self._ending.append(seq)
        self._launch([seq for seq, _ in chunks])

    def _launch_decode(self, running: list[Sequence], full: list[int]) -> None:
        """The same, of a step of one token each; `full`: rows that have filled a block with it.

        One pass over all rows, and no more: it is made for every generated token.
        """
        for seq in running:
            seq.num_computed_tokens += 1
            seq.num_expected += 1
            seq.num_tokens = num_tokens = seq.num_tokens + 1
            if num_tokens == seq.max_num_tokens:
                self._ending.append(seq)
        for row in full:
            self._offer(running[row])
        self._launch(running)

    def _launch(self, sequences: list[Sequence]) -> None:
        self.block_manager.free_behind_window(sequences)
        self.block_manager.launch_step()
        self.under_way.launch(sequences)

    def _offer(self, seq: Sequence) -> None:
        self.block_manager.commit(seq)
        if not self.block_manager.has_offered_all(seq):
            self._unoffered.append(seq)

    def complete(self) -> list[Sequence | None]:
        """Book the oldest step under way, which has run; returns its sequences in batch order.

        None for a sequence that has ended or restarted.
        """
        self.block_manager.complete_step()
        return self.under_way.complete()

    def resolve_drafts(self) -> int:
        """Call it once the tokens of a completed step are booked. Returns how many of its drafts were kept."""
        if self.drafter is None:
            return 0
        resolved = self.drafter.resolve()
        going_on = [(seq, num) for seq, num in resolved if seq.status is SequenceStatus.RUNNING]
        running = [seq for seq, _ in going_on]
        if self._table.states is not None:
            self._table.states.resolve((seq.slot, num) for seq, num in going_on if seq.slot is not None)
        for seq in running:
            self.block_manager.free_behind_end(seq)
            self._offer(seq)
            self._table.record_shorter(seq)
        self.block_manager.free_behind_window(running)
        return sum(num for _, num in resolved)

    def _offer_arrived(self) -> None:
        """Full blocks whose last tokens were on their way when they were computed."""
        for seq in self._unoffered:
            self.block_manager.commit(seq)
        self._unoffered = [seq for seq in self._unoffered if not self.block_manager.has_offered_all(seq)]

    def _release_those_at_their_end(self) -> None:
        """Nothing more is computed for them: others may have what they hold while their last token is on its way."""
        if at_their_end := set(self._ending):
            self.running = [seq for seq in self.running if seq not in at_their_end]
        for seq in self._ending:
            if self.block_manager.has_offered_all(seq):
                self._release(seq)
        self._ending = [seq for seq in self._ending if seq.slot is not None]

    def _must_wait(self) -> bool:
        """Whether steps under way must be completed before the next one can be planned.

        A sequence at its end keeps its resources until the last token of its last full block has arrived: then the
        block can be offered. How many tokens a step with drafts brings is not known before, nor what is drafted then.
        """
        if not self.under_way or (self._ending and self.waiting):
            return bool(self.under_way)
        drafter = self.drafter
        return drafter is not None and (drafter.is_under_way or drafter.can_draft(self.running))

    def lower_limits(self, *, is_prefill: bool, num_tokens: int, num_seqs: int) -> None:
        """From now on prefill steps have no more than `num_tokens` tokens, or decode steps `num_seqs` sequences."""
        if is_prefill:
            lower = min(self.limits.max_num_batched_tokens, max(self.limits.least_batched_tokens, num_tokens))
            self.limits = replace(self.limits, max_num_batched_tokens=lower)
        else:
            self.limits = replace(self.limits, max_num_seqs=min(self.limits.max_num_seqs, max(1, num_seqs)))

    # -- prefill ---------------------------------------------------------------------------------------------------

    def _prefill_is_due(self) -> bool:
        if self._deferred and self.waiting:
            return True
        num_slots = min(self._table.num_free_slots, self.limits.max_num_seqs - len(self.running))
        return self._joining.is_due(self.waiting, len(self.running), num_slots, max_num_seqs=self.limits.max_num_seqs,
                                    max_num_tokens=self.limits.max_num_batched_tokens)

    def _choose_prefill(self) -> tuple[list[tuple[Sequence, int]], list[tuple[int, int, int]]]:
        """(sequence, number of tokens) of each row, and the states to keep: (row, tokens, snapshot slot)."""
        chunks: list[tuple[Sequence, int]] = []
        state_saves: list[tuple[int, int, int]] = []
        budget = self.limits.max_num_batched_tokens
        seen_images: dict[bytes, int] = {}
        deferred: list[Sequence] = []
        while self.waiting and budget > 0:
            seq = self.waiting[0]
            if not self._admit(seq, len(self.running) + len(deferred)):
                break
            if self._waits_for_a_snapshot(seq):
                self._release(seq)
                deferred.append(self.waiting.popleft())
                continue
            num = chunk_length(seq, budget, seen_images, max_image_tokens=self.limits.max_image_tokens,
                               alignment=self.limits.state_alignment)
            is_cut = num < seq.num_uncomputed_tokens
            # Only the head of the queue may be cut, and those that were left out stand before this one. A short one is
            # not worth it: the step for its rest would take it alone while others decode.
            is_short = bool(chunks) and seq.num_uncomputed_tokens * SHORT_SHARE <= self.limits.max_num_batched_tokens
            has_room = num > 0 and not (is_cut and (deferred or is_short))
            if has_room and not self._allocate_prefill(seq, num):
                if seq.copy_source:
                    self.block_manager.give_up_copy(seq)
                    continue
                has_room = False
            if not has_room:
                if not seq.block_table or seq.is_at_its_start:
                    self._release(seq)  # never started: it may not sit on blocks that others wait for
                break
            self._start_chunk(seq, num)
            state_saves += [(len(chunks), *save) for save in self.block_manager.save_states(seq, num)]
            chunks.append((seq, num))
            budget -= num
            if is_cut:
                break
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = SequenceStatus.RUNNING
        self.waiting.extendleft(reversed(deferred))
        self._deferred = deferred
        return chunks, state_saves

    def _start_chunk(self, seq: Sequence, num: int) -> None:
        """`seq` computes `num` tokens in the step that is being put together; the rows behind it find its blocks."""
        if seq.is_at_its_start:
            self.block_manager.count_prefix_use(seq)
            self.block_manager.start_copy(seq)
        self.block_manager.commit(seq, num)

    def _waits_for_a_snapshot(self, seq: Sequence) -> bool:
        """Whether `seq` starts with the next step, from a snapshot that this one takes. It waits for one step only."""
        return seq.is_at_its_start and seq not in self._deferred and self.block_manager.is_saving_for(seq)

    def _admit(self, seq: Sequence, num_before: int) -> bool:
        """A slot, and what the prefix cache has, for a sequence that starts or restarts behind `num_before` others."""
        if seq.slot is not None:
            return True
        if self._table.num_free_slots == 0 or num_before >= self.limits.max_num_seqs:
            return False
        self._table.enter(seq)
        self.block_manager.match_prefix(seq)
        return True

    def _allocate_prefill(self, seq: Sequence, num: int) -> bool:
        """Blocks for the chunk, leaving one block for each running sequence to grow into."""
        return self.block_manager.allocate(seq, seq.num_computed_tokens + num, num_spare=len(self.running))

    # -- decode ----------------------------------------------------------------------------------------------------

    def _choose_decode(self) -> list[Sequence] | None:
        """Every running sequence that has, or can be given, a block for its next token.

        None if a sequence would have to be preempted while steps are under way. One of them may end a sequence, and
        recomputation needs all tokens.
        """
        for seq in sorted(self._table.without_room(self.running), key=lambda seq: seq.arrival):
            while seq.slot is not None and not self.block_manager.allocate(seq, seq.num_tokens):
                if self.under_way:
                    return None
                self._preempt(self._latest_arrival())
        return self.running[:]

    def _drafts(self, drafter: Drafter, running: list[Sequence]) -> list[list[int]]:
        """The drafts of each sequence of `running`, with their blocks; an empty list if there are none. Drafts use no
        block that a running sequence may need for its next token and only spare states, so they preempt nothing."""
        room, states = self.limits.max_num_batched_tokens - len(running), self._table.states
        drafts = drafter.propose(running, room if states is None else min(room, states.num_free))
        for row, tokens in enumerate(drafts):
            seq = running[row]
            missing = self.block_manager.num_missing_blocks(seq, seq.num_tokens + len(tokens))
            if missing and self.block_manager.num_free - missing < len(running):
                drafts[row] = tokens[: len(seq.block_table) * self._block_size - seq.num_tokens]
            else:
                self.block_manager.allocate(seq, seq.num_tokens + len(tokens))
        return drafts if any(drafts) else []

    def _decode(self, running: list[Sequence], drafts: list[list[int]]) -> ScheduledBatch:
        """A decode step, with drafts if there are any."""
        batch = drafted_batch(running, drafts, self._table) if drafts else decode_batch(running, self._table)
        batch.copies = self.block_manager.copies
        if self.drafter is not None:
            batch.wants_drafts_B = self.drafter.wanted(running, drafts)
            self.drafter.launch(running, drafts)
        # Which blocks become full is known once drafts are kept: `resolve_drafts` offers them.
        self._launch_decode(running, [] if drafts else batch.rows_with_full_blocks(self._block_size))
        return batch
