"""A job as its files have it: output, error file, state, status and input, read from outside.

It takes no lock, changes nothing and needs no model, so a job may be at work meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.names import manifest_path
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.files.runs import Runs
from npu_runner.batch.files.state_file import read_state
from npu_runner.batch.files.status_file import read_status
from npu_runner.batch.job.summary import Totals
from npu_runner.errors import ConfigError

NO_INPUT = os.devnull


class PastJob:
    """The job whose answers are in `output`, or will be once its model is loaded. Raises ConfigError where none is."""

    def __init__(self, output: str):
        self.name = output
        self.output = Path(os.path.realpath(output))
        # The status first: the state is at least as new then, and has whatever the status leaves out.
        self.status = None
        with contextlib.suppress(ConfigError):
            self.status = read_status(self.output)
        self.manifest, self.recorded = read_state(self.output)
        """The runs that the state has."""
        with clear_file_errors(f"output {output}"):
            is_there = self.output.is_file()
            has_begun = self.manifest is not None or (not is_there and len(self.runs) > 0)
        if not is_there and not has_begun:
            raise ConfigError(f"output {output}: there is no such file; name the output of a job")
        if not has_begun:
            name = manifest_path(self.output).name
            raise ConfigError(f"output {output}: there is no {name} beside it, so it is no job's output")

    @property
    def runs(self) -> Runs:
        """The runs of the job, with what the status has of the last ones."""
        if self.status is None or not self.status.belongs_to(self.recorded):
            return self.recorded
        return self.recorded.with_runs(Runs.from_json(self.status.runs).last)

    def totals(self, input: str | None) -> Totals:
        """The totals of all runs. Without `input`, the number of rows is the last run's. Raises ConfigError for a file
        without a result row among its lines."""
        with clear_file_errors(f"output {self.name}"):
            is_under_way = job_at_work(self.output) is not None
            with AnswerFile(self.files) as rows:
                counts = rows.scan().counts()
                rows.refuse_other_files()
        num_rows = self.runs.last[-1]["rows"] if self.runs.last else None
        if input is not None:
            with self._opened(input) as (_, rows):
                num_rows = rows.num_rows
        return Totals(output=self.name, num_rows=num_rows, rows=counts, runs=self.runs, is_under_way=is_under_way)

    @property
    def files(self) -> list[Path]:
        """The output, and the error file if there is one."""
        errors = None if self.manifest is None else self.manifest.error_file
        return [self.output] if errors is None else [self.output, self.output.parent / errors]

    @contextlib.contextmanager
    def _opened(self, input: str) -> Iterator[tuple[InputFile, InputScan]]:
        """Raises ConfigError for an input that the job was not begun with."""
        with InputFile(input) as file:
            yield file, file.scan_for(self.name, None if self.manifest is None else self.manifest.input)


def summary_lines(totals: Totals) -> list[str]:
    unfinished = "" if totals.num_unfinished is None else f", {totals.num_unfinished} not finished"
    lines = [f"{totals.output}: {totals.state}", f"rows      {totals.rows_shown}{unfinished}"]
    if not totals.runs.last:
        return [*lines, "runs      none is recorded"]
    last = totals.runs.last[-1]
    began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last["started"]))
    where = "" if last["platform"] is None else f", {last['platform']} x {last['devices']}"
    lines += [
        f"took      {totals.cost}",
        f"runs      {len(totals.runs)}; the last one began at {began}, npu-runner {last['npu_runner']}{where}: "
        f"{last['end'] or 'no end is recorded'}",
    ]
    if totals.num_unrecorded:
        lines.append(f"          {totals.num_unrecorded} answers came without a record of their tokens and seconds")
    return lines
