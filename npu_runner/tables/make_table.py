"""`npu-runner table`: the answers of a job, at work or finished, become a table, whole or not at all.

Answers are read twice: once for the types of the columns, once for their cells.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.joined import Joined, requests_in
from npu_runner.batch.files.place import read_by
from npu_runner.errors import ConfigError
from npu_runner.request.outputs import REPETITION_DETECTED
from npu_runner.tables.arrow_records import pyarrow_for
from npu_runner.tables.first_pass import (
    MAX_FIELDS,
    MAX_METADATA,
    MORE_METADATA,
    FirstPass,
    cells_of,
    joiner,
)
from npu_runner.tables.markdown_files import DocumentNames, MarkdownFolder
from npu_runner.tables.options import TableOptions
from npu_runner.tables.page_answers import PageRow, page_answers
from npu_runner.tables.page_markdown import PageCounts, find_parser, write_pages
from npu_runner.tables.places import JobOutput, find_outputs
from npu_runner.tables.prompt_text import read_schema
from npu_runner.tables.table_writers import TableWriter, VectorsWriter, text_writer

_RULE_OF_JOB = "answers.structured_outputs"


@dataclass(frozen=True, kw_only=True)
class MadeTable:
    """The result, for the words at the end."""

    output: str | None
    """None: no table was asked for."""
    pages: list[str]
    """The words about Markdown and blocks."""
    counts: PageCounts | None
    """None: neither was asked for."""
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
    """Answers that belong to no row of the input; they are left out."""
    num_broken_lines: int
    first_broken_line: int
    num_repeated: int
    mixed: list[str]
    has_too_many_fields: bool
    has_more_metadata: bool

    def to_lines(self) -> list[str]:
        text = f"{self.num_lines} lines of {self.num_answers} rows, {self.num_failed} of them failed"
        text += f"; {self.num_cut_off} answers were cut off" if self.num_cut_off else ""
        text += f"; {self.num_repetition} are repetitions" if self.num_repetition else ""
        text += f"; {self.num_unanswered} rows have no answer yet" if self.num_unanswered else ""
        left_out = [
            (self.num_strangers, f"{self.num_strangers} answers belong to no row of the input"),
            (self.num_broken_lines, f"{self.num_broken_lines} lines are no result rows, the first of them is line "
                                    f"{self.first_broken_line}"),
            (self.num_repeated, f"{self.num_repeated} rows stand there again, or failed and were answered since"),
        ]
        lines = [*([] if self.output is None else [f"table     {self.output}: {text}"]), *self.pages]
        lines += [f"left out  {reason}" for count, reason in left_out if count]
        if self.mixed:
            lines.append(f"text      values of several types: {', '.join(self.mixed)}")
        if self.has_too_many_fields:
            lines.append(f"text      answers have more than {MAX_FIELDS} fields without a schema: they get no columns")
        if self.has_more_metadata:
            lines.append(f"text      rows have more than {MAX_METADATA} names of metadata: those of most rows are "
                         "columns, the others are JSON in the column metadata")
        return lines


def make_table(name: str, options: TableOptions) -> MadeTable:
    """Raises ConfigError where there are no answers, or none that the format accepts; then the table is as before."""
    if "parquet" in (options.kind, options.kind_of_blocks):
        pyarrow_for("Parquet", "write CSV, which needs no package: -o table.csv")
    with contextlib.ExitStack() as entered:
        output = entered.enter_context(JobOutput(name, options.max_row_bytes))
        read = [*output.read_names, *read_by(options)]
        places = {place.option: entered.enter_context(place) for place in find_outputs(
            [("table", options.output), ("blocks", options.blocks)], read)}
        file = None if options.input is None else entered.enter_context(InputFile(options.input))
        found = FirstPass(_schema(output, options))
        parser = find_parser(options.reader, str(options.input)) if options.has_pages else ""
        rows = None
        if file is not None:
            rows = file.scan_for(name, None if output.manifest is None else output.manifest.input)
            _add_requests(file, options, found)
        output.scan(found.add_answer)
        output.refuse_other_files()
        joined = Joined(file, rows, output, options.max_row_bytes)
        if rows is not None and output.num_rows and not len(joined.places):
            raise ConfigError(f"rows {options.input}: none of the answers in {name} belongs to a row of it; name the "
                              "input of that job")
        shown = joined.places[output.sizes_A[joined.answers_R[joined.places]] >= 0]
        num_lines = int(output.sizes_A[joined.answers_R[shown]].sum())
        ends, pages, counts = Counter[bool](), list[str](), None
        if (place := places.get("table")) is not None:
            with place.writing() as stream:
                ends = _write_table(_writer(options, found, num_lines)(stream, found.columns()), found, joined, shown)
        if options.has_pages and file is not None:
            answers = page_answers(requests_in(file, options.max_row_bytes), joined, output)
            folder = None if options.markdown is None else MarkdownFolder(options.markdown, [path for _, path in read])
            pages, counts = write_pages(answers, options, parser, folder, places.get("blocks"))
        num_answered = len(joined.places)
    # An answer of no known endpoint counts as a broken line.
    return MadeTable(
        output=options.output, pages=pages, counts=counts, num_lines=num_lines, num_answers=len(shown),
        num_failed=int(output.failed_A[joined.answers_R[shown]].sum()),
        num_cut_off=ends[False], num_repetition=ends[True],
        num_unanswered=joined.num_rows - num_answered if joined.has_input else None,
        num_strangers=output.num_rows - num_answered,
        num_broken_lines=len(output.broken) + num_answered - len(shown),
        first_broken_line=min((line.number for line in output.broken + output.unread), default=0),
        num_repeated=len(output.repeated), mixed=found.mixed(), has_too_many_fields=found.has_too_many_fields,
        has_more_metadata=MORE_METADATA in found.columns())


def _add_requests(file: InputFile, options: TableOptions, found: FirstPass) -> None:
    names = DocumentNames()
    for request in requests_in(file, options.max_row_bytes):
        found.add_request(request)
        if options.markdown is not None:
            names.add(PageRow.from_request(request).document)


def _write_table(writer: TableWriter, found: FirstPass, joined: Joined, shown: np.ndarray) -> Counter[bool]:
    """Returns the numbers of answers that ended at their limit: False, cut off; True, because they repeated."""
    ends, join = Counter[bool](), joiner(found)
    for request, answer in joined.pairs(shown):
        for cells in cells_of(answer):
            writer.write(join(cells, request))
            ends.update([cells["stop_reason"] == REPETITION_DETECTED]
                        if cells.get("finish_reason") == "length" else [])
    writer.finish()
    return ends


def _writer(options: TableOptions, found: FirstPass,
            num_lines: int) -> Callable[[BinaryIO, Mapping[str, str]], TableWriter]:
    if options.kind == "npy":
        found.require_one_size()
        return partial(VectorsWriter, num_rows=num_lines, size=found.vector_size)
    return text_writer(str(options.kind), options.excel_safe)


def _schema(output: JobOutput, options: TableOptions) -> Any:
    """The named schema, or the job's; None: rows may have their own."""
    if options.schema is not None:
        return read_schema(options.schema)
    rule = None if output.manifest is None else output.manifest.settings.get(_RULE_OF_JOB)
    return rule if isinstance(rule, dict) else None
