"""Measures time in which this process ran, for limits on what other processes do. Knows nothing of what that is.

A suspended job (SIGSTOP, a cgroup freezer) is stopped with all its processes, while the system's clocks go on. A
process that waits reads the clock every half second. A much later reading shows that this process did not run.
"""

from __future__ import annotations

import time

POLL_SECONDS = 0.5
"""Longest single wait of a process that waits with a limit."""
# Between two looks no more than this counts. A process that runs looks in time, or is late by its own doing.
_MOST_SECONDS_A_READING = 2.0
# Seconds that remain after a suspension, because the watched processes may be continued later than the watching one.
_GRACE_SECONDS = 5.0


class Stopwatch:
    """Counts from the moment when it is made."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._read_at = time.monotonic()
        self._was_late = False

    def exceeds(self, limit_seconds: float) -> bool:
        """Whether more time than that has passed. The limit is to be the same each time."""
        now = time.monotonic()
        passed, self._read_at = now - self._read_at, now
        self._seconds += min(passed, _MOST_SECONDS_A_READING)
        was_late, self._was_late = self._was_late, passed > _MOST_SECONDS_A_READING
        if self._was_late and not was_late:  # only once: a process that is always late comes to an end, too
            self._seconds = min(self._seconds, max(0.0, limit_seconds - _GRACE_SECONDS))
        return self._seconds > limit_seconds

    def poll_seconds(self, limit_seconds: float) -> float:
        """The longest wait before the next check, in seconds."""
        return max(0.0, min(limit_seconds - self._seconds, POLL_SECONDS))
