"""A replica's end in a Ray actor: does what the driver tells it, and has ready what comes of it.

The same ReplicaHost as in a process of this host (process_main.py), with calls of the actor for its socket. Ends
with its actor; its ranks and workers end with it. Knows nothing of rows.
"""

from __future__ import annotations

import functools
import pickle
import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

import ray

import npu_runner
from npu_runner.errors import ConfigError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.processes.channel import ChannelClosed
from npu_runner.serving.replica import Finished, Replica
from npu_runner.serving.replicas.process_main import ReplicaHost
from npu_runner.threads import wait_briefly

_MAX_WAITING_BYTES = 64 << 20
_HEAR_SECONDS = 1.0
_END = object()


class _Link:
    """The channel that a ReplicaHost knows, between threads of one process."""

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
    """`tell` and `hear` run in a thread each, so that commands keep their order and never wait for what comes back."""

    def __init__(self, name: str, version: str, packed_make: bytes):
        """`version`: of the driver's package. `packed_make`: what makes the replica, for that version to read."""
        wait_briefly()
        self._link = _Link()
        make = functools.partial(_made, name, version, packed_make)
        self._thread = threading.Thread(target=ReplicaHost(make, self._link).run, name="replica host", daemon=True)
        self._thread.start()

    @ray.method(concurrency_group="commands")
    def tell(self, message: Any) -> None:
        """("begin" | "submit" | "recall", value), as in process_main."""
        self._link.commands.put(message)

    @ray.method(concurrency_group="events")
    def hear(self) -> list[Any]:
        """What has come since the last call; waits for something, for a moment."""
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
