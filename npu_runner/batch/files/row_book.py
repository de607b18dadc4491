"""The rows that are to be served, by their index: where each lies, cut into runs for the replicas.

In columns, so that a million rows cost no million objects. Knows nothing of what is in a row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.input_file import InputScan, RowFile
from npu_runner.batch.rows.shape import row_key
from npu_runner.serving.replica import NUM_BYTES, START, RawRow, RowRun


class RowBook:
    """Rows of `scan` at `wanted` places, numbered from 0 in the order of the input."""

    def __init__(self, scan: InputScan, wanted: np.ndarray, source: RowFile):
        self._scan = scan
        self._places = np.flatnonzero(wanted)
        self._source = source

    @property
    def num_rows(self) -> int:
        return len(self._places)

    def run(self, indices: Sequence[int]) -> RowRun:
        """These rows, for a replica that reads them in the file."""
        indices_R = np.asarray(indices, dtype=np.int64)
        return self._scan.run(indices_R, self._places[indices_R])

    def run_with_data(self, indices: Sequence[int]) -> RowRun:
        """These rows with their bytes, for a replica that does not see the file."""
        run = self.run(indices)
        with late_file_errors(f"input {self._source.file_name}"):
            data = b"".join(
                os.pread(self._source.descriptor, num_bytes, start)
                for start, num_bytes in run.table_R4[:, [START, NUM_BYTES]].tolist())
        return RowRun(table_R4=run.table_R4, checksums=run.checksums, data=data)

    def row(self, index: int) -> RawRow:
        (row,) = self.run([index]).rows()
        return row

    def name(self, index: int) -> str | None:
        """The row's custom_id; None: it is known by its line. Raises JobError when the row was changed."""
        return self._source.name(self.row(index))

    def find(self, custom_ids: Sequence[str]) -> dict[str, int]:
        """The index of each of these that is among the rows."""
        found: dict[str, int] = {}
        for name in custom_ids:
            (places,) = np.nonzero(self._scan.keys == np.bytes_(row_key(name, 0)))
            index = int(np.searchsorted(self._places, places[0])) if len(places) else self.num_rows
            if index < self.num_rows and self._places[index] == places[0]:
                found[name] = index
        return found
