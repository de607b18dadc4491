"""A job as its files have it: output, error file, state, status and input, read from outside.

It takes no lock, changes nothing and needs no model, so a job may be at work meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import read_state
from npu_runner.batch.files.names import manifest_path
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.files.runs import FINISHED, Runs
from npu_runner.batch.files.status_file import read_status
from npu_runner.batch.rows.counts import Counts, attempts_lines
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
        """The totals of all runs. Without `input`, the number of rows is the last run's. Raises ConfigError for another
        job's input, and for a file without a result row among its lines."""
        with clear_file_errors(f"output {self.name}"):
            is_under_way = job_at_work(self.output) is not None
            with AnswerFile(self.files) as rows:
                counts = rows.scan().counts()
                rows.refuse_other_files()
        num_rows = self.runs.last[-1]["rows"] if self.runs.last else None
        if input is not None:
            with InputFile(input) as file:
                num_rows = file.scan_for(self.name, None if self.manifest is None else self.manifest.input).num_rows
        return Totals(output=self.name, num_rows=num_rows, rows=counts, runs=self.runs, is_under_way=is_under_way)

    @property
    def files(self) -> list[Path]:
        """The output, and the error file if there is one."""
        errors = None if self.manifest is None else self.manifest.error_file
        return [self.output] if errors is None else [self.output, self.output.parent / errors]


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The runs of a job, the one under way among them."""

    output: str
    num_rows: int | None
    """Rows of the input; None: it is not known."""
    rows: Counts
    """The rows in the output and its error file."""
    runs: Runs
    is_under_way: bool = False

    @property
    def state(self) -> str:
        if self.is_under_way:
            return "under way"
        if self.num_rows is None:
            return "unknown"
        return "unfinished" if self.num_unfinished else FINISHED

    @property
    def num_unfinished(self) -> int | None:
        return None if self.num_rows is None else max(0, self.num_rows - self.rows.num_done)

    @property
    def num_unrecorded(self) -> int:
        """Answers of runs that are not known, and of killed ones after their last status: their tokens are not
        counted."""
        return max(0, self.rows.num_answered - self.runs.sums("tally").get("num_answered", 0))

    @property
    def counts(self) -> Counts:
        return self.runs.counts(self.rows)

    def to_json(self) -> dict[str, Any]:
        counts, older = self.counts, self.runs.older
        return {
            "output": self.output,
            "state": self.state,
            "rows": {"total": self.num_rows, **counts.rows_json(), "expected": counts.num_expected,
                     "as_expected": counts.num_as_expected, "unfinished": self.num_unfinished,
                     "unrecorded": self.num_unrecorded},
            "tokens": {**counts.tokens_json(), **{name if name.startswith("draft_") else f"{name}_computed": count
                                                  for name, count in self.runs.sums("computed").items()}},
            "seconds": {name: round(value, 3) for name, value in self.runs.sums("seconds").items()},
            "runs": list(self.runs.last),
            **({"older_runs": older} if older else {}),
        }

    def to_line(self) -> str:
        """The line for a person who has read of the last run."""
        cost = f"; {self.cost}; runs {len(self.runs)}" if len(self.runs) else ""
        return f"in all    {self.rows_shown}{cost}"

    @property
    def rows_shown(self) -> str:
        counts = self.counts
        return ", ".join([counts.answered_shown, *counts.shortcomings()])

    @property
    def cost(self) -> str:
        counts, seconds = self.counts, self.runs.sums("seconds")
        return (f"{counts.num_prompt_tokens} prompt and {counts.num_completion_tokens} completion tokens, "
                f"{seconds['start']:.1f} s to start and {seconds['serve']:.1f} s to serve, {seconds['device']:.1f} "
                "device seconds")

    def to_lines(self) -> list[str]:
        unfinished = "" if self.num_unfinished is None else f", {self.num_unfinished} not finished"
        lines = [f"{self.output}: {self.state}", f"rows      {self.rows_shown}{unfinished}"]
        lines += attempts_lines(self.counts.rows_json())
        if not self.runs.last:
            return [*lines, "runs      none is recorded"]
        last = self.runs.last[-1]
        began = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(last["started"]))
        where = "" if last["platform"] is None else f", {last['platform']} x {last['devices']}"
        lines += [
            f"took      {self.cost}",
            f"runs      {len(self.runs)}; the last one began at {began}, npu-runner {last['npu_runner']}{where}: "
            f"{last['end'] or 'no end is recorded'}",
        ]
        if self.num_unrecorded:
            lines.append(f"          {self.num_unrecorded} answers came without a record of their tokens and seconds")
        return lines
