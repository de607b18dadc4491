"""Sets how torch's threads wait for each other. Knows no platform; must be called before torch is loaded."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"


def wait_briefly() -> None:
    """Let OpenMP's threads spin for microseconds and then sleep, unless a variable of the user says otherwise.

    By default GNU's OpenMP, which torch's wheels bring, spins for milliseconds after every operator. If another process
    needs a core, a thread with work then waits for one that only spins. This is OpenMP's own count for more threads
    than cores; but it counts only its own process's threads.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
