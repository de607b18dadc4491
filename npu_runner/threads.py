"""How torch's threads wait for each other. Knows no platform; has to be asked before torch is loaded."""

from __future__ import annotations

import os

SPIN_COUNT = "1000"


def wait_briefly() -> None:
    """Let OpenMP's threads spin for microseconds and then sleep, unless a variable of the user says otherwise.

    By itself GNU's OpenMP, which torch's wheels bring, spins for milliseconds after every operator. On a host where
    another process wants a core, the thread that still has work then waits for one that only spins. This is the count
    that OpenMP takes by itself where it knows of more threads than cores; it knows of its own process alone.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
