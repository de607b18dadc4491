"""Several ranks, each a process of its own; calls reach them through shared memory. Knows nothing of scheduling.

No rank runs in the engine's process: a collective that hangs because another rank died would hang the engine with it.
Here the engine waits on sockets, sees a death at once and a silence soon, and ends the others itself.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.executors.base import Executor, RunnerCounters
from npu_runner.engine.executors.channel import SharedArea
from npu_runner.errors import EngineDeadError
from npu_runner.runner.base import ModelRunnerOutput

# A live process beats twice a second even while it computes; this long a silence means it is stopped or starved.
SILENCE_SECONDS = 30.0
START_TIMEOUT_SECONDS = 1800.0
_GRACE_SECONDS = 2.0


class SharedMemoryExecutor(Executor):
    def __init__(self, config: RunnerConfig, model_path: Path):
        import torch.distributed as dist

        self._config = config
        self._counters = RunnerCounters()
        self._area = SharedArea.create()
        # Port 0: the system picks a free one, so that jobs on one host never meet.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        lifeline_read, self._lifeline = os.pipe()
        self._ranks = [_Rank(rank, self._area, lifeline_read) for rank in range(config.tensor_parallel_size)]
        os.close(lifeline_read)
        self._finalizer = weakref.finalize(self, _end, self._ranks, self._lifeline, self._area)
        try:
            self.info = self._call("start", config, model_path, self._store.port, timeout=START_TIMEOUT_SECONDS)
        except BaseException:
            self.close()
            raise

    def execute_model(self, batch: ScheduledBatch) -> ModelRunnerOutput:
        output, self._counters = self._call("execute_model", batch, timeout=self._config.step_timeout_seconds)
        return output

    def counters(self) -> RunnerCounters:
        return self._counters  # they came with the last step's result: asking again would cost every rank a call

    def process_ids(self) -> list[int]:
        """Of the ranks, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    def close(self) -> None:
        if self._finalizer.alive and all(rank.process.poll() is None for rank in self._ranks):
            self._send_stop()
        self._finalizer()

    def _call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Have every rank run `method`; returns rank 0's result once all have answered."""
        assert self._finalizer.alive, "the executor is closed"
        length = self._area.write((method, arguments))
        for rank in self._ranks:
            try:
                rank.connection.send(length)
            except OSError:
                self._fail(self._obituary(rank))
        waiting = {rank.connection: rank for rank in self._ranks}
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        while waiting:
            for connection in wait(list(waiting), timeout=1.0):
                rank = waiting.pop(connection)  # type: ignore[call-overload]
                results[rank.number] = self._receive(rank, list(waiting.values()))
            self._check_alive(list(waiting.values()), method, deadline, timeout)
        return results[0]

    def _receive(self, rank: _Rank, others: list[_Rank]) -> Any:
        try:
            status, value = rank.connection.recv()
        except (EOFError, OSError):
            self._fail(self._obituary(rank))
        if status == "ok":
            return value
        # When a rank dies the others fail in their collectives; the dead one is the cause.
        dead = self._wait_for_a_death(rank)
        if dead is not None:
            self._fail(self._obituary(dead))
        if status == "refused":
            self.close_now()
            raise value
        silent = "".join(f"; rank {other.number} has not answered ({other.phase()})" for other in others)
        self._fail(f"rank {rank.number} failed while {rank.phase()}{silent}: {value}")

    def _check_alive(self, ranks: list[_Rank], method: str, deadline: float, timeout: float) -> None:
        for rank in ranks:
            silence, phase = self._area.status(rank.number)
            if silence > SILENCE_SECONDS:
                self._fail(f"rank {rank.number} has been silent for {silence:.0f} s while {phase}; is it stopped?")
        if ranks and time.monotonic() > deadline:
            names = "; ".join(f"rank {rank.number}, {rank.phase()}" for rank in ranks)
            self._fail(f"{method} did not finish within {timeout:.0f} s ({names}); raise step_timeout_seconds if "
                       f"it is only slow")

    def _wait_for_a_death(self, but: _Rank) -> _Rank | None:
        deadline = time.monotonic() + _GRACE_SECONDS
        others = [rank for rank in self._ranks if rank is not but]
        while time.monotonic() < deadline:
            for rank in others:
                if rank.process.poll() is not None:
                    return rank
            time.sleep(0.02)
        return None

    def _obituary(self, rank: _Rank) -> str:
        try:
            code = rank.process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {rank.number} closed its connection while {rank.phase()}"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"rank {rank.number} died ({how}) while {rank.phase()}"

    def _fail(self, reason: str) -> NoReturn:
        self.close_now()
        raise EngineDeadError(reason)

    def close_now(self) -> None:
        """End every rank without asking."""
        self._finalizer()

    def _send_stop(self) -> None:
        length = self._area.write(("stop", ()))
        for rank in self._ranks:
            try:
                rank.connection.send(length)
            except OSError:
                continue  # it died meanwhile; the finalizer reaps it
        deadline = time.monotonic() + _GRACE_SECONDS
        for rank in self._ranks:
            try:
                rank.process.wait(timeout=max(0.01, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue  # busy or stuck; the finalizer kills it


class _Rank:
    """One rank's process and the engine's end of its connection."""

    def __init__(self, number: int, area: SharedArea, lifeline_fd: int):
        self.number = number
        self._area = area
        area.expect(number)
        ours, theirs = socket.socketpair()
        arguments = [str(value) for value in (number, theirs.fileno(), area.fd, lifeline_fd)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "npu_runner.engine.executors.worker", *arguments],
            pass_fds=(theirs.fileno(), area.fd, lifeline_fd),
            # Ranks share the host's cores: a thread that spins while it waits would keep another rank from working.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ,
                 "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        self.connection: Connection = Connection(ours.detach())

    def phase(self) -> str:
        return self._area.status(self.number)[1]


def _end(ranks: list[_Rank], lifeline: int, area: SharedArea) -> None:
    """Kill what still runs and close everything; also runs when the executor is forgotten or Python exits."""
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.kill()
    for rank in ranks:
        rank.process.wait()
        rank.connection.close()
    os.close(lifeline)
    area.close()
