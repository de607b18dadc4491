"""Tasks for worker processes. Imports next to nothing, because every worker imports it."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np


def square(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


def picture(side: int) -> np.ndarray:
    return np.full((side, side, 3), side % 251, dtype=np.uint8)


def modules(_: int) -> list[str]:
    return sorted(sys.modules)


class Unreadable:
    """Can be pickled and not read back: every worker dies of it before its first task."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return int, ("not a number",)

    def __call__(self, task: int) -> int:
        return task
