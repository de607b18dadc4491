"""Where the time of a start goes, by phase. Knows nothing of what is done in one."""

from __future__ import annotations

import time


class StartClock:
    """Seconds of the host by phase, in the order in which they were first entered; one phase follows the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._since = time.perf_counter()

    def enter(self, phase: str) -> None:
        """What passes from here on belongs to `phase`; one that was entered before goes on."""
        self._book()
        self._phase = phase

    def add(self, phase: str, seconds: float) -> None:
        """Of a phase that somebody else measured, before the first."""
        self.seconds[phase] = seconds

    def end(self) -> None:
        """The start is over: nothing is counted before the next `enter`."""
        self._book()
        self._phase = None

    def describe(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())

    def _book(self) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
