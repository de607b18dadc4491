"""Lets a job on the same host go first. Knows nothing of reports.

Linux first shares its processors among sessions (autogroup), and a priority counts only within one. So a process that
gives way has a session of its own, and that session has the lowest weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from functools import cache
from pathlib import Path

from npu_runner.batch.files.output_lock import job_at_work

_LOWEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_PR_SET_PDEATHSIG = 1


def give_way_to_job(output: str) -> None:
    """Call `give_way` if a process holds the lock of this output. It is for a command, before it imports numpy and
    others: their imports take most of its time."""
    is_at_work = False
    with contextlib.suppress(OSError):
        is_at_work = job_at_work(Path(os.path.realpath(output))) is not None
    if is_at_work:
        give_way()


def give_way() -> None:
    """Give this process, and the processes that it starts, the lowest priority for the processor and for the disk. A
    command of an interactive shell goes on in a child process, whose exit status it returns."""
    os.nice(_LOWEST)
    # Whatever wakes up preempts a process of this policy, and Linux puts its reads into the idle class of the disk.
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    try:
        os.setsid()
    except PermissionError:  # it leads the shell's process group
        _go_on_in_child()
    lower_session()


@cache
def lower_session() -> None:
    """Give the session that this process leads the lowest weight, if the process gives way."""
    if os.sched_getscheduler(0) == os.SCHED_IDLE and os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):  # a kernel without autogroup
            _AUTOGROUP.write_text(str(_LOWEST))


def _go_on_in_child() -> None:
    child = os.fork()
    if not child:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # Ctrl-C ends the parent alone
        os.setsid()
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 1)
