"""A replica of `LLM`, which answers requests: in the caller's thread, or in a process of its own. Knows no caller."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import npu_runner
from npu_runner.config import RunnerConfig
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.serving.calls.prompt_endpoint import Answer, PromptEndpoint, pack_answer
from npu_runner.serving.engine_loop import max_waiting_requests
from npu_runner.serving.replica import ReplicaFacts
from npu_runner.serving.replicas.inline_replica import InlineReplica
from npu_runner.serving.workers.options import PreprocessingOptions
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool
from npu_runner.strategies.opened import open_checkpoint


class PromptServer(InlineReplica):
    """The number of a row is the number of its request. `load`: gives the engine; `pack`: see PromptEndpoint."""

    num_rows_ahead = 0

    def __init__(self, load: Callable[[], LLMEngine], options: PreprocessingOptions, name: str, *,
                 pack: Callable[[Answer], Any] = pack_answer, can_restart: bool = False):
        super().__init__(name)
        self.can_restart = can_restart
        self._load_engine = load
        self._options = options
        self._pack = pack
        self.pool: WorkerPool[Any] | None = None
        """What prepares prompts; None: the model is not loaded yet."""

    def start(self, wake: Callable[[], None]) -> None:
        """The first `poll` loads the model; there are no requests before that is done."""

    def _load(self) -> ReplicaFacts:
        engine = self._engine = self._open.enter_context(self._load_engine())
        max_waiting = max_waiting_requests(engine.max_num_seqs)
        limits = PoolLimits(
            num_workers=self._options.num_workers, task_timeout_seconds=self._options.preprocessing_timeout,
            worker_memory_bytes=self._options.worker_memory_bytes, max_ready=max_waiting,
        )  # fmt: skip
        endpoint = PromptEndpoint(engine.processor, limits, max_source_pixels=engine.config.max_source_pixels,
                                  pack=self._pack)
        self.endpoint, self.pool = endpoint, endpoint.pool
        self._open.callback(endpoint.close)
        return ReplicaFacts(
            version=npu_runner.__version__, settings=engine.describe(), ledger=engine.ledger,
            max_rows=engine.max_num_seqs + 2 * max_waiting + limits.num_workers,
        )  # fmt: skip


def load_engine(config: RunnerConfig) -> LLMEngine:
    """For a process of its own."""
    return LLMEngine(open_checkpoint(config))
