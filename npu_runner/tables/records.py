"""Records, of each of which one row is made, from sources of all kinds. Knows nothing of rows or of the meaning of
columns.

A cell of a CSV is always text. A line is read up to a limit, so that a file without line ends is an error and does not
fill the memory.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import math
import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO, Any, AnyStr, BinaryIO

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.limits import LIMITS, MIB
from npu_runner.tables.arrow_records import arrow_records, num_arrow_records
from npu_runner.tables.document_pages import Documents, OpenedDocument
from npu_runner.tables.sources import ARROW, CSV, MEDIA, PARQUET, Source, Sources

Columns = Mapping[str, Any]
Seen = Callable[[str, OpenedDocument, int], None]
"""It is called with the name of a document, its facts, and the number of its pages of which there are records."""
_SEPARATOR = re.compile(r"sep=([^\"\r\n])\r?\n?", re.IGNORECASE)
_MAX_BYTES = LIMITS.max_row_bytes


@dataclass(frozen=True)
class Record:
    """`id`: unique, relative to the root of the sources. `where`: for messages."""

    id: str
    where: str
    columns: Columns
    file: Source | None = None
    """The document, image or video that the record is; None: it comes from a table."""
    document: OpenedDocument | None = None
    """The document of which the record is a page."""
    page: int = 1
    media_columns: Mapping[str, str | None] = field(default_factory=dict)
    """Columns that hold files in the form of Hugging Face's datasets, and the schema's names for them (Image, Video,
    Audio, ...); None: it has none."""
    is_text: bool = False
    """Its cells are text, as those of a CSV: an empty text is an empty cell."""

    @property
    def cells(self) -> dict[str, Any]:
        """By column; None where one is empty."""
        return {name: None if self.is_text and value == "" else without_nan(value)
                for name, value in self.columns.items()}

    def value(self, column: str) -> Any:
        """None where it is empty, NaN included. Raises ConfigError for a column that is not there."""
        if column not in self.columns:
            known = ", ".join(map(repr, list(self.columns)[:20]))
            raise ConfigError(f"{self.where}: there is no column {column!r}; it has {known}")
        return without_nan(self.columns[column])


def without_nan(value: Any) -> Any:
    """Tables of numbers have no other word for an empty cell."""
    return None if isinstance(value, float) and math.isnan(value) else value


class Reader:
    """All records of the sources, again and again. `needed`: columns that are read; None: all.

    `delimiter`, `encoding` of CSV files; None: as the file says, else a comma or a tab, and UTF-8.
    """

    def __init__(self, sources: Sources, documents: Documents, *, delimiter: str | None = None,
                 encoding: str | None = None, needed: frozenset[str] | None = None):
        self.sources = sources
        self._documents = documents
        self._delimiter, self._encoding, self._needed = delimiter, encoding, needed

    def records(self, seen: Seen | None = None) -> Generator[Record, None, None]:
        """In an order that follows from names and contents alone. `seen` is called with each document."""
        for source, name, document in self._opened():
            if document is not None and seen is not None:
                seen(name, document, len(self._documents.pages_of(document)))
            yield from self._records_of(source, name, document)

    def _opened(self) -> Iterator[tuple[Source, str, OpenedDocument | None]]:
        return self._documents.opened((source, self.sources.shown(source.path)) for source in self.sources.files())

    def sample(self, num_wanted: int, seen: Seen | None = None) -> Generator[Record, None, None]:
        """A number of records, evenly spread; all where there are fewer."""
        total = sum(self._count(source, document) for source, _, document in self._opened())
        if num_wanted >= total:
            yield from self.records(seen)
            return
        chosen = 0
        for place, record in enumerate(self.records(seen)):
            if chosen < num_wanted and place == chosen * total // num_wanted:
                chosen += 1
                yield record

    def _records_of(self, source: Source, name: str, document: OpenedDocument | None) -> Iterator[Record]:
        folder, base = os.path.split(name)
        columns: dict[str, Any] = {"path": name, "name": base, "folder": folder}
        if document is not None:
            columns["pages"] = document.num_pages
            for number in self._documents.pages_of(document):
                yield Record(f"{name}#page={number}", f"{name!r}, page {number}", {**columns, "page": number}, source,
                             document=document, page=number)
            return
        if source.kind in MEDIA:
            yield Record(name, repr(name), columns, source)
            return
        for number, (where, cells, media) in enumerate(self._lines(source), 1):
            yield Record(f"{name}#{number}", f"{name!r}, {where}", cells, media_columns=media,
                         is_text=source.kind == CSV)

    def _count(self, source: Source, document: OpenedDocument | None) -> int:
        if document is not None:
            return len(self._documents.pages_of(document))
        if source.kind in MEDIA:
            return 1
        if source.kind in (PARQUET, ARROW):
            return num_arrow_records(source.path, is_parquet=source.kind == PARQUET)
        return sum(1 for _ in self._lines(source))

    def _lines(self, source: Source) -> Iterator[tuple[str, Columns, Mapping[str, str | None]]]:
        """(where, columns, Record's media_columns)."""
        if source.kind in (PARQUET, ARROW):
            return arrow_records(source.path, self._needed, is_parquet=source.kind == PARQUET)
        lines: Iterator[tuple[str, Columns]] = (
            csv_records(source.path, self._delimiter, self._encoding) if source.kind == CSV
            else json_records(source.path))
        return ((where, columns, {}) for where, columns in lines)


# -- CSV and JSONL ----------------------------------------------------------------------------------------------------


def json_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (where, columns) for each line. Raises ConfigError for a line that is no JSON object."""
    with clear_file_errors(f"source {path!r}"), open(path, "rb") as file:
        for number, line in _lines(path, file):
            if line.strip():
                try:
                    yield f"line {number}", read_json(line)
                except RequestError as error:
                    raise ConfigError(f"{path!r}, line {number}: {error.message}") from error


def csv_records(path: str, delimiter: str | None, encoding: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields (where, columns) for each record; the first line has the names. Raises ConfigError for a file that is no
    such table.

    `delimiter` None: that of a first line like `sep=;`, which spreadsheets read, too; else a tab in .tsv files, and a
    comma. `encoding` None: UTF-8.
    """
    before = csv.field_size_limit(_MAX_BYTES)
    try:
        with clear_file_errors(f"source {path!r}"), open(path, "rb") as file:
            lines = _utf8_lines(path, file) if encoding is None else _decoded_lines(path, file, encoding)
            first = next(lines, "")
            separator = _SEPARATOR.fullmatch(first)
            if separator is None:
                lines = itertools.chain([first], lines)
            default = separator[1] if separator is not None else "\t" if path.lower().endswith(".tsv") else ","
            cells = csv.reader(lines, delimiter=delimiter or default, strict=True)
            guessed = default if delimiter is None and separator is None else None
            yield from _csv_records(path, cells, num_before=separator is not None, guessed=guessed)
    finally:
        csv.field_size_limit(before)


def _csv_records(path: str, cells: Any, *, num_before: int,
                 guessed: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """`num_before`: lines of the file before the first one. `guessed`: the delimiter, where no option or line names it.
    """
    header: list[str] | None = None
    start = 1 + num_before
    while True:
        try:
            row = next(cells, None)
        except csv.Error as error:
            raise ConfigError(f"{path!r}, line {start}: no CSV ({error}); quotes in a quoted cell are doubled, and no "
                              f"cell is larger than {_MAX_BYTES // MIB} MiB") from error
        where, start = f"line {start}", cells.line_num + 1 + num_before
        if row is None:
            return
        if not row:  # an empty line
            continue
        if header is None:
            header = _header(path, where, row, guessed)
        elif len(row) != len(header):
            raise ConfigError(f"{path!r}, {where}: has {len(row)} cells, the first line has {len(header)}; quote cells "
                              "with the delimiter in them, or name another --delimiter")
        else:
            yield where, dict(zip(header, row, strict=True))


def _header(path: str, where: str, names: list[str], guessed: str | None) -> list[str]:
    other = next((mark for mark in ";\t|" if len(names) == 1 and mark in names[0]), None)
    if guessed is not None and other is not None:
        word = "$'\\t'" if other == "\t" else repr(other)
        raise ConfigError(f"{path!r}, {where}: has {names[0].count(other)} {other!r} and no {guessed!r}; name the "
                          f"delimiter with --delimiter {word}, or {guessed!r} if there is one column")
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"{path!r}, {where}: two columns are called {twice[:80]!r}; the first line has the names")
    return names


def _utf8_lines(path: str, file: BinaryIO) -> Iterator[str]:
    for number, line in _lines(path, file):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            likely = "utf-16" if line.startswith((b"\xff\xfe", b"\xfe\xff")) else "cp1252"
            more = ", and its delimiter with --delimiter ';'" if line.count(b";") > line.count(b",") else ""
            raise ConfigError(f"{path!r}, line {number}: byte {error.start} is not UTF-8; name the file's encoding, as "
                              f"with --encoding {likely}{more}; or save it as CSV UTF-8") from error


def _decoded_lines(path: str, file: BinaryIO, encoding: str) -> Iterator[str]:
    number = 0
    try:
        for number, line in _lines(path, io.TextIOWrapper(file, encoding, newline="\n")):  # noqa: B007 the error names it
            yield line
    except UnicodeError as error:
        raise ConfigError(f"{path!r}, behind line {number}: is not {encoding} ({error}); name another "
                          "--encoding") from error


def _lines(path: str, file: IO[AnyStr]) -> Iterator[tuple[int, AnyStr]]:
    """Lines with their numbers, without a byte order mark."""
    for number in itertools.count(1):
        line = file.readline(_MAX_BYTES + 1)
        if not line:
            return
        if len(line) > _MAX_BYTES:
            raise ConfigError(f"{path!r}, line {number}: is longer than {_MAX_BYTES // MIB} MiB, the most that a row "
                              "may have; is it the right file?")
        mark: Any = codecs.BOM_UTF8 if isinstance(line, bytes) else "\ufeff"
        yield number, line.removeprefix(mark) if number == 1 else line
