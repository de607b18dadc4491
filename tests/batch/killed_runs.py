"""Runs that are killed: before one of their calls into the system, or by themselves."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from npu_runner.batch.files.output_lock import job_at_work
from tests.batch.job_folder import Job

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


def told_in(summary: Path) -> dict[str, Any]:
    return dict(json.loads(summary.read_text()))


def killed_within(job: Job, do: Callable[[], Any]) -> None:
    """In a child that does not come to its end. What it was just starting may hold the lock a moment longer."""
    child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED
    while job_at_work(job.output) is not None:
        time.sleep(0.01)


def kill() -> None:
    os._exit(KILLED)
