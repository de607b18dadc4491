"""Shows the progress of a job: a bar on a terminal, a plain line now and then elsewhere. Writes to stderr only.

Once stderr cannot be written it goes quiet. Knows nothing of the engine beyond its counters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO, cast

from tqdm import tqdm

from npu_runner.batch.rows.counts import Counts
from npu_runner.processes.patient_streams import PatientStream, patient
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.loading_line import loading_line

_BAR_SECONDS = 0.5
_LINE_SECONDS = 10.0
_BAR_FORMAT = "{percentage:3.0f}%|{bar:10}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"


class Progress:
    """`update` may be called at any rate; it shows something when enough time has passed."""

    def __init__(self, style: str = "auto", stream: TextIO | PatientStream | None = None, unit: str = "row"):
        """`unit`: the word for a row."""
        self._stream = patient(sys.stderr if stream is None else stream)
        self._out = cast(TextIO, self._stream)
        if style == "auto":
            style = "bar" if self._stream.isatty() else "lines"
        self._style, self._unit = style, unit
        self._bar: tqdm | None = None
        self._num_rows = self._num_before = 0
        self._start_time = 0.0
        self._interval = _BAR_SECONDS if style == "bar" else _LINE_SECONDS
        self._last_time = time.monotonic()
        self._last_counts = (0, 0, 0)

    def loading(self, phase: str) -> None:
        """Show the phase of the load: on a terminal at once, elsewhere a line now and then."""
        if self._style == "bar":
            self._bar = loading_line(self._out) if self._bar is None else self._bar
            self._bar.set_description_str(phase)
        elif time.monotonic() - self._last_time >= self._interval:
            self._last_time = time.monotonic()
            self.say(phase)

    @property
    def silence(self) -> str | None:
        """The reason why it went quiet; None: everything was written."""
        return self._stream.silence

    def say(self, message: str, *, is_last: bool = False) -> None:
        """Print a line. `is_last`: it reports the end of the job, also where no progress is shown."""
        if self._bar is not None:
            self._bar.write(message, file=self._out)
        elif is_last or self._style != "off":
            print(message, file=self._out, flush=True)

    def start(self, num_rows: int, num_before: int) -> None:
        """Rows are served from now on; `num_before` of them are finished already."""
        self._num_rows, self._num_before = num_rows, num_before
        self._start_time = self._last_time = time.monotonic()
        if self._style == "bar":
            self.close()
            self._bar = tqdm(
                total=num_rows, initial=num_before, unit=self._unit, file=self._out, dynamic_ncols=True,
                bar_format=_BAR_FORMAT)

    def update(self, tally: Counts, get_stats: Callable[[], EngineStats], *, is_last: bool = False) -> None:
        """Show the counts if enough time has passed since the last time."""
        now = time.monotonic()
        elapsed = now - self._last_time
        if self._style == "off" or (elapsed < self._interval and not is_last):
            return
        stats = get_stats()
        counts = (tally.num_done, stats.num_prefill_tokens, stats.num_decode_tokens)
        rates = [(new - old) / max(elapsed, 1e-3) for new, old in zip(counts, self._last_counts, strict=True)]
        self._last_time, self._last_counts = now, counts
        state = [*tally.shortcomings(with_codes=self._bar is None), f"decode {rates[2]:.0f} tok/s",
                 f"prefill {rates[1]:.0f} tok/s", f"{stats.num_running} running", f"{stats.num_waiting} waiting"]
        if self._bar is not None:
            self._bar.n = self._num_before + tally.num_done
            _show_state(self._bar, state)
        else:
            self.say(", ".join([*self._pace(tally, stats, now - self._start_time, rates[0]), *state]))

    def _pace(self, tally: Counts, stats: EngineStats, seconds: float, rate_lately: float) -> list[str]:
        # The time left follows from the rate over all of this run.
        num_done = tally.num_done
        rows = f"{self._num_before + num_done}/{self._num_rows} {self._unit}s"
        if not num_done and stats.num_running:
            rows += f" ({stats.num_running} in flight have {stats.num_decode_tokens} tokens)"
        rest = tally.seconds_left(self._num_rows - self._num_before - num_done, stats, seconds)
        left = [] if rest is None else [f"{tqdm.format_interval(rest)} left"]
        return [rows, *left, f"{num_done / max(seconds, 1e-3):.2f} {self._unit}s/s (lately {rate_lately:.2f})"]

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _show_state(bar: tqdm, state: list[str]) -> None:
    """Show the first entries of `state` that fit into the terminal's width; no entry is cut."""
    shown = bar.format_dict
    while state and shown["ncols"] is not None and shown["ncols"] < len(
        tqdm.format_meter(**{**shown, "ncols": None, "postfix": ", ".join(state)})):
        state = state[:-1]
    bar.set_postfix_str(", ".join(state))
