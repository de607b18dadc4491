"""One rank, in this process. Knows nothing of other processes."""

from __future__ import annotations

from pathlib import Path

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.executors.base import Executor, RunnerCounters
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.model_runner import ModelRunner


class InlineExecutor(Executor):
    def __init__(self, config: RunnerConfig, model_path: Path):
        self._runner: ModelRunner | None = ModelRunner(config, model_path)
        self.info = self._runner.info()

    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        assert self._runner is not None, "the executor is closed"
        output = self._runner.execute_model(batch)
        assert output is not None, "rank 0 always samples"
        return output

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
