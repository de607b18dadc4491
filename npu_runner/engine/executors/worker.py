"""The process of one rank: waits for calls, runs them, answers. Knows nothing of scheduling or text.

Started as `python -m npu_runner.engine.executors.worker RANK CONNECTION_FD AREA_FD LIFELINE_FD`, so that a user's own
main module is never imported again. It ends when told to, or as soon as the engine's process is gone.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from npu_runner.config import RunnerConfig
from npu_runner.engine.executors.channel import SharedArea
from npu_runner.errors import NpuRunnerError

HEARTBEAT_SECONDS = 0.5
_ORPHAN_EXIT = 1


def main(arguments: list[str]) -> None:
    rank, connection_fd, area_fd, lifeline_fd = (int(argument) for argument in arguments)
    # Ctrl-C reaches the whole process group; the engine decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection: Connection = Connection(connection_fd)
    area = SharedArea(area_fd)
    area.set_phase(rank, "starting")
    threading.Thread(target=_end_with_engine, args=(lifeline_fd,), daemon=True).start()
    threading.Thread(target=_beat, args=(area, rank), daemon=True).start()
    try:
        serve(rank, connection, area)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(_ORPHAN_EXIT)  # the engine is gone; collectives under way would keep a normal exit waiting


def serve(rank: int, connection: Connection, area: SharedArea) -> None:
    """Start up with the first call's settings, then answer calls until one says stop."""
    runner: Any = None
    while True:
        call = area.read(connection.recv())
        try:
            method, arguments = call
            if method == "stop":
                connection.send(("ok", None))
                break
            if method == "start":
                runner = _start(rank, area, *arguments)
                result = runner.info()
            else:
                area.set_phase(rank, _phase(method, arguments))
                result = _call(runner, method, arguments)
            connection.send(("ok", result if rank == 0 else None))
            area.set_phase(rank, "waiting for work")
        except NpuRunnerError as error:
            connection.send(("refused", error))
        except Exception as error:  # noqa: BLE001
            # The one border where whatever goes wrong in a rank becomes a report to the engine, which ends the job.
            connection.send(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))
    os._exit(0)  # process groups and devices may block a normal exit once other ranks are gone


def _start(rank: int, area: SharedArea, config: RunnerConfig, model_path: Path, store_port: int) -> Any:
    area.set_phase(rank, "importing")
    from datetime import timedelta

    import torch.distributed as dist

    from npu_runner.layers.parallel import TensorParallel
    from npu_runner.platforms import pick_platform
    from npu_runner.runner.model_runner import ModelRunner

    size = config.tensor_parallel_size
    platform = pick_platform(config.platform)
    platform.prepare_process(rank, size)
    area.set_phase(rank, "joining the process group")
    timeout = timedelta(seconds=config.step_timeout_seconds)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timeout)
    has_two = config.graph_mode in platform.modes_with_own_communicator
    dist.init_process_group(platform.distributed_backend, store=store, rank=rank, world_size=size, timeout=timeout,
                            pg_options=platform.process_group_options(serves_graphs=not has_two, is_second=False))
    graph_group = None
    if has_two:
        options = platform.process_group_options(serves_graphs=True, is_second=True)
        graph_group = dist.new_group(list(range(size)), timeout=timeout, pg_options=options)
    for group in filter(None, (dist.group.WORLD, graph_group)):
        platform.make_communicator(group, rank)
    tp = TensorParallel(rank, size, dist.group.WORLD, graph_group, store)
    return ModelRunner(config, model_path, tp, progress=lambda phase: area.set_phase(rank, phase))


def _call(runner: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    if method == "execute_model":
        from npu_runner.engine.executors.inline import runner_counters

        return runner.execute_model(*arguments), runner_counters(runner)
    return getattr(runner, method)(*arguments)


def _phase(method: str, arguments: tuple[Any, ...]) -> str:
    if method != "execute_model":
        return method
    return str(arguments[0].describe())


def _end_with_engine(lifeline_fd: int) -> None:
    """The engine holds the other end of this pipe; end of file means it is gone."""
    while os.read(lifeline_fd, 1):
        pass
    os._exit(_ORPHAN_EXIT)


def _beat(area: SharedArea, rank: int) -> None:
    pause = threading.Event()
    while not pause.wait(HEARTBEAT_SECONDS):
        area.beat(rank)


if __name__ == "__main__":
    main(sys.argv[1:])
