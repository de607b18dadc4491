"""Where the host's time goes in a step. Knows nothing of what is done in it."""

from __future__ import annotations

import time
from dataclasses import dataclass


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
