"""Tasks for worker processes. Imports next to nothing, because every worker imports it."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import numpy as np

from npu_runner.errors import JobError


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def image(side: int) -> np.ndarray:
    return np.full((side, side, 3), side % 251, dtype=np.uint8)


def allocate(num_bytes: int) -> tuple[int, int]:
    """Takes so much memory for a moment; a negative number ends the process as a library does that gets none."""
    if num_bytes < 0:
        os.abort()
    return len(bytearray(num_bytes)), os.getpid()


_kept: list[bytearray] = []


def allocate_and_keep(num_bytes: int) -> tuple[int, int]:
    """Takes so much memory and holds it as long as the process lives; so slowly that every worker gets its share."""
    time.sleep(0.1)
    _kept.append(bytearray(num_bytes))
    return len(_kept[-1]), os.getpid()


def without_job(task: str) -> str:
    """A task for which no other one of the job can go on."""
    if task == "gone":
        raise JobError("the input is gone")
    return task


def modules(_: int) -> list[str]:
    return sorted(sys.modules)


class Unreadable:
    """Can be pickled and not read back: every worker dies of it before its first task."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return int, ("not a number",)

    def __call__(self, task: int) -> int:
        return task
