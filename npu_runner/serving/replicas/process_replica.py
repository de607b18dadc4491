"""The driver's end of a replica that runs elsewhere (RemoteReplica), and of one in a process of this host with its own
devices (ProcessReplica). Knows nothing of the served rows.

Commands are sent at once, and a thread receives events as far as its queue has room. So a driver with a slow disk slows
the replica down, and does not fill the host's memory.

The other end of a process is process_main.py. Ranks and workers are its children. If it is killed they have no parent,
and a new replica must not start on devices that they still hold. So all processes of a replica have its token in their
environment.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import signal
import socket
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from npu_runner.errors import EngineDeadError, NpuRunnerError, ReplicaDeadError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.processes.channel import Channel, ChannelClosed, Packed, pack
from npu_runner.processes.child import Child, describe_exit
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.serving.replica import Event, PageOutcome, Replica
from npu_runner.serving.replicas.placement import Placement

_MAX_INBOX_BYTES = 64 << 20


class RemoteReplica(Replica):
    """Runs the replica that `make` (picklable) makes elsewhere. Subclasses know where, and the way to it."""

    can_restart = True

    def __init__(self, name: str, make: Callable[[], Replica], *, num_rows_ahead: int):
        self.name = name
        self.num_rows_ahead = num_rows_ahead
        self._make = make
        self._inbox = ByteBoundedQueue(_MAX_INBOX_BYTES)
        """Lists of events; an error is the last item."""
        self._failure: NpuRunnerError | None = None
        self._reader: threading.Thread | None = None

    @abstractmethod
    def _send_command(self, command: tuple[str, Any]) -> None:
        """Send it; to a dead replica without effect: `poll` reports its death."""

    @abstractmethod
    def _receive(self) -> list[tuple[Any, int]]:
        """New messages, with their bytes; waits for some, and may return none. Raises the error that ended the other
        side."""

    @abstractmethod
    def _check_alive(self) -> None:
        """It sent no event: set `_failure` if it never will."""

    @abstractmethod
    def _where(self) -> str:
        """Its devices and process, or its actor, for people."""

    def _start_reader(self, wake: Callable[[], None]) -> None:
        self._reader = threading.Thread(target=self._read, args=(wake,), name=f"{self.name}: reader", daemon=True)
        self._reader.start()

    def _read(self, wake: Callable[[], None]) -> None:
        while True:
            try:
                messages = self._receive()
            except NpuRunnerError as error:
                self._inbox.put(error, 0)
                wake()
                return
            for message, num_bytes in messages:
                self._inbox.put(message, num_bytes)
            if messages:
                wake()

    def serve(self, stamp: Any) -> None:
        self._send_command(("serve", stamp))

    def submit(self, run: Any) -> None:
        self._send_command(("submit", run))

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        self._send_command(("recall", (num_rows, include_started)))

    def hear(self, outcome: PageOutcome) -> None:
        self._send_command(("hear", outcome))

    def poll(self, timeout_seconds: float) -> list[Event]:
        message = self._inbox.get(timeout_seconds)
        events: list[Event] = []
        while message is not None:
            if isinstance(message, NpuRunnerError):
                self._failure = message
                break
            events += message
            message = self._inbox.get(0.0)
        if not events:
            if self._failure is None:
                self._check_alive()
            if self._failure is not None:
                raise self._named(self._failure)
        return events

    def _named(self, error: NpuRunnerError) -> NpuRunnerError:
        where = f"{self.name} ({self._where()})"
        if isinstance(error, ReplicaDeadError):
            return ReplicaDeadError(f"{where} died: {error}", request_ids=error.request_ids, blame=error.blame,
                                    rows=error.rows)
        if isinstance(error, EngineDeadError):  # while it started: no row was under way
            return ReplicaDeadError(f"{where} died: {error}", rows=())
        error.args = (f"{where}: {error}",)
        return error


STOPPED_SECONDS = 60.0
_GRACE_SECONDS = 3.0
TOKEN_VARIABLE = "NPU_RUNNER_REPLICA"
_ORPHAN_GRACE_SECONDS = 5.0
_ORPHAN_END_SECONDS = 60.0
_ORPHAN_POLL_SECONDS = 0.02
_numbers = itertools.count()


class ProcessReplica(RemoteReplica):
    """Runs the replica that `make` (picklable) makes in a process. `inherited`: descriptors that it inherits."""

    def __init__(self, name: str, make: Callable[[], Replica], placement: Placement, *, num_rows_ahead: int,
                 inherited: Sequence[int] = ()):
        super().__init__(name, make, num_rows_ahead=num_rows_ahead)
        self._placement = placement
        self._inherited = tuple(inherited)
        self._token = f"{os.getpid()}-{next(_numbers)}"
        self._child: Child | None = None
        self._outbox: Outbox | None = None
        """A stopped replica reads no commands; with a thread for sending, the driver serves the others."""

    @property
    def process_id(self) -> int:
        return self._started.pid

    @property
    def _started(self) -> Child:
        assert self._child is not None, f"{self.name} was not started"
        return self._child

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        ours, theirs = socket.socketpair()
        variables = {**self._placement.environment, TOKEN_VARIABLE: self._token}
        self._socket, self._channel = ours, Channel(ours)
        with theirs:
            self._child = Child(f"npu {self.name}", "npu_runner.serving.replicas.process_main", theirs.fileno(),
                                descriptors=[theirs.fileno(), *self._inherited], variables=variables)
        self._start_reader(wake)
        self._outbox = Outbox(self._channel, f"{self.name}: writer")
        self._send_command(self._placement.cores)
        self._send_command(self._make)

    def close(self) -> None:
        if self._child is None:
            return
        with contextlib.suppress(OSError):
            # It sees the end of its commands, and ends in good order. Unsent messages are dropped.
            self._socket.shutdown(socket.SHUT_WR)
        self._inbox.close()
        self._child.kill(_GRACE_SECONDS)
        if self._reader is not None:
            self._reader.join()
        if self._outbox is not None:
            self._outbox.join()
        self._channel.close()
        left = end_members(self._token)
        if left:
            print(f"{self.name}: processes {left} do not end", file=sys.stderr, flush=True)
        self._child = None

    def _send_command(self, command: Any) -> None:
        assert self._outbox is not None, f"{self.name} was not started"
        self._outbox.put(command)

    def _receive(self) -> list[tuple[Any, int]]:
        try:
            return [self._channel.receive()]
        except ChannelClosed:
            raise ReplicaDeadError(self._exit_reason()) from None

    def _exit_reason(self) -> str:
        status = self._started.exit_status(_GRACE_SECONDS)
        return "it closed its connection" if status is None else describe_exit(status)

    def _where(self) -> str:
        return f"{self._placement.description}, process {self.process_id}"

    def _check_alive(self) -> None:
        if self._started.is_stopped_for(STOPPED_SECONDS):
            self._failure = ReplicaDeadError(f"it has been stopped for {STOPPED_SECONDS:g} seconds (SIGSTOP)")


class Outbox:
    """Sends messages over `channel`, in order, in a thread of its own: `put` never waits for a process that does not
    read. The caller bounds the rows in them.

    Once the other side is gone messages are dropped; its end is noticed by the receiving thread.
    """

    def __init__(self, channel: Channel, name: str):
        self._channel = channel
        self._messages: queue.SimpleQueue[Packed | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name=name, daemon=True)
        self._writer.start()

    def put(self, message: Any) -> None:
        """Returns at once. Raises what pickling it raises."""
        self._messages.put(pack(message))

    def join(self) -> None:
        """Wait for the thread. The caller has shut the connection down before, or it would send all there is first."""
        self._messages.put(None)
        self._writer.join()

    def _write(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while (message := self._messages.get()) is not None:
                self._channel.send_packed(message)
                del message  # it may hold images of many rows, and the next message may come late


def members(token: str) -> list[int]:
    """Ids of all processes with this token."""
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Of others, or gone meanwhile; of a process that has ended and waits for its parent it is empty.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_members(token: str) -> list[int]:
    """Wait until none is left; kill those that do not end by themselves. Returns those that still run.

    Ranks see that their engine is gone and end; one inside a driver's call takes its time.
    """
    grace, end = Stopwatch(), Stopwatch()
    while left := members(token):
        if end.exceeds(_ORPHAN_END_SECONDS):
            break
        if grace.exceeds(_ORPHAN_GRACE_SECONDS):
            for process_id in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        time.sleep(_ORPHAN_POLL_SECONDS)
    return left
