"""Where each sequence stands: it waits, is held back, runs, or is at its end. And what it holds: a slot and blocks.

Sequences wait in the order of their arrival. One that is preempted, or whose steps are rolled back, frees what it holds
and is computed again. Knows nothing of which tokens a step takes, nor of tensors or devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import chain

from npu_runner.core.batch import RunningTable
from npu_runner.core.block_manager import BlockManager
from npu_runner.core.drafts import Drafter
from npu_runner.core.joining import Joining
from npu_runner.core.sequence import Sequence, SequenceStatus
from npu_runner.request.outputs import FinishReason


class StepsUnderWay:
    """Oldest first. What a step brings to a sequence counts only in the epoch that the step was planned in."""

    def __init__(self) -> None:
        self._steps: deque[tuple[list[Sequence], list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    def launch(self, sequences: list[Sequence]) -> None:
        self._steps.append((sequences, [seq.epoch for seq in sequences]))

    def complete(self) -> list[Sequence | None]:
        """The oldest step has run: its sequences in batch order, None for one that has ended or restarted."""
        sequences, epochs = self._steps.popleft()
        return [seq if seq.epoch == epoch else None for seq, epoch in zip(sequences, epochs, strict=True)]

    def rollback(self) -> list[list[Sequence]]:
        """No step has run: the sequences of each that have not ended."""
        steps = [[seq for seq in sequences if not seq.is_finished] for sequences, _ in self._steps]
        self._steps.clear()
        return steps


class SequenceQueues:
    """All sequences of one engine. A scheduler plans steps over them, which stand in `under_way`."""

    def __init__(self, block_manager: BlockManager, table: RunningTable, drafter: Drafter | None):
        self.block_manager = block_manager
        self.drafter = drafter
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.under_way = StepsUnderWay()
        self._table = table
        self._joining = Joining(block_manager)
        self._ending: list[Sequence] = []
        """Sequences of which no more steps are made, and whose last tokens have not arrived."""
        self._unoffered: list[Sequence] = []
        """Sequences with full blocks whose last tokens were on their way when they were computed."""
        self._deferred: list[Sequence] = []
        """Sequences that the last step left out, since it takes a snapshot of the state that they can use."""
        self._alone: frozenset[int] | None = None
        self._held: list[Sequence] = []

    def add(self, seq: Sequence) -> None:
        self._joining.record_arrival()
        if self._can_run(seq):
            self.waiting.append(seq)
        else:
            self._held.append(seq)

    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running or self._held or self.under_way)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._held)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """Take a sequence that has ended (stopped or aborted, wherever it is) out and free what it holds.

        The queue is looked through for those that wait in it only: it may be long.
        """
        is_waiting = seq.status is SequenceStatus.WAITING
        for queue in (self.waiting, self._held) if is_waiting else (self.running, self._ending):
            if (is_waiting or seq.slot is not None) and seq in queue:  # without a slot it has left both of the latter
                queue.remove(seq)
        if reason == "error":
            self.block_manager.withdraw(seq, seq.num_cached_tokens)
        if self.drafter is not None and reason in ("stop", "length"):
            self.drafter.record_answer(seq)
        self._release(seq)
        seq.finish(reason)

    def compute_apart(self, seq: Sequence) -> bool:
        """Restart `seq`, whose logits were not finite, without blocks of other sequences; those that it used are
        withdrawn. A failed row may leave NaN in blocks before its own tokens. False if it used no blocks of others."""
        if seq.is_apart or not seq.num_cached_tokens:
            return False
        seq.is_apart = True
        self.block_manager.withdraw(seq)
        for queue in (self.running, self._ending):
            if seq in queue:
                queue.remove(seq)
        self._release(seq)
        seq.forget_expected()
        seq.status = SequenceStatus.WAITING
        if self.waiting and self.waiting[0].slot is not None and self.waiting[0].arrival > seq.arrival:
            self._preempt(self.waiting[0])
        self._requeue(seq)
        return True

    # -- steps that do not end -------------------------------------------------------------------------------------

    def rollback(self) -> list[Sequence]:
        """Roll back every step under way; returns the sequences of the oldest in batch order, without those that have
        ended.

        Every sequence that had begun frees its blocks and its slot and restarts with the tokens it has. What the steps
        left in the cache and in the sampler is discarded.
        """
        steps = self.under_way.rollback()
        self.block_manager.rollback_steps()
        everybody = {seq.seq_id: seq for seq in (*self.waiting, *self.running, *self._ending, *chain(*steps))}
        for seq in everybody.values():
            self.block_manager.free(seq)
            seq.forget_expected()
            seq.slot = None
            seq.status = SequenceStatus.WAITING
        self._forget_running()
        self.waiting = deque(sorted(everybody.values(), key=lambda seq: seq.arrival))
        self._deferred = []
        self._table.reset()
        self._joining.reset()
        return steps[0] if steps else []

    def run_alone(self, group: Iterable[Sequence] | None) -> None:
        """From now on only `group` runs and all others wait; None ends that. No step may be under way."""
        self.rollback()
        everybody = sorted((*self.waiting, *self._held), key=lambda seq: seq.arrival)
        self._alone = None if group is None else frozenset(seq.seq_id for seq in group)
        self.waiting = deque(seq for seq in everybody if self._can_run(seq))
        self._held = [seq for seq in everybody if not self._can_run(seq)]

    def reset(self) -> None:
        """Forget every sequence and everything that the cache holds, whatever stood here."""
        self.waiting.clear()
        self._forget_running()
        self._held, self._alone = [], None
        self._deferred = []
        self.under_way.rollback()
        self._joining.reset()
        self._table.reset()
        self.block_manager.reset()

    def _forget_running(self) -> None:
        self.running, self._ending, self._unoffered = [], [], []
        if self.drafter is not None:
            self.drafter.reset()

    def _can_run(self, seq: Sequence) -> bool:
        return self._alone is None or seq.seq_id in self._alone

    def _latest_arrival(self) -> Sequence:
        holders = [seq for seq in self.running if seq.block_table]
        if self.waiting and self.waiting[0].block_table:
            holders.append(self.waiting[0])
        return max(holders, key=lambda seq: seq.arrival)

    def _preempt(self, seq: Sequence) -> None:
        """Take everything from `seq` and queue it first; prompt and output are recomputed later."""
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self._release(seq)
        if seq in self.running:
            self.running.remove(seq)
            self._requeue(seq)
        seq.status = SequenceStatus.WAITING

    def _requeue(self, seq: Sequence) -> None:
        """Before all later arrivals."""
        index = next((i for i, other in enumerate(self.waiting) if other.arrival > seq.arrival), len(self.waiting))
        head_is_underway = index == 0 and bool(self.waiting) and self.waiting[0].slot is not None
        assert not head_is_underway, "a half-prefilled later arrival must have been preempted first"
        self.waiting.insert(index, seq)

    def _release(self, seq: Sequence) -> None:
        if seq.slot is not None:  # else it holds nothing
            self.block_manager.commit(seq)  # its last tokens may have arrived since it was last in a step
            self.block_manager.free(seq)
            self._table.leave(seq)
