"""Looks for the request that makes steps fail, where one does, and lowers limits where only a step's size was too much.

Knows the scheduler and the executor; nothing of what becomes of a request that is found.
"""

from __future__ import annotations

import logging

from npu_runner.core.batch import ScheduledBatch, probe_batch
from npu_runner.core.scheduler import Scheduler
from npu_runner.core.sequence import Sequence
from npu_runner.engine.executors.executor import Executor
from npu_runner.engine.quarantine import Quarantine
from npu_runner.errors import EngineDeadError, NpuRunnerError, OutOfMemoryError

logger = logging.getLogger(__name__)


class CulpritSearch:
    """While `is_on` a group of sequences runs at a time, and one step."""

    def __init__(self, scheduler: Scheduler, executor: Executor, *, uses_mrope: bool):
        self._scheduler = scheduler
        self._executor = executor
        self._uses_mrope = uses_mrope
        self._quarantine = Quarantine(scheduler)
        self._short_of_memory: ScheduledBatch | None = None
        """The step that ran out of memory, while it is looked for the request that is the cause."""

    @property
    def is_on(self) -> bool:
        return self._quarantine.is_on

    def step_failed(self, batch: ScheduledBatch, error: NpuRunnerError) -> Sequence | None:
        """Give up every step under way. Returns the culprit if it was alone in this one, else has its sequences run in
        halves. Raises EngineDeadError where not even a step of nobody's gets through."""
        if not self.is_on:  # what follows is the same again, until the cause is found
            logger.warning("%s; looking for the request that is the cause", error, exc_info=error)
        self._executor.abandon()
        failed = self._scheduler.abandon()
        self._probe(batch, error)
        if not failed:
            return None  # all of its requests had ended: whatever failed, nobody waits for it
        if not self.is_on:
            self._short_of_memory = batch if isinstance(error, OutOfMemoryError) else None
        return self._quarantine.split(failed)

    def step_ended(self) -> None:
        """One got through."""
        if self._quarantine.step_ended():
            self._lower_limits()

    def drop_the_aborted(self) -> None:
        """Go on where a group's sequences have been aborted."""
        self._quarantine.step_ended()

    def reset(self) -> None:
        self._quarantine.reset()
        self._short_of_memory = None

    def _probe(self, batch: ScheduledBatch, error: NpuRunnerError) -> None:
        try:
            self._executor.execute_model(probe_batch(uses_mrope=self._uses_mrope))
        except NpuRunnerError as again:
            raise EngineDeadError(
                f"{error}; a step of one token that was tried after it failed as well ({again})",
                request_ids=tuple(dict.fromkeys(batch.request_ids)),
            ) from error

    def _lower_limits(self) -> None:
        """A step that only its size drove out of memory is not made again: what its halves took is the limit now."""
        batch, self._short_of_memory = self._short_of_memory, None
        if batch is not None and not self._quarantine.found_any:
            self._scheduler.lower_limits(is_prefill=batch.is_prefill, num_tokens=batch.num_tokens // 2,
                                         num_seqs=batch.batch_size // 2)
            logger.warning("a %s ran out of memory and its halves did not: steps stay below half of it from now on",
                           batch.describe())
