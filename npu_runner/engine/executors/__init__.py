"""Run the same call on every rank, wherever the ranks live."""

from __future__ import annotations

from collections.abc import Callable

from npu_runner.engine.executors.executor import Executor
from npu_runner.strategies.opened import OpenedCheckpoint


def make_executor(checkpoint: OpenedCheckpoint, wants_grammars: Callable[[], bool] = lambda: False) -> Executor:
    """In this process for one rank; spawned processes for more, which open the checkpoint again.

    Those ask nobody whether grammars are wanted.
    """
    if checkpoint.config.parallel.tensor_parallel_size == 1:
        from npu_runner.engine.executors.inline_executor import InlineExecutor

        return InlineExecutor(checkpoint, wants_grammars)
    from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor

    return SharedMemoryExecutor(checkpoint.config, checkpoint.path)
