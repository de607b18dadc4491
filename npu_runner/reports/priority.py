"""Lets a job on the same host go first. Knows nothing of reports.

Linux first shares its processors among sessions (autogroup), and a priority counts only within one. So a process that
gives way has a session of its own, and that session has the lowest weight.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import signal
from functools import cache
from pathlib import Path

_LOWEST = 19
_AUTOGROUP = Path("/proc/self/autogroup")
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
"""The number of the system call ioprio_set, by machine: the standard library has no function for it."""
_THIS_PROCESS, _IDLE_CLASS = 1, 3 << 13
_PR_SET_PDEATHSIG = 1


def give_way() -> None:
    """Give this process, and the processes that it starts, the lowest priority for the processor and for the disk. A
    command of an interactive shell goes on in a child process, whose exit status it returns."""
    os.nice(_LOWEST)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None).syscall(number, _THIS_PROCESS, 0, _IDLE_CLASS)
    try:
        os.setsid()
    except PermissionError:  # it leads the shell's process group
        _go_on_in_child()
    lower_session()


@cache
def lower_session() -> None:
    """Give the session that this process leads the weight of its priority, if that is the lowest."""
    if os.getpriority(os.PRIO_PROCESS, 0) == _LOWEST and os.getsid(0) == os.getpid():
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
