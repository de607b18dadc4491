"""Records of CSV and JSONL files, one at a time, with the line of each. A cell of a CSV is always text.

A line is read up to a limit, so that a file without line ends is an error and not the end of the memory. Knows nothing
of what the columns mean.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from typing import Any, BinaryIO

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import ConfigError, RequestError
from npu_runner.request.limits import LIMITS, MIB

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
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


def csv_records(path: str, delimiter: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(where, columns) of each record; the first line has the names. Raises ConfigError for what is no such table."""
    before = csv.field_size_limit(_MAX_BYTES)
    try:
        with clear_file_errors(f"source {path!r}"), open(path, "rb") as file:
            yield from _csv_records(path, csv.reader(_text_lines(path, file), delimiter=delimiter, strict=True))
    finally:
        csv.field_size_limit(before)


def _csv_records(path: str, cells: Any) -> Iterator[tuple[str, dict[str, str]]]:
    header: list[str] | None = None
    begins = 1
    while True:
        try:
            row = next(cells, None)
        except csv.Error as error:
            raise ConfigError(f"{path!r}, line {begins}: no CSV ({error}); quotes in a quoted cell are doubled, and no "
                              f"cell is larger than {_MAX_BYTES // MIB} MiB") from error
        where, begins = f"line {begins}", cells.line_num + 1
        if row is None:
            return
        if not row:  # an empty line
            continue
        if header is None:
            header = _header(path, row)
        elif len(row) != len(header):
            raise ConfigError(f"{path!r}, {where}: has {len(row)} cells, the first line has {len(header)}; quote cells "
                              "with the delimiter in them, or name another --delimiter")
        else:
            yield where, dict(zip(header, row, strict=True))


def _header(path: str, names: list[str]) -> list[str]:
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ConfigError(f"{path!r}, line 1: two columns are called {twice[:80]!r}; the first line has the names")
    return names


def _text_lines(path: str, file: BinaryIO) -> Iterator[str]:
    for number, line in _lines(path, file):
        try:
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path!r}, line {number}: byte {error.start} is not UTF-8; convert the file, as with "
                              "iconv") from error


def _lines(path: str, file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := file.readline(_MAX_BYTES + 1):
        if number == 0:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        number += 1
        if len(line) > _MAX_BYTES:
            raise ConfigError(f"{path!r}, line {number}: is longer than {_MAX_BYTES // MIB} MiB, the most that a row "
                              "may have; is it the right file?")
        yield number, line
