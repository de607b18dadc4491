"""One rank's process as the engine sees it: started, told of calls, its replies booked, its death described.

Knows nothing of what the calls do.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from npu_runner.engine.executors.channel import Payloads, PhaseBoard, Record, Wire

_GRACE_SECONDS = 2.0


class RankStart:
    """What all ranks inherit: phases, calls, and a pipe whose other end closes with the engine."""

    def __init__(self, phases: PhaseBoard, calls: Payloads):
        self.phases = phases
        self.calls = calls
        self.lifeline_read, self._lifeline = os.pipe()

    def close_ours(self) -> None:
        """The ranks have their copy of the pipe's end."""
        os.close(self.lifeline_read)

    def close(self) -> None:
        os.close(self._lifeline)
        self.phases.close()
        self.calls.close()


class RankProcess:
    """`num_answered`: the last call that this rank has answered; they are answered in order."""

    def __init__(self, number: int, start: RankStart):
        self.number = number
        self.num_answered = 0
        self._phases = start.phases
        self._replies = Payloads.create()
        self._lengths: dict[int, int] = {}
        self._stopped_since: float | None = None
        start.phases.set(number, "being started")
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), start.phases.fd, start.lifeline_read, *start.calls.fds, *self._replies.fds]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "npu_runner.engine.executors.worker", *map(str, (number, *fds))],
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C in a terminal is for the engine alone, which decides what it means
            # Ranks share the host's cores: a thread that spins while it waits would keep another rank from working.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ,
                 "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        theirs.close()
        self.wire = Wire(ours)

    def phase(self) -> str:
        return self._phases.get(self.number)

    def book(self, reply: Record) -> None:
        """Note a reply; the same one may be noted again."""
        self._lengths[reply.number] = reply.length
        self._lengths.pop(reply.number - 2 * len(self._replies.fds), None)
        self.num_answered = max(self.num_answered, reply.number)

    def result(self, number: int) -> Any:
        """What this rank answered to that call."""
        return self.read(Record(number, self._lengths[number]))

    def read(self, reply: Record) -> Any:
        return pickle.loads(self._replies.read(reply.number, reply.length))

    @property
    def is_stopped(self) -> bool:
        """As SIGSTOP leaves a process."""
        return _state_of(self.process.pid) == "T"

    def seconds_stopped(self) -> float:
        """How long the process has been seen stopped, 0 while it is not. A busy one, or one that waits, is not.

        The system's word for it, and not a sign of life from the process: an extension that holds the interpreter's
        lock for minutes, as compilers do, could give none.
        """
        if not self.is_stopped:
            self._stopped_since = None
            return 0.0
        self._stopped_since = self._stopped_since or time.monotonic()
        return time.monotonic() - self._stopped_since

    def obituary(self) -> str:
        try:
            code = self.process.wait(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return f"rank {self.number} closed its connection while {self.phase()}"
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"rank {self.number} died ({how}) while {self.phase()}"

    def ends_until(self, deadline: float) -> bool:
        try:
            self.process.wait(timeout=max(0.01, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()

    def bury(self) -> None:
        self.process.wait()
        self.wire.close()
        self._replies.close()


def end_ranks(ranks: list[RankProcess], start: RankStart) -> None:
    """Kill what still runs and close everything; also runs when the executor is forgotten or Python exits."""
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.bury()
    start.close()


def open_store() -> Any:
    """The store behind the process group, on a port that the system picks and that only this host can reach."""
    import torch.distributed as dist

    listener = socket.socket()
    # Given an address alone the store would listen on every interface, and it asks nobody who he is.
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _state_of(pid: int) -> str:
    """The letter of proc(5), "" where the system does not say."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]
