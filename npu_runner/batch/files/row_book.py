"""The rows that are to be served, by their index: where each lies, cut into runs for whoever serves them.

In columns, so that a million rows cost no million objects. Knows nothing of what is in a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.input_file import InputScan, RowFile
from npu_runner.batch.rows.input_row import CHECKSUM_BYTES, InputRow, row_key
from npu_runner.replicas.base import INDEX, LINE, NUM_BYTES, START, RowRun


# R rows to serve
class RowBook:
    """Rows of `scan` at `wanted` places, numbered from 0 in the order of the input."""

    def __init__(self, scan: InputScan, wanted: np.ndarray, source: RowFile):
        places_R = np.flatnonzero(wanted)
        self._keys_R = scan.keys[places_R]
        self._checksums_R = scan.checksums[places_R]
        self._table_R4 = np.empty((len(places_R), 4), dtype=np.uint64)
        self._table_R4[:, INDEX] = np.arange(len(places_R))
        self._table_R4[:, LINE] = scan.lines[places_R]
        self._table_R4[:, START] = scan.starts[places_R]
        self._table_R4[:, NUM_BYTES] = scan.sizes[places_R]
        self._source = source

    @property
    def num_rows(self) -> int:
        return len(self._table_R4)

    def run(self, indices: Sequence[int]) -> RowRun:
        """These rows, for somebody who reads them in the file."""
        chosen = _chosen(indices)
        return RowRun(table_R4=self._table_R4[chosen], checksums=self._checksums_R[chosen].tobytes())

    def run_with_data(self, indices: Sequence[int]) -> RowRun:
        """These rows with their bytes, for somebody who does not see the file."""
        run = self.run(indices)
        with late_file_errors(f"input {self._source.file_name}"):
            data = b"".join(
                os.pread(self._source.descriptor, num_bytes, start)
                for start, num_bytes in run.table_R4[:, [START, NUM_BYTES]].tolist()
            )
        return RowRun(table_R4=run.table_R4, checksums=run.checksums, data=data)

    def row(self, index: int) -> InputRow:
        line, start, num_bytes = (int(value) for value in self._table_R4[index, [LINE, START, NUM_BYTES]])
        # numpy takes zeros at the end for padding.
        checksum = bytes(self._checksums_R[index]).ljust(CHECKSUM_BYTES, b"\0")
        return InputRow(index, line, start, num_bytes, checksum)

    def name(self, index: int) -> str | None:
        """The row's custom_id; None: it is known by its line. Raises JobError when the row was changed."""
        return self._source.name(self.row(index))

    def find(self, custom_ids: Sequence[str]) -> dict[str, int]:
        """The index of each of these that is among the rows."""
        keys = np.array([row_key(name, 0) for name in custom_ids], dtype=self._keys_R.dtype)
        found: dict[str, int] = {}
        for name, key in zip(custom_ids, keys, strict=True):
            places = np.flatnonzero(self._keys_R == key)
            if len(places):
                found[name] = int(places[0])
        return found


def _chosen(indices: Sequence[int]) -> slice | np.ndarray:
    """Neighbours as a slice, which is looked at and not copied."""
    if isinstance(indices, range) and indices.step == 1:
        return slice(indices.start, indices.stop)
    return np.asarray(indices, dtype=np.int64)
