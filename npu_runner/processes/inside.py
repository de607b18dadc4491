"""What every child does before its own work: it dies with its parent, has a name in `ps`, and survives lost words.

Started by `Child` with PARENT TITLE MODULE ARGUMENT...; calls `main(arguments)` of that module. Knows nothing of it.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys

from npu_runner.processes.patient_streams import make_standard_streams_patient

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(arguments: list[str]) -> None:
    parent, title, module, *own = arguments
    if sys.platform == "linux":
        _die_with(int(parent))
        ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())
    make_standard_streams_patient()
    importlib.import_module(module).main(own)


def _die_with(parent: int) -> None:
    """Killed with SIGKILL it must not leave anybody who computes, loads or hangs in a decoder.

    The kernel sends the signal when the thread that started this process ends: child.py has one that lasts.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
