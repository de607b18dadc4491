"""The input of a job, for a table of its answers: names, metadata and schemas of its rows. Knows nothing of answers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import keys_array
from npu_runner.batch.rows.input_row import row_key
from npu_runner.batch.rows.shape import name_of
from npu_runner.request.limits import LIMITS
from npu_runner.tables.lines import LinesFile

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class RowMetadata:
    """Rows in the order of the file. 24 bytes of each are held."""

    # R rows
    keys_R: np.ndarray

    def __init__(self, name: str, max_row_bytes: int):
        self.name = name
        self._file = LinesFile(f"rows {name}", name, max_row_bytes)

    def close(self) -> None:
        self._file.close()

    def scan(self, look: Callable[[Mapping[str, Any], Mapping[str, Any]], None]) -> None:
        """`look` is called with metadata and body of each row."""
        keys, starts = bytearray(), array("Q")
        for number, (start, line) in enumerate(self._file.lines(may_be_torn=False), 1):
            if not line.strip():
                continue
            row = _read(line)
            keys += row_key(_name(row, line), number)
            starts.append(start)
            body = _object(row.get("body"))
            look(_object(body.get("metadata")), body)
        self.keys_R = keys_array(keys)
        self._starts_R = np.array(starts, dtype=np.uint64)

    def metadata(self, place: int) -> Mapping[str, Any]:
        """Of the row with this number."""
        return _object(_object(_read(self._file.line_at(int(self._starts_R[place]))).get("body")).get("metadata"))


def _read(line: bytes) -> Mapping[str, Any]:
    try:
        return _object(json.loads(line.removeprefix(_BYTE_ORDER_MARK)))
    except (ValueError, RecursionError):
        return {}


def _name(row: Mapping[str, Any], line: bytes) -> str | None:
    """As the job names it."""
    custom_id = row.get("custom_id")
    if isinstance(custom_id, str) and 0 < len(custom_id) <= LIMITS.max_custom_id_chars and custom_id.isascii():
        return custom_id
    return name_of(line.removeprefix(_BYTE_ORDER_MARK))


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
