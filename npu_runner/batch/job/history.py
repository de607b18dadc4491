"""The runs of a job, from the first look at its output to the end of this run.

Runs are in the state once a run has begun to write. Until then they are in the status: this run, and those before it
that were killed while they loaded or whose last figures the state does not have. Knows nothing of how rows are served.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from npu_runner.batch.files.place import Place
from npu_runner.batch.files.runs import FINISHED, INTERRUPTED, Run, Runs
from npu_runner.batch.files.state_file import StateFile
from npu_runner.batch.files.status_file import Status, printable, read_status
from npu_runner.batch.job.signals import Interrupted
from npu_runner.batch.job.summary import JobSummary, Totals
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.errors import ConfigError, JobError, NpuRunnerError


class JobHistory:
    """`summary`'s run among the runs of its output. The output is locked from `read` to the end of `ending`."""

    def __init__(self, summary: JobSummary, say: Callable[[str], None]):
        self._summary = summary
        self._say = say
        self._state = StateFile(None)
        self._earlier = Runs()
        self._pending: tuple[Run, ...] = ()
        """Earlier runs as the status has them."""
        self._overwrites = False
        self._final: Run | None = None
        """This run once it has ended."""
        self.is_counted = False
        """This run is one of the output's runs: it has begun to load, and was not refused."""
        self.is_complete = False
        """Every row has its line."""

    def read(self, state: StateFile, output: Path | None, *, overwrite: bool) -> None:
        """Read what earlier runs have done. A status that is torn costs figures, and is no error."""
        self._state, self._overwrites = state, overwrite
        if not overwrite:
            state.load()
        status: Status | None = None
        if output is not None:
            with contextlib.suppress(ConfigError):
                status = read_status(output)
        if status is not None and status.belongs_to(state.runs):
            self._pending = Runs.from_json(status.runs).last
        if not overwrite:
            self._earlier = state.runs.with_runs(self._pending)

    def start(self) -> None:
        """The model is about to load. Until it stands ready, a run that overwrites an output is none of its runs."""
        self.is_counted = not self._overwrites

    @property
    def runs(self) -> Runs:
        return self._earlier.with_runs(self._this_run)

    @property
    def _this_run(self) -> list[Run]:
        return [self._final or self._summary.to_run()] if self.is_counted else []

    @property
    def runs_of_status(self) -> list[Run]:
        """The runs that are not in the state, and this one."""
        return [*(() if self._state.is_begun else self._pending), *self._this_run]

    @property
    def last_recorded(self) -> str | None:
        return self._state.runs.last_id

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """When it is left, the state on disk has the end of the run, if the run had begun to write. After an error it
        raises no second one."""
        try:
            yield
        except (NpuRunnerError, Interrupted) as error:
            self._summary.end = INTERRUPTED if isinstance(error, Interrupted) else printable(str(error))
            is_refused = isinstance(error, NpuRunnerError) and not self._summary.is_worth_saying(error)
            self.is_counted &= self._state.is_begun or not is_refused
            try:
                self._save()
            except JobError as second:
                self._say(str(second))
            raise
        self._summary.end = INTERRUPTED if self._summary.is_cut_short else FINISHED
        try:
            self._save()
        except JobError as error:
            self._summary.end = printable(str(error))
            self._final = self._summary.to_run()
            raise

    def _save(self) -> None:
        self._final = self._summary.to_run()
        over: dict[str, Any] = {"retry": Flaw(0), "suspects": {}} if self.is_complete else {}
        self._state.update(runs=self.runs, **over)

    def totals(self, output: str) -> Totals:
        return Totals(output=output, num_rows=self._summary.num_rows, rows=self._summary.rows, runs=self.runs)

    def lines(self, output: str) -> list[str]:
        """The line of all runs together; empty for the first run of an output."""
        is_first = not len(self._earlier) and not self._summary.num_resumed
        return [] if is_first else [self.totals(output).to_line()]

    def write(self, place: Place, output: str) -> None:
        """Write --summary's file. Raises JobError."""
        with place.writing() as file:
            told = {**self.totals(output).to_json(), "this_run": self._summary.to_json()}
            file.write(json.dumps(told, indent=2).encode() + b"\n")
