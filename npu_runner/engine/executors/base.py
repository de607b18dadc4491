"""The contract of an executor. Knows nothing of scheduling or text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from npu_runner.core.batch import ScheduledBatch
from npu_runner.runner.base import ModelRunnerOutput, RunnerInfo


@dataclass(frozen=True)
class RunnerCounters:
    """What rank 0 counted since start-up."""

    vision_cache_hits: int = 0
    vision_cache_misses: int = 0
    vision_cache_evictions: int = 0
    vision_cache_bytes: int = 0
    num_images_encoded: int = 0
    prepare_seconds: float = 0.0
    launch_seconds: float = 0.0
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0


class Executor(ABC):
    """Ready once constructed. A rank that dies or hangs raises EngineDeadError naming it and what it was doing."""

    info: RunnerInfo

    @abstractmethod
    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        """Run one step on every rank; the result is rank 0's."""

    @abstractmethod
    def counters(self) -> RunnerCounters: ...

    @abstractmethod
    def close(self) -> None:
        """End every process and free every segment of shared memory. May be called twice."""
