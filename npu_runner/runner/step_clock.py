"""Where the host's time goes in a step. Knows nothing of what is done in it."""

from __future__ import annotations

import dataclasses
import time

from npu_runner.request.outputs import StepSeconds


class StepClock(StepSeconds):
    """Each `end_...` adds to its phase what has passed since the `end_...` before it, or since `start`.

    On an accelerator `launch` and `sample` only queue work, and `wait` is what the device still needs when the host has
    nothing left to do. On the CPU the work is done while it is launched.
    """

    _since = 0.0

    def seconds(self) -> dict[str, float]:
        return dataclasses.asdict(self)

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
