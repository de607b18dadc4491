"""The contract of an executor. Knows nothing of scheduling or text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from npu_runner.core.batch import ScheduledBatch
from npu_runner.errors import RequestError
from npu_runner.grammars.matchers import Rule
from npu_runner.request.outputs import RunnerCounters
from npu_runner.runner.base import ModelRunnerOutput, RunnerInfo

Progress = Callable[[str], None]
"""Called with what a rank does while it starts: `loading weights: 1.20 GiB of 5.60 GiB`."""
CLOSED = "the model was closed: by close(), at the end of a with block, or by an error before; load it again"


def silent(phase: str) -> None:
    """A progress callback that does nothing."""


class Executor(ABC):
    """Ready once constructed. At most `RING_SIZE` steps are under way.

    An error that a step's requests may have caused, and that the executor survives, is a RequestError, OutOfMemoryError
    or StepError. A rank that dies, hangs or loses its device is an EngineDeadError that names it and what it was doing.
    """

    info: RunnerInfo

    @abstractmethod
    def submit(self, batch: ScheduledBatch) -> None:
        """Hand one step to every rank; returns without waiting for it."""

    @abstractmethod
    def collect(self) -> ModelRunnerOutput:
        """The result of the oldest step under way, which is rank 0's, once all ranks have run it."""

    @abstractmethod
    def rollback(self) -> None:
        """Forget every step under way, interrupted at whatever place: no later `collect` returns its result."""

    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        """One step with nothing else under way."""
        self.submit(batch)
        return self.collect()

    @property
    def builds_here(self) -> bool:
        """Whether `build_rules` is no call of another process, so that it costs nothing to begin early."""
        return False

    @abstractmethod
    def build_rules(self, rules: Sequence[Rule], patience: float) -> dict[int, RequestError | None]:
        """As steps do with `new_rules` and `ModelRunnerOutput.rules`, where none is under way: waits until all that was
        asked for is done, `patience` seconds at most."""

    @abstractmethod
    def counters(self) -> RunnerCounters: ...

    @abstractmethod
    def close(self) -> None:
        """End every process and free every segment of shared memory. May be called twice."""
