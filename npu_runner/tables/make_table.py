"""`npu-runner table`: the answers of a job, at work or finished, become a table, whole or not at all.

Answers are read twice: once for the types of the columns, once for their cells.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from npu_runner.batch.files.output_scan import places_of
from npu_runner.errors import ConfigError
from npu_runner.tables.answer_cells import Cells, cells_of
from npu_runner.tables.answer_files import AnswerFiles
from npu_runner.tables.extra import pyarrow_for
from npu_runner.tables.first_pass import MAX_FIELDS, FirstPass, with_fields
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
    """Lines whose answer ended at its limit of tokens or repeated itself."""
    num_unanswered: int | None
    """Rows of the input without an answer yet; None: no input was named."""
    num_strangers: int
    """Answers that no row of the input asked for; they are left out."""
    num_broken_lines: int
    num_repeated: int
    mixed: list[str]
    has_too_many_fields: bool

    def to_lines(self) -> list[str]:
        what = f"{self.num_lines} lines of {self.num_answers} rows, {self.num_failed} of them failed"
        what += f"; {self.num_cut_off} answers were cut off" if self.num_cut_off else ""
        unanswered = f"; {self.num_unanswered} rows have no answer yet" if self.num_unanswered else ""
        said = [
            (self.num_strangers, f"{self.num_strangers} answers belong to no row of the input"),
            (self.num_broken_lines, f"{self.num_broken_lines} lines are no result rows"),
            (self.num_repeated, f"{self.num_repeated} rows stand there again, or failed and were answered since"),
        ]
        lines = [f"table     {self.output}: {what}{unanswered}"]
        lines += [f"left out  {text}" for count, text in said if count]
        if self.mixed:
            lines.append(f"text      values of several types: {', '.join(self.mixed)}")
        if self.has_too_many_fields:
            lines.append(f"text      answers have more than {MAX_FIELDS} fields without a schema: they get no columns")
        return lines


# R rows of the table's order
def make_table(answers: str, options: TableOptions) -> MadeTable:
    """Raises ConfigError where there are no answers, or none that the format takes; then the table is as before."""
    if options.kind == "parquet":
        pyarrow_for("Parquet")
    with contextlib.ExitStack() as entered:
        files = entered.enter_context(AnswerFiles(answers, options.max_row_bytes))
        read = [*files.read_names, ("rows", options.rows), ("schema", options.schema)]
        place = find_output("table", options.output, read)
        rows = None if options.rows is None else RowMetadata(options.rows, options.max_row_bytes)
        entered.callback(rows.close) if rows is not None else None
        found = FirstPass(_schema(files, options))
        if rows is not None:
            rows.scan(found.look_at_row)
        files.scan(found.look_at_answer)
        places_R = _order(files, rows)
        made = _made(files, rows, places_R, found, options)
        num_cut_off = 0
        make_writer = _writer(options, found, made.num_lines)
        with place, place.writing() as file:
            writer = make_writer(file, found.columns())
            for cells in _lines(files, rows, places_R, found.field_names()):
                writer.write(cells)
                num_cut_off += cells.get("finish_reason") == "length"
            writer.finish()
    return replace(made, num_cut_off=num_cut_off)


def _order(files: AnswerFiles, rows: RowMetadata | None) -> np.ndarray:
    """Numbers of answers: in the order of the input, -1 for a row without one; without an input as they stand."""
    if rows is None:
        return np.arange(len(files.keys_A))
    places_R = places_of(rows.keys_R, files.keys_A)
    if len(files.keys_A) and not (places_R >= 0).any():
        raise ConfigError(f"rows {rows.name}: none of the answers in {files.name} belongs to a row of it; name the "
                          "input of that job")
    return places_R


def _made(files: AnswerFiles, rows: RowMetadata | None, places_R: np.ndarray, found: FirstPass,
          options: TableOptions) -> MadeTable:
    there = places_R[places_R >= 0]
    return MadeTable(
        output=options.output, num_lines=int(files.counts_A[there].sum()), num_answers=len(there),
        num_failed=int(files.failed_A[there].sum()), num_cut_off=0,
        num_unanswered=None if rows is None else int((places_R < 0).sum()),
        num_strangers=len(files.keys_A) - len(np.unique(there)), num_broken_lines=files.num_broken_lines,
        num_repeated=files.num_repeated, mixed=found.mixed(), has_too_many_fields=found.has_too_many_fields)


def _lines(files: AnswerFiles, rows: RowMetadata | None, places_R: np.ndarray, names: list[str]) -> Iterator[Cells]:
    nothing: Mapping[str, Any] = {}
    for number, place in enumerate(places_R.tolist()):
        if place >= 0:
            metadata = nothing if rows is None else rows.metadata(number)
            for cells in cells_of(files.answer(place)):
                yield with_fields(cells, names, metadata)


def _writer(options: TableOptions, found: FirstPass,
            num_lines: int) -> Callable[[BinaryIO, Mapping[str, str]], TableWriter]:
    if options.kind == "npy":
        found.require_one_size()
        return partial(VectorsWriter, num_rows=num_lines, size=found.vector_size)
    if options.kind == "csv":
        return partial(CsvWriter, is_excel_safe=options.excel_safe)
    return ParquetTable if options.kind == "parquet" else JsonlWriter


def _schema(files: AnswerFiles, options: TableOptions) -> Any:
    """The one that is named, or that of the job; None: rows may have their own."""
    if options.schema is not None:
        return read_schema(options.schema)
    rule = None if files.manifest is None else files.manifest.settings.get(_RULE_OF_JOB)
    return rule if isinstance(rule, dict) else None
