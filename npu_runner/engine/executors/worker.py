"""The process of one rank: waits for calls, runs them, answers. Knows nothing of scheduling or text.

Started as `python -m npu_runner.engine.executors.worker RANK FD...`, so that a user's own main module is never imported
again. It ends when told to, or as soon as the engine's process is gone.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from npu_runner.config import RunnerConfig
from npu_runner.engine.executors.channel import RING_SIZE, Payloads, PhaseBoard, Record, Wire
from npu_runner.errors import EngineDeadError, NpuRunnerError

# How a call ended: with its result; with an error of ours; with anything else; with the device out of order.
OK, REFUSED, FAILED, BROKEN = range(4)
STOP = 0
"""The number that is no call's: end."""
_ORPHAN_EXIT = 1


class Rank:
    """One rank's end of everything it shares with the engine."""

    def __init__(self, number: int, wire: Wire, phases: PhaseBoard, calls: Payloads, replies: Payloads):
        self.number = number
        self._wire = wire
        self._phases = phases
        self._calls = calls
        self._replies = replies
        self._num_answered = 0

    @classmethod
    def from_descriptors(cls, number: int, fds: list[int]) -> Rank:
        wire, phases, _, *rings = fds
        return cls(number, Wire(socket.socket(fileno=wire)), PhaseBoard(phases), Payloads(rings[:RING_SIZE]),
                   Payloads(rings[RING_SIZE:]))

    def phase(self, phase: str) -> None:
        """Say what this rank is doing."""
        self._phases.set(self.number, phase)

    def next_call(self) -> tuple[str, tuple[Any, ...]] | None:
        """The next call, waited for; None when there will be none. One that was answered is passed over."""
        while True:
            record = self._wire.peek()
            self._wire.take()
            if record.number == STOP:
                return None
            if record.number > self._num_answered:
                self._num_answered = record.number
                call: tuple[str, tuple[Any, ...]] = pickle.loads(self._calls.read(record.number, record.length))
                return call

    def answer(self, status: int, value: Any) -> None:
        payload = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
        self._replies.write(self._num_answered, payload)
        self._wire.send(Record(self._num_answered, len(payload), status))


def main(arguments: list[str]) -> None:
    number, *fds = (int(argument) for argument in arguments)
    # What is sent to a whole group of processes is for the engine, which lets the step under way end.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    rank = Rank.from_descriptors(number, fds)
    rank.phase("starting")
    threading.Thread(target=_end_with_engine, args=(fds[2],), daemon=True).start()
    try:
        serve(rank)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(_ORPHAN_EXIT)  # the engine is gone; collectives under way would keep a normal exit waiting


def serve(rank: Rank) -> None:
    """Start up with the first call's settings, then answer calls until one says stop."""
    runner: Any = None
    while (call := rank.next_call()) is not None:
        method, arguments = call
        try:
            if method == "start":
                runner = _start(rank, *arguments)
                result = runner.info()
            else:
                rank.phase(_phase(method, arguments))
                result = _call(runner, method, arguments)
            rank.answer(OK, result if rank.number == 0 else None)
            rank.phase("waiting for work")
        except EngineDeadError as error:
            rank.answer(BROKEN, str(error))
        except NpuRunnerError as error:
            rank.answer(REFUSED, error)
        except Exception as error:  # noqa: BLE001
            # The one border where whatever goes wrong in a rank becomes a report to the engine, which ends the job.
            is_broken = runner is None or runner.platform.is_device_failure(error)
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            rank.answer(BROKEN if is_broken else FAILED, text)
    os._exit(0)  # process groups and devices may block a normal exit once other ranks are gone


def _start(rank: Rank, config: RunnerConfig, model_path: Path, store_port: int) -> Any:
    rank.phase("importing")
    from datetime import timedelta

    import torch.distributed as dist

    from npu_runner.layers.parallel import TensorParallel
    from npu_runner.platforms import pick_platform
    from npu_runner.runner.model_runner import ModelRunner

    size = config.tensor_parallel_size
    platform = pick_platform(config.platform)
    platform.prepare_process(rank.number, size)
    rank.phase("joining the process group")
    timeout = timedelta(seconds=config.step_timeout_seconds)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timeout)
    has_two = config.graph_mode in platform.modes_with_own_communicator
    options = platform.process_group_options(serves_graphs=not has_two, is_second=False)
    dist.init_process_group(platform.distributed_backend, store=store, rank=rank.number, world_size=size,
                            timeout=timeout, pg_options=options)
    graph_group = None
    if has_two:
        options = platform.process_group_options(serves_graphs=True, is_second=True)
        graph_group = dist.new_group(list(range(size)), timeout=timeout, pg_options=options)
    for group in filter(None, (dist.group.WORLD, graph_group)):
        platform.make_communicator(group, rank.number)
    tp = TensorParallel(rank.number, size, dist.group.WORLD, graph_group, store)
    return ModelRunner(config, model_path, tp, progress=rank.phase)


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


if __name__ == "__main__":
    main(sys.argv[1:])
