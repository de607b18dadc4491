"""One rank, in this process. Knows nothing of other processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.executors.executor import CLOSED, Executor, Progress
from npu_runner.engine.executors.rank_channel import RING_SIZE
from npu_runner.errors import EngineDeadError, NpuRunnerError, RequestError, StepError
from npu_runner.grammars.matchers import Rule
from npu_runner.request.outputs import RunnerCounters
from npu_runner.runner.base import ModelRunnerOutput
from npu_runner.runner.clocks import STEP_PHASES
from npu_runner.runner.model_runner import ModelRunner
from npu_runner.strategies import OpenedCheckpoint


@dataclass
class _Step:
    """A step under way, or what kept it from being handed over."""

    batch: ScheduledBatch
    handle: Any = None
    error: NpuRunnerError | None = None


class InlineExecutor(Executor):
    def __init__(self, checkpoint: OpenedCheckpoint, wants_grammars: Callable[[], bool], progress: Progress,
                 fallbacks: Mapping[str, str]):
        self._runner: ModelRunner | None = ModelRunner(checkpoint, progress=progress, wants_grammars=wants_grammars,
                                                       fallbacks=fallbacks)
        self._under_way: deque[_Step] = deque()
        self.info = self._runner.info()

    def submit(self, batch: ScheduledBatch) -> None:
        assert len(self._under_way) < RING_SIZE, f"{RING_SIZE} steps are under way already"
        runner = self._ready_runner()
        step = _Step(batch)
        # A step behind a failed one cannot run: the collector of the failed one rolls both back.
        if not any(before.error for before in self._under_way):
            try:
                with self._border(batch):
                    step.handle = runner.submit(batch)
            except NpuRunnerError as error:
                step.error = error
        self._under_way.append(step)

    def collect(self) -> ModelRunnerOutput:
        runner = self._ready_runner()
        step = self._under_way.popleft()
        if step.error is not None:
            raise step.error
        assert step.handle is not None, "a step behind one that failed is rolled back with it"
        with self._border(step.batch):
            output = runner.collect(step.handle)
        assert output is not None, "rank 0 always samples"
        return output

    @contextmanager
    def _border(self, batch: ScheduledBatch) -> Iterator[None]:
        """The border between a model, ours or a package's, and the requests that it serves."""
        try:
            yield
        except NpuRunnerError:
            raise
        except Exception as error:
            what = f"a {batch.describe()} failed: {type(error).__name__}: {error}"
            if self._ready_runner().platform.devices.is_failure(error):
                raise EngineDeadError(what) from error
            raise StepError(what) from error

    def _ready_runner(self) -> ModelRunner:
        if self._runner is None:
            raise EngineDeadError(CLOSED)
        return self._runner

    def rollback(self) -> None:
        self._under_way.clear()
        if self._runner is not None:
            # The interrupt may have come while an image was being booked, here in this process.
            self._runner.vision_cache.release()

    @property
    def builds_here(self) -> bool:
        return self._runner is not None

    def build_rules(self, rules: Sequence[Rule], patience: float) -> dict[int, RequestError | None]:
        return self._ready_runner().build_rules(rules, patience)

    def counters(self) -> RunnerCounters:
        return RunnerCounters() if self._runner is None else runner_counters(self._runner)

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._runner = None


def runner_counters(runner: ModelRunner) -> RunnerCounters:
    cache, seconds = runner.vision_cache.counters, runner.steps.clock.seconds
    return RunnerCounters(
        vision_cache_hits=cache.hits, vision_cache_misses=cache.misses, vision_cache_evictions=cache.evictions,
        vision_cache_bytes=cache.num_bytes, vision_cache_host_hits=cache.host_hits,
        vision_cache_host_bytes=cache.host_bytes, num_images_encoded=runner.steps.image_encoder.num_encoded,
        **{f"{phase}_seconds": seconds.get(phase, 0.0) for phase in STEP_PHASES})
