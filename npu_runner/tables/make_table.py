"""`npu-runner table`: the answers of a job, at work or finished, become a table, whole or not at all.

Answers are read twice: once for the types of the columns, once for their cells.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined, requests_in
from npu_runner.batch.files.place import read_by
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import REPETITION_DETECTED
from npu_runner.tables.answer_cells import MORE_METADATA, cells_of
from npu_runner.tables.extra import pyarrow_for
from npu_runner.tables.first_pass import MAX_FIELDS, MAX_METADATA, FirstPass, Joiner, metadata_of
from npu_runner.tables.job_output import JobOutput
from npu_runner.tables.options import TableOptions
from npu_runner.tables.places import find_outputs
from npu_runner.tables.prompt_text import read_schema
from npu_runner.tables.table_writers import CsvWriter, JsonlWriter, ParquetTable, TableWriter, VectorsWriter

_RULE_OF_JOB = "answers.structured_outputs"


@dataclass(frozen=True, kw_only=True)
class MadeTable:
    """What was made, for the words at the end."""

    output: str
    num_lines: int
    num_answers: int
    num_failed: int
    num_cut_off: int
    """Lines whose answer ended at its limit of tokens."""
    num_repetition: int
    """Lines whose answer ended because it repeated itself."""
    num_unanswered: int | None
    """Rows of the input without an answer yet; None: no input was named."""
    num_strangers: int
    """Answers that no row of the input asked for; they are left out."""
    num_broken_lines: int
    first_broken_line: int
    num_repeated: int
    mixed: list[str]
    has_too_many_fields: bool
    has_more_metadata: bool

    def to_lines(self) -> list[str]:
        what = f"{self.num_lines} lines of {self.num_answers} rows, {self.num_failed} of them failed"
        what += f"; {self.num_cut_off} answers were cut off" if self.num_cut_off else ""
        what += f"; {self.num_repetition} are repetitions" if self.num_repetition else ""
        unanswered = f"; {self.num_unanswered} rows have no answer yet" if self.num_unanswered else ""
        said = [
            (self.num_strangers, f"{self.num_strangers} answers belong to no row of the input"),
            (self.num_broken_lines, f"{self.num_broken_lines} lines are no result rows, the first of them is line "
                                    f"{self.first_broken_line}"),
            (self.num_repeated, f"{self.num_repeated} rows stand there again, or failed and were answered since"),
        ]
        lines = [f"table     {self.output}: {what}{unanswered}"]
        lines += [f"left out  {text}" for count, text in said if count]
        if self.mixed:
            lines.append(f"text      values of several types: {', '.join(self.mixed)}")
        if self.has_too_many_fields:
            lines.append(f"text      answers have more than {MAX_FIELDS} fields without a schema: they get no columns")
        if self.has_more_metadata:
            lines.append(f"text      rows have more than {MAX_METADATA} names of metadata: those of most rows are "
                         "columns, the others are JSON in the column metadata")
        return lines


def make_table(name: str, options: TableOptions) -> MadeTable:
    """Raises ConfigError where there are no answers, or none that the format takes; then the table is as before."""
    if options.kind == "parquet":
        pyarrow_for("Parquet", "write CSV, which needs no package: -o table.csv")
    with contextlib.ExitStack() as entered:
        output = entered.enter_context(JobOutput(name, options.max_row_bytes))
        (place,) = find_outputs([("table", options.output)], [*output.read_names, *read_by(options)])
        file = None if options.input is None else entered.enter_context(InputFile(options.input))
        found = FirstPass(_schema(output, options))
        rows = None
        if file is not None:
            rows = file.scan_for(name, None if output.manifest is None else output.manifest.input)
            for request in requests_in(file, options.max_row_bytes):
                found.add_request(request)
        output.scan(found.add_answer)
        output.refuse_other_files()
        joined = Joined(file, rows, output, options.max_row_bytes)
        if rows is not None and output.num_rows and not len(joined.places):
            raise ConfigError(f"rows {options.input}: none of the answers in {name} belongs to a row of it; name the "
                              "input of that job")
        shown = joined.places[output.sizes_A[joined.answers_R[joined.places]] >= 0]
        made = _made(output, joined, shown, found, options)
        ends: Counter[bool] = Counter()
        make_writer, joiner = _writer(options, found, made.num_lines), Joiner(found)
        with place, place.writing() as stream:
            writer = make_writer(stream, found.columns())
            for request, answer in joined.pairs(shown):
                for cells in cells_of(answer):
                    writer.write(joiner.joined(cells, metadata_of(request)))
                    ends.update([cells["stop_reason"] == REPETITION_DETECTED]
                                if cells.get("finish_reason") == "length" else [])
            writer.finish()
    return replace(made, num_cut_off=ends[False], num_repetition=ends[True])


def _made(output: JobOutput, joined: Joined, shown: np.ndarray, found: FirstPass, options: TableOptions) -> MadeTable:
    """`shown`: the rows whose answers become lines. An answer of no known endpoint counts as a broken line."""
    answers, num_answered = joined.answers_R[shown], len(joined.places)
    return MadeTable(
        output=options.output, num_lines=int(output.sizes_A[answers].sum()), num_answers=len(shown),
        num_failed=int(output.failed_A[answers].sum()), num_cut_off=0, num_repetition=0,
        num_unanswered=joined.num_rows - num_answered if joined.has_input else None,
        num_strangers=output.num_rows - num_answered,
        num_broken_lines=len(output.broken) + num_answered - len(shown),
        first_broken_line=min((line.number for line in output.broken + output.unread), default=0),
        num_repeated=len(output.repeated), mixed=found.mixed(), has_too_many_fields=found.has_too_many_fields,
        has_more_metadata=MORE_METADATA in found.columns())


def _writer(options: TableOptions, found: FirstPass,
            num_lines: int) -> Callable[[BinaryIO, Mapping[str, str]], TableWriter]:
    if options.kind == "npy":
        found.require_one_size()
        return partial(VectorsWriter, num_rows=num_lines, size=found.vector_size)
    if options.kind == "csv":
        return partial(CsvWriter, is_excel_safe=options.excel_safe)
    return ParquetTable if options.kind == "parquet" else JsonlWriter


def _schema(output: JobOutput, options: TableOptions) -> Any:
    """The one that is named, or that of the job; None: rows may have their own."""
    if options.schema is not None:
        return read_schema(options.schema)
    rule = None if output.manifest is None else output.manifest.settings.get(_RULE_OF_JOB)
    return rule if isinstance(rule, dict) else None
