"""The driver's end of a replica that runs elsewhere: commands are sent at once, a thread receives events.

It receives as much as its queue has room for. So a driver with a slow disk slows the replica down, and does not fill
the host's memory. Where the other end is, and how it is reached, is the subclasses' matter.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from npu_runner.errors import EngineDeadError, NpuRunnerError, ReplicaDeadError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.serving.replica import Event, Replica

_MAX_INBOX_BYTES = 64 << 20


class RemoteReplica(Replica):
    """Has the replica that `make` (picklable) makes run there."""

    can_restart = True

    def __init__(self, name: str, make: Callable[[], Replica], *, num_rows_ahead: int):
        self.name = name
        self.num_rows_ahead = num_rows_ahead
        self._make = make
        self._inbox = ByteBoundedQueue(_MAX_INBOX_BYTES)
        """Lists of events; an error is the last word."""
        self._failure: NpuRunnerError | None = None
        self._reader: threading.Thread | None = None

    @abstractmethod
    def _send_command(self, command: tuple[str, Any]) -> None:
        """Send it. To one that is dead this is nothing: `poll` says so."""

    @abstractmethod
    def _receive(self) -> list[tuple[Any, int]]:
        """Messages that have come, with their bytes; waits for some, and may return without any. Raises what ended the
        other side."""

    @abstractmethod
    def _check_alive(self) -> None:
        """It is silent: set `_failure` if it will never say anything."""

    @abstractmethod
    def _where(self) -> str:
        """What people need to find it: devices and process, or actor."""

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
