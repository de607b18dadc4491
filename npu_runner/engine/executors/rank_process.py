"""One rank's process as the engine sees it: started, told of calls, its replies booked, its death described.

Knows nothing of what the calls do.
"""

from __future__ import annotations

import os
import pickle
import socket
from typing import Any

from npu_runner.engine.executors.channel import Payloads, PhaseBoard, Record, Wire
from npu_runner.processes.child import Child, describe_exit

_GRACE_SECONDS = 2.0


class RankStart:
    """What all ranks inherit: phases and calls."""

    def __init__(self, phases: PhaseBoard, calls: Payloads):
        self.phases = phases
        self.calls = calls

    def close(self) -> None:
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
        start.phases.set(number, "being started")
        ours, theirs = socket.socketpair()
        fds = [theirs.fileno(), start.phases.fd, *start.calls.fds, *self._replies.fds]
        # Ranks share the host's cores: a thread that spins while it waits would keep another rank from working.
        variables = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
        self.child = Child(f"npu rank {number}", "npu_runner.engine.executors.worker", number, *fds, descriptors=fds,
                           variables=variables)
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

    def exit_reason(self) -> str:
        status = self.child.exit_status(_GRACE_SECONDS)
        if status is None:
            return f"rank {self.number} closed its connection while {self.phase()}"
        return f"rank {self.number} died ({describe_exit(status)}) while {self.phase()}"

    def close(self) -> None:
        self.child.kill()
        self.wire.close()
        self._replies.close()


def end_ranks(ranks: list[RankProcess], start: RankStart) -> None:
    """Kill what still runs and close everything; also runs when the executor is forgotten or Python exits."""
    for rank in ranks:
        rank.child.signal_end()
    for rank in ranks:
        rank.close()
    start.close()


def open_store() -> Any:
    """The store behind the process group, on a port that the system picks and that only this host can reach."""
    import torch.distributed as dist

    listener = socket.socket()
    # Given an address alone the store would listen on every interface, and it asks nobody who he is.
    listener.bind(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    return dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
