"""Records of CSV and JSONL files, one at a time, with the line of each. A cell of a CSV is always text.

A line is read up to a limit, so that a file without line ends is an error and not the end of the memory. Knows nothing
of what the columns mean.
"""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.limits import LIMITS, MIB

_SEPARATOR = re.compile(r"sep=([^\"\r\n])\r?\n?", re.IGNORECASE)
_MAX_BYTES = LIMITS.max_row_bytes


def json_records(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where, columns) of each line. Raises ConfigError for a line that is no JSON object."""
    with clear_file_errors(f"source {path!r}"), open(path, "rb") as file:
        for number, line in _lines(path, file):
            if line.strip():
                try:
                    yield f"line {number}", read_json(line)
                except RequestError as error:
                    raise ConfigError(f"{path!r}, line {number}: {error.message}") from error


def csv_records(path: str, delimiter: str | None, encoding: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, columns) of each record; the first line has the names. Raises ConfigError for what is no such table.

    `delimiter` None: as a first line like `sep=;` says, which spreadsheets read, too; else a tab in .tsv files, and a
    comma. `encoding` None: UTF-8.
    """
    before = csv.field_size_limit(_MAX_BYTES)
    try:
        with clear_file_errors(f"source {path!r}"), open(path, "rb") as file:
            lines = _text_lines(path, file) if encoding is None else _decoded_lines(path, file, encoding)
            first = next(lines, "")
            told = _SEPARATOR.fullmatch(first)
            if told is None:
                lines = itertools.chain([first], lines)
            default = told[1] if told is not None else "\t" if path.lower().endswith(".tsv") else ","
            cells = csv.reader(lines, delimiter=delimiter or default, strict=True)
            guessed = default if delimiter is None and told is None else None
            yield from _csv_records(path, cells, num_before=told is not None, guessed=guessed)
    finally:
        csv.field_size_limit(before)


def _csv_records(path: str, cells: Any, *, num_before: int,
                 guessed: str | None) -> Iterator[tuple[str, dict[str, str]]]:
    """`num_before`: lines of the file before the first one. `guessed`: the delimiter that nobody has named."""
    header: list[str] | None = None
    begins = 1 + num_before
    while True:
        try:
            row = next(cells, None)
        except csv.Error as error:
            raise ConfigError(f"{path!r}, line {begins}: no CSV ({error}); quotes in a quoted cell are doubled, and no "
                              f"cell is larger than {_MAX_BYTES // MIB} MiB") from error
        where, begins = f"line {begins}", cells.line_num + 1 + num_before
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


def _text_lines(path: str, file: BinaryIO) -> Iterator[str]:
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
    text = io.TextIOWrapper(file, encoding, newline="\n")
    try:
        while line := text.readline(_MAX_BYTES + 1):
            number += 1
            _refuse_long(path, number, len(line))
            yield line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeError as error:
        raise ConfigError(f"{path!r}, behind line {number}: is not {encoding} ({error}); name another "
                          "--encoding") from error


def _lines(path: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_MAX_BYTES + 1):
        if number == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        number += 1
        _refuse_long(path, number, len(line))
        yield number, line


def _refuse_long(path: str, number: int, size: int) -> None:
    if size > _MAX_BYTES:
        raise ConfigError(f"{path!r}, line {number}: is longer than {_MAX_BYTES // MIB} MiB, the most that a row may "
                          "have; is it the right file?")
