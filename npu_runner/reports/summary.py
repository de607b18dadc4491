"""A job as its files have it: output, error file, state, status and input, read from outside.

It takes no lock, changes nothing and needs no model, so a job may be at work meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import RULE_OF_JOB
from npu_runner.batch.files.names import manifest_path
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.files.runs import Runs
from npu_runner.batch.files.state_file import read_state
from npu_runner.batch.files.status_file import read_status
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.places import find_places
from npu_runner.batch.job.report import about_job, make_report
from npu_runner.batch.job.summary import Totals
from npu_runner.batch.rows.openai_response import FAULTS, key_of_answer
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError
from npu_runner.request.limits import LIMITS

NO_INPUT = os.devnull
_LIMIT_OF_IMAGES = "prompts.max_source_pixels"


class PastJob:
    """The job whose answers are in `output`, or will be once its model is loaded. Raises ConfigError where none is."""

    def __init__(self, output: str):
        self.name = output
        self._output = Path(os.path.realpath(output))
        # The status first: the state is at least as new then, and has whatever the status leaves out.
        self.status = None
        with contextlib.suppress(ConfigError):
            self.status = read_status(self._output)
        self._manifest, self.recorded = read_state(self._output)
        """The runs that the state has."""
        with clear_file_errors(f"output {output}"):
            is_there = self._output.is_file()
            has_begun = self._manifest is not None or (not is_there and len(self.runs) > 0)
        if not is_there and not has_begun:
            raise ConfigError(f"output {output}: there is no such file; name the output of a job")
        if not has_begun:
            name = manifest_path(self._output).name
            raise ConfigError(f"output {output}: there is no {name} beside it, so it is no job's output")

    @property
    def runs(self) -> Runs:
        """The runs of the job, with what the status has of the last ones."""
        if self.status is None or not self.status.belongs_to(self.recorded):
            return self.recorded
        return self.recorded.with_runs(Runs.from_json(self.status.runs).last)

    def totals(self, input: str | None) -> Totals:
        """Of all runs so far. Without `input` the number of rows is what the last run has recorded. Raises ConfigError
        for a file without a result row among its lines."""
        with clear_file_errors(f"output {self.name}"):
            is_under_way = job_at_work(self._output) is not None
            with AnswerFile(self._files) as rows:
                counts = rows.scan().counts()
                rows.refuse_other_files()
        num_rows = self.runs.last[-1]["rows"] if self.runs.last else None
        if input is not None:
            with self._opened(input) as (_, rows):
                num_rows = rows.num_rows
        return Totals(output=self.name, num_rows=num_rows, rows=counts, runs=self.runs, is_under_way=is_under_way)

    def report(self, options: BatchOptions, ends: Sequence[int] | None = None) -> None:
        """Make the report `options.report`; its input is NO_INPUT where none is given. `ends`: bytes of each output
        that are read; None: all that are there."""
        if self._manifest is None or not self._output.is_file():
            raise ConfigError(f"output {self.name}: it is not there yet, or not any more; run its job again, or wait "
                              "for it")
        for path in self._files:
            _refuse_other_file(path)
        place = find_places(options).report
        assert place is not None, "the caller names a page"
        most_pixels = int(self._manifest.settings.get(_LIMIT_OF_IMAGES, LIMITS.max_source_pixels))
        has_schema = RULE_OF_JOB in self._manifest.settings
        about = about_job(self._manifest, self.runs)
        with place:
            if options.input == NO_INPUT:
                make_report(place, options, most_pixels, None, None, self._files, has_schema=has_schema, about=about,
                            ends=ends)
                return
            with self._opened(options.input) as (file, rows):
                make_report(place, options, most_pixels, file, rows, self._files, has_schema=has_schema, about=about,
                            ends=ends)

    @property
    def _files(self) -> list[Path]:
        """Of rows: the answers, and failed rows where they are apart."""
        errors = None if self._manifest is None else self._manifest.error_file
        return [self._output] if errors is None else [self._output, self._output.parent / errors]

    @contextlib.contextmanager
    def _opened(self, input: str) -> Iterator[tuple[InputFile, InputScan]]:
        """Raises ConfigError for an input that the job was not begun with."""
        with InputFile(input) as file:
            yield file, file.scan_for(self.name, None if self._manifest is None else self._manifest.input)


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


def _refuse_other_file(path: Path) -> None:
    """Raises ConfigError where the file has whole lines, and none is a result row. Reads no further than to one."""
    num_lines = 0
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(*FAULTS):
                key_of_answer(parse_json(line.decode()))
                return
            num_lines += line.endswith(b"\n") and bool(line.strip())
    if num_lines:
        raise ConfigError(f"output {path}: none of its {num_lines} lines is a result row; name the output of a job")
