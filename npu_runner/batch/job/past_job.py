"""A job as its files have it: output, error file, manifest, record of runs, input. For looking at it from outside.

Takes no lock, changes nothing and needs no model, so a job may be at work meanwhile. Knows nothing of a run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import manifest_path, runs_path
from npu_runner.batch.files.output_file import job_at_work
from npu_runner.batch.files.output_scan import counts_of, scan_output
from npu_runner.batch.files.run_record import read_runs
from npu_runner.batch.job.totals import Totals
from npu_runner.batch.rows.openai_response import FAULTS, key_of_answer
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError

NO_INPUT = os.devnull


class PastJob:
    """The job whose answers are in `output`, or will be once its model is loaded. Raises ConfigError where none is."""

    def __init__(self, output: str):
        self.name = output
        self.output = Path(os.path.realpath(output))
        self.manifest = Manifest.load(self.output)
        with clear_file_errors(f"output {output}"):
            is_there = self.output.is_file()
            has_begun = self.manifest is not None or (not is_there and runs_path(self.output).is_file())
        if not is_there and not has_begun:
            raise ConfigError(f"output {output}: there is no such file; name the output of a job")
        if not has_begun:
            name = manifest_path(self.output).name
            raise ConfigError(f"output {output}: there is no {name} beside it, so it is no job's output")

    def totals(self, input: str | None) -> Totals:
        """Of all runs so far. Without `input` the number of rows is what the last run has recorded. Raises ConfigError
        for a file without a result row among its lines."""
        with clear_file_errors(f"output {self.name}"):
            self.refuse_other_files()
            is_under_way = job_at_work(self.output) is not None
            counts = counts_of([scan_output(path) for path in self.files])
        runs = read_runs(self.output)
        num_rows = runs[-1]["rows"] if runs else None
        if input is not None:
            with self._opened(input) as (_, rows):
                num_rows = rows.num_rows
        return Totals(output=self.name, num_rows=num_rows, rows=counts, runs=runs, is_under_way=is_under_way)

    def refuse_other_files(self) -> None:
        """Raise ConfigError for a file that has whole lines, none of them a result row."""
        for path in self.files:
            _refuse_other_file(path)

    @property
    def files(self) -> list[Path]:
        """Of rows: the answers, and failed rows where they are apart."""
        errors = None if self.manifest is None else self.manifest.error_file
        return [self.output] if errors is None else [self.output, self.output.parent / errors]

    @contextlib.contextmanager
    def _opened(self, input: str) -> Iterator[tuple[InputFile, InputScan]]:
        """Raises ConfigError for an input that the job was not begun with."""
        with InputFile(input) as file:
            yield file, file.scan_for(self.name, None if self.manifest is None else self.manifest.input)


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
