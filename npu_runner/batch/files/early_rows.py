"""Finished rows that wait for those before them: a few in memory, more of them in nameless files.

Knows nothing of what is in a row.
"""

from __future__ import annotations

import os
import tempfile
from typing import IO

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.serving.replica import FinishedRow

_MAX_BYTES_IN_MEMORY = 64 << 20
# Files are written to their end and never in the middle: one goes when none of its rows waits any more.
_MAX_BYTES_OF_FILE = 256 << 20


class _Spool:
    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="npu_runner-")  # noqa: SIM115 - closed when it is empty
        self.end = 0
        self.num_waiting = 0


class EarlyRows:
    """Rows by index. What is larger than `max_bytes_in_memory` together waits on disk."""

    def __init__(self, max_bytes_in_memory: int = _MAX_BYTES_IN_MEMORY, max_bytes_of_file: int = _MAX_BYTES_OF_FILE):
        self._in_memory: dict[int, FinishedRow] = {}
        self._on_disk: dict[int, tuple[_Spool, int, int, FinishedRow]] = {}
        self._max_bytes, self._max_bytes_of_file = max_bytes_in_memory, max_bytes_of_file
        self._num_bytes = 0
        self._spools: list[_Spool] = []

    def add(self, row: FinishedRow) -> None:
        """Raises JobError when the disk is full."""
        if self._num_bytes + len(row.data) <= self._max_bytes:
            self._in_memory[row.number] = row
            self._num_bytes += len(row.data)
            return
        with late_file_errors(f"rows that wait for their turn in {tempfile.gettempdir()}", was_tried=False):
            spool = self._spool()
            spool.file.write(row.data)
            spool.file.flush()
            self._on_disk[row.number] = spool, spool.end, len(row.data), row._replace(data=b"")
            spool.end += len(row.data)
            spool.num_waiting += 1

    def pop(self, index: int) -> FinishedRow | None:
        """The row, which waits no more; None where it does not wait."""
        if index in self._in_memory:
            row = self._in_memory.pop(index)
            self._num_bytes -= len(row.data)
            return row
        if index not in self._on_disk:
            return None
        spool, start, num_bytes, row = self._on_disk.pop(index)
        data = os.pread(spool.file.fileno(), num_bytes, start)
        spool.num_waiting -= 1
        if not spool.num_waiting:
            self._spools.remove(spool)
            spool.file.close()
        return row._replace(data=data)

    def close(self) -> None:
        """Whatever still waits is lost."""
        for spool in self._spools:
            spool.file.close()

    def _spool(self) -> _Spool:
        if not self._spools or self._spools[-1].end >= self._max_bytes_of_file:
            self._spools.append(_Spool())
        return self._spools[-1]
