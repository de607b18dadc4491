"""A replica's own process: runs the driver's commands from a socket, and sends events.

Started as a `Child` with FD. Ends when the driver closes its end or dies; its ranks and workers end with it. Knows
nothing of rows.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
import traceback
from collections.abc import Callable
from typing import Any, Protocol

from npu_runner.errors import NpuRunnerError, ReplicaDeadError
from npu_runner.processes.channel import Channel, ChannelClosed
from npu_runner.serving.replica import Event, Finished, Ready, Replica, Returned
from npu_runner.threads import wait_briefly

# The longest wait for a row before commands are read, with rows and without.
_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 0.5
_END = ("end", None)


def main(arguments: list[str]) -> None:
    """Serve the driver on the other end of this socket. `arguments`: its descriptor."""
    (descriptor,) = map(int, arguments)
    wait_briefly()
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        cores, _ = channel.receive()
        if cores is not None:
            os.sched_setaffinity(0, cores)  # before torch is loaded, and threads are started
        make, _ = channel.receive()
        ReplicaHost(make, channel).run()
    except ChannelClosed:
        return


class Link(Protocol):
    """The part of a Channel that a host uses."""

    def receive(self) -> tuple[Any, int]: ...
    def send(self, message: Any) -> None: ...


class ReplicaHost:
    """Runs one replica for the driver."""

    def __init__(self, make: Callable[[], Replica], channel: Link):
        self._make = make
        self._channel = channel
        self._commands: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._num_held = 0
        self._is_ready = self._is_serving = False

    def run(self) -> None:
        """Raises ChannelClosed when the driver is gone."""
        threading.Thread(target=self._listen, name="commands", daemon=True).start()
        try:
            with self._make() as replica:
                replica.start(lambda: None, lambda event: self._send([event]))
                while self._run_commands(replica):
                    self._send(replica.poll(_BUSY_SECONDS if self._is_serving else _IDLE_SECONDS))
        except ChannelClosed:
            raise
        except NpuRunnerError as error:
            self._channel.send(_picklable(error))
        except Exception as error:  # noqa: BLE001 - the border of the process: the driver gets every error
            traceback.print_exc()
            self._channel.send(ReplicaDeadError(f"{type(error).__name__}: {error}"))

    def _listen(self) -> None:
        try:
            while True:
                self._commands.put(self._channel.receive()[0])
        except ChannelClosed:
            self._commands.put(_END)

    def _run_commands(self, replica: Replica) -> bool:
        """Run the commands since the last call; without other work, wait for one. False: the driver has ended it."""
        try:
            is_idle = not self._num_held if self._is_serving else self._is_ready
            name, value = self._commands.get(timeout=_IDLE_SECONDS) if is_idle else self._commands.get_nowait()
            while True:
                if (name, value) == _END:
                    return False
                if name == "submit":
                    self._num_held += len(value)
                    replica.submit(value)
                elif name == "recall":
                    replica.recall(value[0], include_started=value[1])
                elif name == "hear":
                    replica.hear(value)
                else:
                    self._is_serving = True
                    replica.serve(value)
                name, value = self._commands.get_nowait()
        except queue.Empty:
            return True

    def _send(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                self._num_held -= len(event.rows)
            elif isinstance(event, Returned):
                self._num_held -= len(event.indices)
            elif isinstance(event, Ready):
                self._is_ready = True
        if events:
            self._channel.send(events)


def _picklable(error: NpuRunnerError) -> NpuRunnerError:
    """The error without its causes, which may hold any object."""
    error.__cause__ = error.__context__ = error.__traceback__ = None
    return error
