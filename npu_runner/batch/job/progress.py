"""Shows how a job gets on: a bar on a terminal, a plain line now and then elsewhere. Writes to stderr only.

Where nobody can read that any more it goes quiet. Knows nothing of the engine beyond its counters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

from tqdm import tqdm

from npu_runner.batch.job.summary import Tally
from npu_runner.processes.patient_streams import PatientStream, patient
from npu_runner.request.outputs import EngineStats

_BAR_SECONDS = 0.5
_LINE_SECONDS = 10.0


class Progress:
    """Call `update` as often as you like; it draws when it is time to."""

    def __init__(self, style: str = "auto", stream: TextIO | PatientStream | None = None):
        self._stream = patient(sys.stderr if stream is None else stream)
        self._out = cast(TextIO, self._stream)
        if style == "auto":
            style = "bar" if self._stream.isatty() else "lines"
        self._style = style
        self._bar: tqdm | None = None
        self._num_rows = self._num_before = 0
        self._interval = _BAR_SECONDS if style == "bar" else _LINE_SECONDS
        self._last_time = 0.0
        self._last_counts = (0, 0, 0)

    @property
    def silence(self) -> str | None:
        """Why it has gone quiet; None: whatever was to be shown was written."""
        return None if self._style == "off" else self._stream.silence

    def say(self, message: str) -> None:
        """A line for the person who watches."""
        if self._bar is not None:
            self._bar.write(message, file=self._out)
        elif self._style != "off":
            print(message, file=self._out, flush=True)

    def start(self, num_rows: int, num_before: int) -> None:
        """Serving begins; `num_before` of the rows are finished already."""
        self._num_rows, self._num_before, self._last_time = num_rows, num_before, time.monotonic()
        if self._style == "bar":
            self._bar = tqdm(
                total=num_rows, initial=num_before, unit="row", file=self._out, dynamic_ncols=True, smoothing=0.1
            )

    def update(self, tally: Tally, get_stats: Callable[[], EngineStats], *, is_last: bool = False) -> None:
        """Draw if enough time has passed since the last drawing."""
        now = time.monotonic()
        elapsed = now - self._last_time
        if self._style == "off" or (elapsed < self._interval and not is_last):
            return
        stats = get_stats()
        counts = (tally.num_done, stats.num_prefill_tokens, stats.num_decode_tokens)
        rates = [(new - old) / max(elapsed, 1e-3) for new, old in zip(counts, self._last_counts, strict=True)]
        self._last_time, self._last_counts = now, counts
        state = (
            f"prefill {rates[1]:.0f} tok/s, decode {rates[2]:.0f} tok/s, {stats.num_running} running, "
            f"{stats.num_waiting} waiting, {tally.num_failed} failed"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(state, refresh=False)
            self._bar.update(self._num_before + tally.num_done - self._bar.n)
        else:
            done = self._num_before + tally.num_done
            self.say(f"{done}/{self._num_rows} rows, {rates[0]:.2f} rows/s, {state}")

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
