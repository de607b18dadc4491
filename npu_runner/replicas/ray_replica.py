"""A replica in a Ray actor, on whatever host of the cluster has room, as the driver sees it. Knows nothing of rows.

The other end is ray_actor.py. Nothing here starts an actor again: the fleet does, with a new one of these.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from npu_runner.errors import NpuRunnerError, ReplicaDeadError
from npu_runner.replicas.base import Event, Replica, RowRun
from npu_runner.replicas.inbox import Inbox
from npu_runner.replicas.ray_actor import RayServant, size_of
from npu_runner.replicas.ray_cluster import Demand

_MAX_INBOX_BYTES = 64 << 20
# An actor that nobody has room for waits for ever, and Ray says nothing.
_ROOM_SECONDS = 600.0
_END_SECONDS = 10.0


class RayReplica(Replica):
    """Has the replica that `make` (picklable) makes run in an actor that takes `demand`."""

    can_restart = True

    def __init__(self, name: str, make: Callable[[], Replica], demand: Demand, *, num_rows_ahead: int):
        self.name = name
        self.num_rows_ahead = num_rows_ahead
        self._make = make
        self._demand = demand
        self._inbox = Inbox(_MAX_INBOX_BYTES)
        self._failure: NpuRunnerError | None = None
        self._actor: Any = None
        self._has_room = False

    def start(self, wake: Callable[[], None]) -> None:
        remote: Any = ray.remote  # its types know no groups
        actor_class = remote(concurrency_groups={"commands": 1, "events": 1})(RayServant)
        self._started = time.monotonic()
        self._actor = actor_class.options(max_restarts=0, **self._demand.options).remote(self._make)
        self._reader = threading.Thread(target=self._read, args=(wake,), name=f"{self.name}: reader", daemon=True)
        self._reader.start()

    def begin(self, terms: Any) -> None:
        self._actor.tell.remote(("begin", terms))

    def submit(self, run: RowRun) -> None:
        self._actor.tell.remote(("submit", run))

    def recall(self, num_rows: int) -> None:
        self._actor.tell.remote(("recall", num_rows))

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
            self._end_without_room()
            if self._failure is not None:
                raise self._named(self._failure)
        return events

    def close(self) -> None:
        if self._actor is None:
            return
        self._inbox.close()
        if self._failure is None and self._has_room:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._actor.end.remote(), timeout=_END_SECONDS)
        ray.kill(self._actor, no_restart=True)
        self._reader.join()
        self._actor = None

    def _read(self, wake: Callable[[], None]) -> None:
        try:
            while True:
                messages = ray.get(self._actor.hear.remote())
                self._has_room = True
                for message in messages:
                    self._inbox.put(message, size_of(message))
                if messages:
                    wake()
        except ray.exceptions.RayError as error:
            self._inbox.put(ReplicaDeadError(_obituary(error)), 0)
            wake()

    def _end_without_room(self) -> None:
        if not self._has_room and self._failure is None and time.monotonic() - self._started > _ROOM_SECONDS:
            wanted = ", ".join(f"{name} {value}" for name, value in self._demand.options.items())
            self._failure = ReplicaDeadError(f"no host of the cluster had {wanted} free within {_ROOM_SECONDS:g} s")

    def _named(self, error: NpuRunnerError) -> NpuRunnerError:
        where = f"{self.name} (actor {self._actor._actor_id.hex()})"
        if isinstance(error, ReplicaDeadError):
            return ReplicaDeadError(f"{where} died: {error}", request_ids=error.request_ids, blame=error.blame,
                                    rows=error.rows)
        error.args = (f"{where}: {error}",)
        return error


def _obituary(error: Exception) -> str:
    """Ray says a lot; what happened stands in one line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if "Error" in line or "died" in line or "killed" in line),
                lines[0] if lines else type(error).__name__)
