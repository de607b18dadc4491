"""Where the host's time goes, by phase: of a start, and of the steps. Knows nothing of what is done in a phase."""

from __future__ import annotations

import time

STEP_PHASES = ("prepare", "launch", "sample", "wait")
"""The phases of a step: index arrays and their copy to the device; the forward, images included; the sampler; until the
sampled tokens are in host memory.

On an accelerator `launch` and `sample` only submit work. `wait` is the time that the device still needs afterwards. On
the CPU the work is done while it is submitted.
"""


class PhaseClock:
    """Seconds of the host by phase, in the order in which they were first entered; one phase follows the other."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase: str | None = None
        self._since = time.perf_counter()

    def start(self, phase: str) -> None:
        """`enter`, where what came before failed and did not `end`: the time since then is not counted."""
        self._phase = None
        self.enter(phase)

    def enter(self, phase: str) -> None:
        """Count the time from here on for `phase`; one that was entered before goes on."""
        self._book()
        self._phase = phase

    def add(self, phase: str, seconds: float) -> None:
        """Add a phase that was measured elsewhere, before the first."""
        self.seconds[phase] = seconds

    def end(self) -> None:
        """Nothing is counted before the next `enter`."""
        self._book()
        self._phase = None

    def describe(self) -> str:
        return ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in self.seconds.items())

    def _book(self) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + now - self._since
        self._since = now
