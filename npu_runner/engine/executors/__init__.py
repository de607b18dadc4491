"""Run the same call on every rank, wherever the ranks live."""

from __future__ import annotations

from collections.abc import Callable

from npu_runner.engine.executors.executor import Executor, Progress
from npu_runner.strategies import OpenedCheckpoint


def make_executor(checkpoint: OpenedCheckpoint, wants_grammars: Callable[[], bool], progress: Progress) -> Executor:
    """In this process for one rank; spawned processes for more, which open the checkpoint again and ignore
    `wants_grammars`. `progress` is called with what rank 0 does until it is ready.
    """
    if checkpoint.config.parallel.tensor_parallel_size == 1:
        from npu_runner.engine.executors.inline_executor import InlineExecutor

        return InlineExecutor(checkpoint, wants_grammars, progress)
    from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor

    return SharedMemoryExecutor(checkpoint.config, checkpoint.path, progress)
