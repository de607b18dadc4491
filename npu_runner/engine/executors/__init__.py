"""Run the same call on every rank, wherever the ranks live."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from npu_runner.config import RunnerConfig
from npu_runner.engine.executors.base import Executor
from npu_runner.multimodal.processor import ChatProcessor


def make_executor(config: RunnerConfig, model_path: Path, processor: ChatProcessor,
                  wants_grammars: Callable[[], bool] = lambda: False) -> Executor:
    """In this process for one rank, which then shares `processor`; spawned processes for more.

    Those ask nobody whether grammars are wanted.
    """
    if config.tensor_parallel_size == 1:
        from npu_runner.engine.executors.inline import InlineExecutor

        return InlineExecutor(config, model_path, processor, wants_grammars)
    from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor

    return SharedMemoryExecutor(config, model_path)
