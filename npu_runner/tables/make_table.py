"""`npu-runner table`: the answers of a job, at work or finished, become a table, whole or not at all.

Answers are read twice: once for the types of the columns, once for their cells.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from npu_runner.batch.files.taken_names import read_by
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import REPETITION_DETECTED
from npu_runner.tables.answer_cells import MORE_METADATA, Cells, cells_of
from npu_runner.tables.extra import pyarrow_for
from npu_runner.tables.first_pass import MAX_FIELDS, MAX_METADATA, FirstPass, Joiner
from npu_runner.tables.job_output import JobOutput
from npu_runner.tables.options import TableOptions
from npu_runner.tables.places import find_output
from npu_runner.tables.prompt_text import read_schema
from npu_runner.tables.row_metadata import RowMetadata
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


# R rows of the table's order
def make_table(answers: str, options: TableOptions) -> MadeTable:
    """Raises ConfigError where there are no answers, or none that the format takes; then the table is as before."""
    if options.kind == "parquet":
        pyarrow_for("Parquet", "write CSV, which needs no package: -o table.csv")
    with contextlib.ExitStack() as entered:
        files = entered.enter_context(JobOutput(answers, options.max_row_bytes))
        place = find_output("table", options.output, [*files.read_names, *read_by(options)])
        rows = None if options.input is None else RowMetadata(options.input, options.max_row_bytes)
        entered.callback(rows.close) if rows is not None else None
        found = FirstPass(_schema(files, options))
        if rows is not None:
            rows.read(answers, files.manifest, found.look_at_row)
        files.scan(found.look_at_answer)
        files.refuse_other_files()
        places_R = _order(files, rows)
        made = _made(files, rows, places_R, found, options)
        ends: Counter[bool] = Counter()
        make_writer = _writer(options, found, made.num_lines)
        with place, place.writing() as file:
            writer = make_writer(file, found.columns())
            for cells in _lines(files, rows, places_R, Joiner(found)):
                writer.write(cells)
                ends.update([cells["stop_reason"] == REPETITION_DETECTED]
                            if cells.get("finish_reason") == "length" else [])
            writer.finish()
    return replace(made, num_cut_off=ends[False], num_repetition=ends[True])


def _order(files: JobOutput, rows: RowMetadata | None) -> np.ndarray:
    """Places of answers: in the order of the input, -1 for a row without one; without an input as they stand."""
    if rows is None:
        return np.arange(files.num_rows)
    places_R = files.find(rows.scan.keys)
    if files.num_rows and not (places_R >= 0).any():
        raise ConfigError(f"rows {rows.name}: none of the answers in {files.name} belongs to a row of it; name the "
                          "input of that job")
    return places_R


def _made(files: JobOutput, rows: RowMetadata | None, places_R: np.ndarray, found: FirstPass,
          options: TableOptions) -> MadeTable:
    there = places_R[places_R >= 0]
    shown = there[_are_shown(files, there)]
    broken = [line.number for line in files.broken + files.unread]
    return MadeTable(
        output=options.output, num_lines=int(files.sizes_A[shown].sum()), num_answers=len(shown),
        num_failed=int(files.failed_A[shown].sum()), num_cut_off=0, num_repetition=0,
        num_unanswered=None if rows is None else int((places_R < 0).sum()),
        num_strangers=files.num_rows - len(there), num_broken_lines=len(files.broken) + len(there) - len(shown),
        first_broken_line=min(broken, default=0), num_repeated=len(files.repeated), mixed=found.mixed(),
        has_too_many_fields=found.has_too_many_fields, has_more_metadata=MORE_METADATA in found.columns())


def _are_shown(files: JobOutput, places_R: np.ndarray) -> np.ndarray:
    """Whether each row has an answer, and one of an endpoint."""
    are_shown: np.ndarray = places_R >= 0
    are_shown[are_shown] = files.sizes_A[places_R[are_shown]] >= 0
    return are_shown


def _lines(files: JobOutput, rows: RowMetadata | None, places_R: np.ndarray, joiner: Joiner) -> Iterator[Cells]:
    nothing: Iterable[Mapping[str, Any]] = itertools.repeat({})
    are_shown_R = _are_shown(files, places_R)
    of_rows = nothing if rows is None else rows.metadata(are_shown_R)
    for place, metadata in zip(places_R[are_shown_R].tolist(), of_rows, strict=False):
        for cells in cells_of(files.row(place)):
            yield joiner.joined(cells, metadata)


def _writer(options: TableOptions, found: FirstPass,
            num_lines: int) -> Callable[[BinaryIO, Mapping[str, str]], TableWriter]:
    if options.kind == "npy":
        found.require_one_size()
        return partial(VectorsWriter, num_rows=num_lines, size=found.vector_size)
    if options.kind == "csv":
        return partial(CsvWriter, is_excel_safe=options.excel_safe)
    return ParquetTable if options.kind == "parquet" else JsonlWriter


def _schema(files: JobOutput, options: TableOptions) -> Any:
    """The one that is named, or that of the job; None: rows may have their own."""
    if options.schema is not None:
        return read_schema(options.schema)
    rule = None if files.manifest is None else files.manifest.settings.get(_RULE_OF_JOB)
    return rule if isinstance(rule, dict) else None
