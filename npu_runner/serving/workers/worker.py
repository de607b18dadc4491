"""A worker process: receives a function, then applies it to one task after another until its parent is gone.

Started as a `Child` with FD MEMORY, or forked by a process that has the function (forker.py). Not by fork from its
parent, which runs torch's threads. Not by multiprocessing, which would import the caller's main module (and torch with
it) again. Knows nothing of the tasks.
"""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable
from typing import Any

from npu_runner.errors import JobError, NpuRunnerError
from npu_runner.processes.channel import Channel, ChannelClosed

READY = "ready"
# The outcomes of a task: its result; an error's message; too little memory; the reason why no task of this job can go
# on, which may also replace READY.
RESULT, FAULT, OUT_OF_MEMORY, JOB_FAULT = "result", "fault", "out of memory", "job fault"
# The model's threads wait for each other after every operator, and for the slowest of them: they come first, and
# workers take what is left. On two cores the job served 47 rows/s instead of 36.
NICENESS = 10
_MAX_FAULT_CHARS = 1000


def main(arguments: list[str]) -> None:
    """Serve the parent on the other end of this socket. Returns when the parent closes it or dies.

    `arguments`: the socket's descriptor; the address space, in bytes, that tasks may take beside what the worker has at
    its start (0: any).
    """
    descriptor, memory_bytes = map(int, arguments)
    os.nice(NICENESS)
    channel = Channel(socket.socket(fileno=descriptor))
    function: Callable[[Any], Any] | NpuRunnerError
    try:
        function, _ = channel.receive()
    except NpuRunnerError as error:
        function = error
    except ChannelClosed:
        return
    serve(function, channel, memory_bytes)


def serve(function: Callable[[Any], Any] | NpuRunnerError, channel: Channel, memory_bytes: int) -> None:
    """Apply the function to tasks until the channel closes. An error in its place is what loading it raised."""
    try:
        if isinstance(function, NpuRunnerError):  # whatever it is, it is the same in the next worker
            channel.send((JOB_FAULT, str(function)))
            return
        if memory_bytes:
            _limit_memory(memory_bytes)
        channel.send(READY)
        while True:
            task, _ = channel.receive()
            channel.send(_apply(function, task))
    except ChannelClosed:
        return


def _apply(function: Callable[[Any], Any], task: Any) -> tuple[str, Any]:
    """The outcome of the task, and its value. A fault of a task must not end the worker."""
    try:
        return RESULT, function(task)
    except MemoryError:
        return OUT_OF_MEMORY, None
    except JobError as error:
        return JOB_FAULT, str(error)
    except Exception as error:  # noqa: BLE001 - the border where a task's unforeseen fault becomes a reported failure
        return FAULT, f"{type(error).__name__}: {error}"[:_MAX_FAULT_CHARS]


def _limit_memory(num_bytes: int) -> None:
    """Bound further allocations, so that a task cannot push the model out of the host's memory."""
    with open("/proc/self/statm") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = present + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))
