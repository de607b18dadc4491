"""One rank, in this process. Knows nothing of other processes."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.executors.base import Executor, RunnerCounters
from npu_runner.engine.executors.channel import RING_SIZE
from npu_runner.errors import EngineDeadError, NpuRunnerError, StepError
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.model_runner import ModelRunner


class InlineExecutor(Executor):
    def __init__(self, config: RunnerConfig, model_path: Path):
        self._runner: ModelRunner | None = ModelRunner(config, model_path)
        self._under_way: deque[ScheduledBatch] = deque()
        self.info = self._runner.info()

    def submit(self, batch: ScheduledBatch) -> None:
        assert len(self._under_way) < RING_SIZE, f"{RING_SIZE} steps are under way already"
        self._under_way.append(batch)

    def collect(self) -> ModelRunnerOutput:
        assert self._runner is not None, "the executor is closed"
        batch = self._under_way.popleft()
        try:
            output = self._runner.execute_model(batch)
        except NpuRunnerError:
            raise
        except Exception as error:
            # The border between a model, whoever wrote it, and the requests that it serves.
            what = f"a {batch.describe()} failed: {type(error).__name__}: {error}"
            if self._runner.platform.is_device_failure(error):
                raise EngineDeadError(what) from error
            raise StepError(what) from error
        assert output is not None, "rank 0 always samples"
        return output

    def abandon(self) -> None:
        self._under_way.clear()
        if self._runner is not None:
            # The interrupt may have come while a picture was being booked, here in this process.
            self._runner.vision_cache.release()

    def counters(self) -> RunnerCounters:
        return RunnerCounters() if self._runner is None else runner_counters(self._runner)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None


def runner_counters(runner: ModelRunner) -> RunnerCounters:
    cache, clock = runner.vision_cache.counters, runner.clock
    return RunnerCounters(
        cache.hits, cache.misses, cache.evictions, cache.num_bytes, runner.num_images_encoded,
        clock.prepare_seconds, clock.launch_seconds, clock.sample_seconds, clock.wait_seconds,
    )
