"""Ends a process before a step of its work. Holds no tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

KILLED = 9
STEPS = ("open", "write", "fsync", "replace", "unlink", "close")
"""What a process may be killed before."""


def killed_before(step: int, do: Callable[[], None]) -> bool:
    """In a child that is gone before its `step`th call into the system; False: there are not so many."""
    child = os.fork()
    if child == 0:
        num_calls = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def made(*arguments: Any, **options: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls > step:
                    os._exit(KILLED)
                return call(*arguments, **options)

            return made

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            do()
            os._exit(0)
        finally:
            os._exit(1)  # an error is the parent's to see
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED
