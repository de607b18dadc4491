"""Keeps what the runs of a job add up to: in the record beside the output while a run goes on, and in --summary's file.

The record is no condition of the job: a line that cannot be written on the way is said and made up for by the next one.
The first and the last one are: without them it is an error. Knows nothing of how rows are served.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.place import Place
from npu_runner.batch.files.run_record import Line, RunRecord
from npu_runner.batch.job.signals import Interrupted
from npu_runner.batch.job.summary import JobRecord, JobSummary
from npu_runner.batch.job.totals import FINISHED, INTERRUPTED, Totals, has_served, line_of
from npu_runner.errors import JobError, NpuRunnerError

LINE_SECONDS = 10.0


class Accounts:
    """Of `record`'s run and those before it. `summary`: where --summary goes.

    The output is locked from `look` to the end of `of_this_run`.
    """

    def __init__(self, record: JobRecord, output: Place, summary: Place | None, say: Callable[[str], None]):
        self._record = record
        self._output = output
        self._summary = summary
        self._say = say
        self._runs = RunRecord(None)
        self._last_line_at: float | None = None
        """None: this run is not in the record."""
        self._overwrites = False
        self._last_line: Line | None = None
        """None: it has not ended."""
        self._earlier_summary: bytes | None = None
        self._is_announced = False

    def look(self, path: Path | None, *, overwrite: bool, has_manifest: bool) -> None:
        """Read what earlier runs have done. Raises ConfigError where that is no record.

        Without a manifest no run of this output has served a row: those that have were of another one of that name.
        """
        self._overwrites = overwrite
        self._runs = RunRecord(path, overwrite=overwrite, counts=lambda run: has_manifest or not has_served(run))

    def clear(self) -> None:
        """Before an output is overwritten."""
        self._runs.clear()

    # -- the record --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def of_this_run(self) -> Iterator[None]:
        """When it is left, the run's last line is on disk, if it had a first one; a refused run has none. After an
        error it raises no second one."""
        try:
            yield
        except (NpuRunnerError, Interrupted) as error:
            try:
                if isinstance(error, Interrupted):
                    self._end(INTERRUPTED)
                elif self._record.is_worth_saying(error):
                    self._end(str(error))
                elif self._last_line_at is not None:
                    self._last_line_at = None
                    self._runs.withdraw()
            except JobError as second:
                self._say(str(second))
            raise
        self._end(INTERRUPTED if self._record.is_cut_short else FINISHED)

    def begin(self) -> None:
        """The first row is about to be served."""
        if self._last_line_at is None:
            self._runs.begin()
            self._write_line()
        else:
            self.keep()

    @property
    def is_recorded(self) -> bool:
        """This run is in the record."""
        return self._last_line_at is not None

    @property
    def last_recorded(self) -> str | None:
        """The last run that the record beside the output has; None: none that stays."""
        if self.is_recorded:
            return self._record.run_id
        return str(self._runs.earlier[-1]["run"]) if self._runs.earlier else None

    def is_due(self) -> bool:
        """Whether it is time for `keep`, while the model loads and while rows are served."""
        return self._last_line_at is not None and time.monotonic() - self._last_line_at >= LINE_SECONDS

    def keep(self) -> None:
        """Append what `record` says now."""
        try:
            self._write_line()
        except JobError as error:
            self._say(str(error))

    def _write_line(self) -> None:
        self._last_line_at = time.monotonic()
        self._runs.append(line_of(self._record, None))

    def _end(self, end: str) -> None:
        if self._last_line_at is not None:
            self._last_line = line_of(self._record, end)
            self._runs.append(self._last_line, is_last=True)

    # -- the summary -------------------------------------------------------------------------------------------------

    def totals(self, *, is_under_way: bool = False) -> Totals:
        record, runs = self._record, [*self._runs.earlier]
        if self._last_line_at is not None:
            runs.append(self._last_line or line_of(record, None))
        return Totals(output=self._output.name, num_rows=record.num_rows, rows=record.rows, runs=runs,
                      is_under_way=is_under_way)

    def lines(self) -> list[str]:
        """What a person has to know beside the summary of this run."""
        return [self.totals().to_line()] if self._runs.earlier or self._record.num_resumed else []

    def announce(self) -> None:
        """The model is about to load: killed from here on, the run is in the record, unless it is to overwrite the
        output of others.

        A summary's file says that a run is under way, until `save` or `withdraw`; a stream is written once, by `save`.
        """
        if not self._overwrites:
            self._runs.begin()
            self._write_line()
        if self._summary is None or self._summary.path is None:
            return
        with clear_file_errors(self._summary.title):
            self._earlier_summary = self._summary.path.read_bytes() if self._summary.path.exists() else None
        self._write({**self.totals(is_under_way=True).to_json(), "this_run": None})
        self._is_announced = True

    def withdraw(self) -> None:
        """Nothing was begun after all: the summary of the run before stays. What is in the way of that is said."""
        if not self._is_announced:
            return
        summary = self._summary
        assert summary is not None, "only a file is announced"
        assert summary.path is not None, "only a file is announced"
        try:
            with summary.late_errors():
                if self._earlier_summary is None:
                    summary.path.unlink(missing_ok=True)
                    return
                with summary.writing() as file:
                    file.write(self._earlier_summary)
        except JobError as error:
            self._say(str(error))

    def save(self, summary: JobSummary) -> None:
        """Raises JobError."""
        if self._summary is not None:
            self._write({**self.totals().to_json(), "this_run": summary.to_json()})

    def _write(self, fields: dict[str, Any]) -> None:
        assert self._summary is not None, "the caller has looked"
        with self._summary.writing() as file:
            file.write(json.dumps(fields, indent=2).encode() + b"\n")
