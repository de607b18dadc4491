"""Finds the request that makes steps fail, or lowers limits if only a step's size was the cause.

Sequences of a failed step run again in halves, until one fails alone. A sequence that was alone in a step that failed
runs alone once more: its first failure may have been temporary. A group is done once each of its sequences has ended or
passed the token where it failed. Every failure makes the group smaller, and every other step advances a sequence, so
the search ends. Knows the scheduler and the executor; nothing of why steps fail, nor of what becomes of a request that
is found.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as SequenceOf

from npu_runner.core.batch import ScheduledBatch, probe_batch
from npu_runner.core.scheduler import Scheduler
from npu_runner.core.sequence import Sequence
from npu_runner.engine.executors.executor import Executor
from npu_runner.errors import EngineDeadError, NpuRunnerError, OutOfMemoryError

logger = logging.getLogger(__name__)

_Group = dict[int, tuple[Sequence, int]]
"""By seq_id, with the number of tokens that it had."""


class CulpritSearch:
    """While `is_on` only the first group of sequences runs, one step at a time, and all others wait."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, uses_mrope: bool):
        self._scheduler = scheduler
        self._executor = executor
        self._uses_mrope = uses_mrope
        self._groups: deque[_Group] = deque()
        self._found_any = False
        """Whether a sequence failed alone since the search was last on."""
        self._short_of_memory: ScheduledBatch | None = None
        """The step that ran out of memory, while the request that is the cause is searched for."""

    @property
    def is_on(self) -> bool:
        return bool(self._groups)

    def step_failed(self, batch: ScheduledBatch, error: NpuRunnerError) -> Sequence | None:
        """Roll back every step under way. Returns the culprit if it was alone in this one; else its sequences run again
        in halves. Raises EngineDeadError if even the test step, which belongs to no request, fails."""
        if not self.is_on:  # what follows is the same again, until the cause is found
            logger.warning("%s; looking for the request that is the cause", error, exc_info=error)
        self._executor.rollback()
        failed = self._scheduler.rollback()
        self._probe(batch, error)
        if not failed:
            return None  # all of its requests had ended, so the failure concerns none
        if not self.is_on:
            self._short_of_memory = batch if isinstance(error, OutOfMemoryError) else None
        return self._split(failed)

    def step_ended(self) -> None:
        """Record that a step has succeeded."""
        if self._go_on():
            self._lower_limits()

    def drop_the_aborted(self) -> None:
        """Go on where a group's sequences have been aborted."""
        self._go_on()

    def reset(self) -> None:
        self._groups.clear()
        self._short_of_memory = None

    def _probe(self, batch: ScheduledBatch, error: NpuRunnerError) -> None:
        try:
            self._executor.execute_model(probe_batch(uses_mrope=self._uses_mrope))
        except NpuRunnerError as again:
            raise EngineDeadError(
                f"{error}; a step of one token that was tried after it failed as well ({again})",
                request_ids=tuple(dict.fromkeys(batch.request_ids))) from error

    def _split(self, failed: SequenceOf[Sequence]) -> Sequence | None:
        """Returns the one of `failed`, if it ran alone; it is for the caller to end it."""
        is_first = not self.is_on
        if is_first:
            self._found_any = False
        rest = _remaining(self._groups.popleft()) if self.is_on else {}
        for seq in failed:
            rest.pop(seq.seq_id, None)
        half = len(failed) // 2
        is_culprit = not half and not is_first
        groups = [rest] if is_culprit else [_group(failed[:half]), _group(failed[half:]), rest]
        self._groups.extendleft(reversed([group for group in groups if group]))
        self._found_any |= is_culprit
        self._run_first()
        return failed[0] if is_culprit else None

    def _go_on(self) -> bool:
        """To the next group once the first is through. True when that was the last one."""
        if not self.is_on or _remaining(self._groups[0]):
            return False
        self._groups.popleft()
        self._run_first()
        return not self.is_on

    def _run_first(self) -> None:
        while self.is_on and not _remaining(self._groups[0]):
            self._groups.popleft()  # its sequences have been aborted
        group = [seq for seq, _ in self._groups[0].values()] if self.is_on else None
        self._scheduler.run_alone(group)

    def _lower_limits(self) -> None:
        """A step that only its size drove out of memory is not made again: what its halves took is the limit now."""
        batch, self._short_of_memory = self._short_of_memory, None
        if batch is not None and not self._found_any:
            self._scheduler.lower_limits(is_prefill=batch.is_prefill, num_tokens=batch.num_tokens // 2,
                                         num_seqs=batch.batch_size // 2)
            logger.warning("a %s ran out of memory and its halves did not: steps stay below half of it from now on",
                           batch.describe())


def _group(sequences: SequenceOf[Sequence]) -> _Group:
    return {seq.seq_id: (seq, seq.num_tokens) for seq in sequences}


def _remaining(group: _Group) -> _Group:
    """The requests of a group that have not finished."""
    return {key: (seq, num) for key, (seq, num) in group.items() if not seq.is_finished and seq.num_tokens <= num}
