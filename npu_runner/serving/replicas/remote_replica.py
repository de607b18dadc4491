"""The driver's end of a replica that runs elsewhere: commands go out as they come, a thread brings what comes back.

It brings as much as there is room for, so that a driver that waits for a slow disk holds up the replica and not the
memory of the host. Where the other end is, and how it is reached, is the subclasses' matter.
"""

from __future__ import annotations

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

    @abstractmethod
    def _tell(self, command: tuple[str, Any]) -> None:
        """Send it. To one that is dead this is nothing: `poll` says so."""

    @abstractmethod
    def _look_after(self) -> None:
        """It is silent: set `_failure` if it will never say anything."""

    @abstractmethod
    def _where(self) -> str:
        """What people need to find it: devices and process, or actor."""

    def begin(self, terms: Any) -> None:
        self._tell(("begin", terms))

    def submit(self, run: Any) -> None:
        self._tell(("submit", run))

    def recall(self, num_rows: int, *, begun: bool = False) -> None:
        self._tell(("recall", (num_rows, begun)))

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
                self._look_after()
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
