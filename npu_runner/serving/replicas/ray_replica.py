"""A replica in a Ray actor, on any host of the cluster: `RayReplica` is the driver's end, `RayReplicaHost` the actor's.
Knows nothing of rows.

The host is the ReplicaHost of a process of this host (process_main.py), with calls of the actor for its socket. It ends
with its actor; its ranks and workers end with it. The fleet starts a dead replica again, with a new object.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray

import npu_runner
from npu_runner.errors import ConfigError, NpuRunnerError, ReplicaDeadError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.processes.channel import ChannelClosed
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.serving.replica import Event, Finished, Replica
from npu_runner.serving.replicas.process_main import ReplicaHost
from npu_runner.serving.replicas.process_replica import RemoteReplica
from npu_runner.serving.replicas.ray_cluster import Demand
from npu_runner.threads import wait_briefly

# Ray does not report an actor that waits for room; with room it is placed within this time.
WAITING_SECONDS = 30.0
_END_SECONDS = 10.0
_MAX_WAITING_BYTES = 64 << 20
_HEAR_SECONDS = 1.0
_END = object()


class RayReplica(RemoteReplica):
    """Runs the replica that `make` (picklable) makes in an actor that needs `demand`."""

    def __init__(self, name: str, make: Callable[[], Replica], demand: Demand, *, num_rows_ahead: int):
        super().__init__(name, make, num_rows_ahead=0)  # an actor without room would keep rows
        self._num_rows_ahead = num_rows_ahead
        self._demand = demand
        self._actor: Any = None
        self._is_there = False

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        remote: Any = ray.remote  # its types know no groups
        actor_class = remote(concurrency_groups={"commands": 1, "events": 1})(RayReplicaHost)
        self._started = Stopwatch()
        packed = pickle.dumps(self._make)  # what only the same version may read
        self._actor = actor_class.options(max_restarts=0, **self._demand.options).remote(
            self.name, npu_runner.__version__, packed)
        self._start_reader(wake)

    def _send_command(self, command: tuple[str, Any]) -> None:
        self._actor.command.remote(command)

    def close(self) -> None:
        if self._actor is None:
            return
        self._inbox.close()
        if self._failure is None and self._is_there:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._actor.end.remote(), timeout=_END_SECONDS)
        ray.kill(self._actor, no_restart=True)
        if self._reader is not None:
            self._reader.join()
        self._actor = None

    def _receive(self) -> list[tuple[Any, int]]:
        try:
            messages = ray.get(self._actor.poll_events.remote())
        except ray.exceptions.RayError as error:
            raise _last_word(error) from None
        if not self._is_there:
            self._is_there, self.waits_for, self.num_rows_ahead = True, None, self._num_rows_ahead
        return [(message, size_of(message)) for message in messages]

    def _check_alive(self) -> None:
        if not self._is_there and self._started.exceeds(WAITING_SECONDS):
            self.waits_for = self._demand.wanted

    def _where(self) -> str:
        return f"actor {self._actor._actor_id.hex()}"


def _last_word(error: ray.exceptions.RayError) -> NpuRunnerError:
    """Ray says a lot; what happened stands in one line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if "Error" in line or "died" in line or "killed" in line),
                  lines[0] if lines else type(error).__name__)
    if "creation task" in str(error):  # an exception there, as other code or none raises; not a death
        return ConfigError(f"its host cannot run it ({reason}); install the same npu-runner and the same Ray on every "
                           "host")
    return ReplicaDeadError(reason)


class _Link:
    """The channel of a ReplicaHost, between threads of one process."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.events = ByteBoundedQueue(_MAX_WAITING_BYTES)

    def receive(self) -> tuple[Any, int]:
        message = self.commands.get()
        if message is _END:
            raise ChannelClosed("the driver has ended this replica")
        return message, 0

    def send(self, message: Any) -> None:
        self.events.put(message, size_of(message))


class RayReplicaHost:
    """`command` and `poll_events` run in a thread each, so commands keep their order and never wait for events."""

    def __init__(self, name: str, version: str, packed_make: bytes):
        """`version`: of the driver's package. `packed_make`: what makes the replica, for that version to read."""
        wait_briefly()
        self._link = _Link()
        make = functools.partial(_made, name, version, packed_make)
        self._thread = threading.Thread(target=ReplicaHost(make, self._link).run, name="replica host", daemon=True)
        self._thread.start()

    @ray.method(concurrency_group="commands")
    def command(self, message: Any) -> None:
        """("serve" | "submit" | "recall" | "hear", value), as in process_main."""
        self._link.commands.put(message)

    @ray.method(concurrency_group="events")
    def poll_events(self) -> list[Any]:
        """The events since the last call; waits briefly for some."""
        found = []
        message = self._link.events.get(_HEAR_SECONDS)
        while message is not None:
            found.append(message)
            message = self._link.events.get(0.0)
        return found

    @ray.method(concurrency_group="commands")
    def end(self) -> None:
        """Returns when the engine, its ranks and its workers are gone."""
        self._link.commands.put(_END)
        self._link.events.close()
        self._thread.join()


def _made(name: str, version: str, packed_make: bytes) -> Replica:
    if version != npu_runner.__version__:
        raise ConfigError(f"{name} on host {socket.gethostname()}: has npu-runner {npu_runner.__version__}, the driver "
                          f"{version}; install the same on every host")
    make: Callable[[], Replica] = pickle.loads(packed_make)
    return make()


def size_of(message: Any) -> int:
    events = message if isinstance(message, list) else ()
    return sum(len(row.data) for event in events if isinstance(event, Finished) for row in event.rows)
