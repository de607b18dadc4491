"""Tasks that misbehave in a worker process. Imports next to nothing, because every replaced worker imports it again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


class DieAt:
    """Kills its own process at the given tasks: `once` leaves a mark, so that the next process survives."""

    def __init__(self, marks: Path, always: set[int], once: set[int]):
        self.marks, self.always, self.once = marks, always, once

    def __call__(self, task: int) -> int:
        if task in self.always:
            os.kill(os.getpid(), signal.SIGSEGV)
        mark = self.marks / str(task)
        if task in self.once and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return task + 1000


class HangAt:
    def __init__(self, tasks: set[int]):
        self.tasks = tasks

    def __call__(self, task: int) -> int:
        if task in self.tasks:
            time.sleep(3600)
        return task


class TakeSteps:
    """Takes 0.6 s of a process that runs, in steps, and leaves a file for each try; tasks of `hangs` never end."""

    def __init__(self, tries: str, hangs: set[int]):
        self.tries, self.hangs = Path(tries), hangs

    def __call__(self, task: int) -> int:
        (self.tries / f"{task}.{os.getpid()}").touch()
        if task in self.hangs:
            time.sleep(3600)
        for _ in range(12):
            time.sleep(0.05)
        return task


def die_at_odd(task: tuple[str, int]) -> int:
    """A page is rendered, or ends the process if its number is odd."""
    if task[1] % 2:
        os.abort()
    return task[1]
