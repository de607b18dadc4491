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
    started = time.monotonic()
    while left := members(token):
        elapsed = time.monotonic() - started
        if elapsed > _END_SECONDS:
            break
        if elapsed > _GRACE_SECONDS:
            for process_id in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)
    return left


def is_stopped(process_id: int) -> bool:
    """Whether somebody has stopped the process (SIGSTOP)."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] in "Tt"
