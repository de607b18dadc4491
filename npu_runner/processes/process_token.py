"""All processes that belong to a replica, however they were started: they have its token in their environment.

Ranks and workers are children of the replica's process; once that is killed nobody is their parent, and a new replica
must not start on devices that they still hold. Knows nothing of what they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from npu_runner.processes.stopwatch import Stopwatch

TOKEN_VARIABLE = "NPU_RUNNER_REPLICA"
_GRACE_SECONDS = 5.0
_END_SECONDS = 60.0
_LOOK_SECONDS = 0.02


def members(token: str) -> list[int]:
    """Process ids of all that run with this token. Empty where the system does not tell (it is not Linux)."""
    wanted = f"{TOKEN_VARIABLE}={token}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        # Of others, or gone meanwhile; of a process that has ended and waits for its parent it is empty.
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def end_members(token: str) -> list[int]:
    """Wait until none is left; who does not end by itself is killed. Returns those that would not go even so.

    Ranks see that their engine is gone and end; one inside a driver's call takes its time.
    """
    grace, end = Stopwatch(), Stopwatch()
    while left := members(token):
        if end.exceeds(_END_SECONDS):
            break
        if grace.exceeds(_GRACE_SECONDS):
            for process_id in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return left
