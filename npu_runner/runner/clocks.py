"""Where the host's time goes: of a start, by phase, and of the steps. Knows nothing of what is done in them."""

from __future__ import annotations

import time
from dataclasses import dataclass


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


@dataclass
class StepClock:
    """Seconds of the host since start-up, by phase; each `end_...` books what has passed since the one before it, or
    since `start`.

    On an accelerator `launch` and `sample` only hand out work, and `wait` is what the device still needs when the host
    has nothing left to do. On the CPU the work is done while it is handed out.
    """

    prepare_seconds: float = 0.0
    """Index arrays, and their copy to the device."""
    launch_seconds: float = 0.0
    """The forward, pictures included."""
    sample_seconds: float = 0.0
    wait_seconds: float = 0.0
    """Until the sampled tokens are in host memory."""
    _since: float = 0.0

    def start(self) -> None:
        self._since = time.perf_counter()

    def end_prepare(self) -> None:
        self.prepare_seconds += self._passed()

    def end_launch(self) -> None:
        self.launch_seconds += self._passed()

    def end_sample(self) -> None:
        self.sample_seconds += self._passed()

    def end_wait(self) -> None:
        self.wait_seconds += self._passed()

    def _passed(self) -> float:
        now = time.perf_counter()
        passed, self._since = now - self._since, now
        return passed
