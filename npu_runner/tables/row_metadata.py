"""The input of a job, for a table of its answers: names, metadata and schemas of its rows. Knows nothing of answers."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from npu_runner.batch.files.input_file import InputFile, InputScan
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import RequestError


class RowMetadata:
    """Rows in the order of the file, which may be compressed. 100 bytes of each are held, never the rows."""

    # R rows
    scan: InputScan

    def __init__(self, name: str, max_row_bytes: int):
        self.name = name
        self._max_row_bytes = max_row_bytes
        self._file = InputFile(name, Path(tempfile.gettempdir()))

    def close(self) -> None:
        self._file.close()

    def read(self, output: str, manifest: Manifest | None,
             look: Callable[[Mapping[str, Any], Mapping[str, Any]], None]) -> None:
        """`look` is called with metadata and body of each row. Raises ConfigError for an input that `output` was not
        begun with, as its manifest has it."""
        self.scan = self._file.scan_for(output, None if manifest is None else manifest.input)
        for body in self._bodies():
            look(_object(body.get("metadata")), body)

    def metadata(self, wanted_R: np.ndarray) -> Iterator[Mapping[str, Any]]:
        """The metadata of the rows that are True, in order."""
        for body in self._bodies(wanted_R):
            yield _object(body.get("metadata"))

    def _bodies(self, wanted_R: np.ndarray | None = None) -> Iterator[Mapping[str, Any]]:
        """Empty where the job refuses to read the row."""
        for row in self._file.rows(wanted_R):
            is_too_long = row.num_bytes > self._max_row_bytes
            yield {} if is_too_long else _body(self._file.source.read(row))


def _body(line: bytes) -> Mapping[str, Any]:
    try:
        return _object(read_json(line).get("body"))
    except (RequestError, RecursionError):
        return {}


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
