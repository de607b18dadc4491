"""A worker process: receives a function, then applies it to one task after another until its parent is gone.

Started as `python -m npu_runner.workers.worker FD` and not by fork, because the parent runs torch's threads, nor by
multiprocessing, which would import the caller's main module (and torch with it) once more. Knows nothing of the tasks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from npu_runner.workers.channel import Channel, ChannelClosed

READY = "ready"
_PR_SET_PDEATHSIG = 1
# The model's threads wait for each other after every operator, and for the slowest of them: they come first, and
# workers take what is left. On two cores the job served 47 rows/s instead of 36.
_NICENESS = 10


def main(descriptor: int, parent: int) -> None:
    """Serve the parent on the other end of this socket. Returns when the parent closes it or dies."""
    _die_with(parent)
    os.nice(_NICENESS)
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        # The function's module may be importable only with the parent's path.
        sys.path[:], _ = channel.receive()
        function, _ = channel.receive()
        channel.send(READY)
        while True:
            task, _ = channel.receive()
            channel.send(_apply(function, task))
    except ChannelClosed:
        return


def _apply(function: Callable[[Any], Any], task: Any) -> tuple[bool, Any]:
    """(True, result), or (False, what went wrong): a fault of one task must not end the worker."""
    try:
        return True, function(task)
    except Exception as error:  # noqa: BLE001 - the border where a task's unforeseen fault becomes a reported failure
        return False, f"{type(error).__name__}: {error}"


def _die_with(parent: int) -> None:
    """A parent killed with SIGKILL must not leave a worker that hangs in a decoder."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
