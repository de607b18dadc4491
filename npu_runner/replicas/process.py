"""A replica in a process of this host, with devices of its own, as the driver sees it. Knows nothing of what it serves.

The other end is process_main.py.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import npu_runner
from npu_runner.errors import ReplicaDeadError
from npu_runner.replicas import family
from npu_runner.replicas.base import Replica
from npu_runner.replicas.outbox import Outbox
from npu_runner.replicas.placement import Placement
from npu_runner.replicas.remote import RemoteReplica
from npu_runner.workers.channel import Channel, ChannelClosed

STOPPED_SECONDS = 60.0
_GRACE_SECONDS = 3.0
_numbers = itertools.count()


class ProcessReplica(RemoteReplica):
    """Has the replica that `make` (picklable) makes run there. `inherited`: descriptors that it has too."""

    def __init__(
        self, name: str, make: Callable[[], Replica], placement: Placement, *, num_rows_ahead: int,
        inherited: Sequence[int] = (),
    ):  # fmt: skip
        super().__init__(name, make, num_rows_ahead=num_rows_ahead)
        self._placement = placement
        self._inherited = tuple(inherited)
        self._token = f"{os.getpid()}-{next(_numbers)}"
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._outbox: Outbox | None = None
        """One that is stopped reads no commands, and whoever drives it has others to drive."""
        self._stopped_since: float | None = None

    @property
    def process_id(self) -> int:
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    def start(self, wake: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        package_parent = str(Path(npu_runner.__file__).resolve().parent.parent)
        environment = {
            **os.environ,
            **self._placement.environment,
            "PYTHONPATH": os.pathsep.join(filter(None, (package_parent, os.environ.get("PYTHONPATH")))),
            family.TOKEN_VARIABLE: self._token,
        }
        self._socket, self._channel = ours, Channel(ours)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "npu_runner.replicas.process_main", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno(), *self._inherited],
                stdin=subprocess.DEVNULL,
                stdout=2,  # the job's own stdout may be its answers
                env=environment,
                start_new_session=True,  # Ctrl-C in a terminal is for the driver alone, which then ends its replicas
            )
        self._reader = threading.Thread(target=self._read, args=(wake,), name=f"{self.name}: reader", daemon=True)
        self._reader.start()
        self._outbox = Outbox(self._channel, f"{self.name}: writer")
        self._tell(sys.path)
        self._tell(self._placement.cores)
        self._tell(self._make)

    def close(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            # It sees the end of its commands, and ends in good order. What is not sent by now never will be.
            self._socket.shutdown(socket.SHUT_WR)
        self._inbox.close()
        try:
            self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._reader is not None:
            self._reader.join()
        if self._outbox is not None:
            self._outbox.join()
        self._channel.close()
        left = family.end_members(self._token)
        if left:
            print(f"{self.name}: processes {left} do not end", file=sys.stderr, flush=True)
        self._process = None

    def _tell(self, command: Any) -> None:
        assert self._outbox is not None, f"{self.name} was not started"
        self._outbox.put(command)

    def _read(self, wake: Callable[[], None]) -> None:
        is_open = True
        while is_open:
            try:
                message, num_bytes = self._channel.receive()
            except ChannelClosed:
                message, num_bytes, is_open = ReplicaDeadError(self._obituary()), 0, False
            self._inbox.put(message, num_bytes)
            wake()

    def _obituary(self) -> str:
        assert self._process is not None, f"{self.name} was not started"
        try:
            status = self._process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            return "it closed its connection"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"

    def _where(self) -> str:
        return f"{self._placement.description}, process {self.process_id}"

    def _look_after(self) -> None:
        """The system's word for it: a compiler may hold the interpreter's lock for minutes, and gives no sign."""
        if not family.is_stopped(self.process_id):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or time.monotonic()
        if time.monotonic() - self._stopped_since > STOPPED_SECONDS:
            self._failure = ReplicaDeadError(f"it has been stopped for {STOPPED_SECONDS:g} seconds (SIGSTOP)")
