"""Appends rows to the output in a thread of its own, so that a slow disk does not hold up the model.

Rows reach the file at once, whole, and the disk in groups (fsync). Knows nothing of what is in a row.
"""

from __future__ import annotations

import contextlib
import os
import queue
import stat
import threading
import time

from npu_runner.batch.files.durable import explain_file_error, write_all

_MAX_QUEUED_ROWS = 1024
_MAX_BYTES_PER_WRITE = 1 << 20


class AnswerWriter:
    """Owns `descriptor`, opened for appending. After a failure it writes no more; `put` and `close` raise it."""

    def __init__(self, descriptor: int, name: str, *, sync_rows: int = 64, sync_seconds: float = 2.0):
        self._descriptor = descriptor
        self._name = name
        self._sync_rows = sync_rows
        self._sync_seconds = sync_seconds
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._rows: queue.Queue[bytes | None] = queue.Queue(_MAX_QUEUED_ROWS)
        self._failure: OSError | None = None
        self._num_unsynced = 0
        self._sync_at = float("inf")
        self._thread = threading.Thread(target=self._run, name="answer-writer", daemon=True)
        self._thread.start()

    def put(self, row: bytes) -> None:
        """Queue a row. Raises JobError if an earlier one could not be written."""
        self._raise_failure()
        self._rows.put(row)

    def close(self) -> None:
        """Write and sync what is queued, then close the file. Raises JobError if that failed."""
        if self._thread.is_alive():
            self._rows.put(None)
            self._thread.join()
            os.close(self._descriptor)
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise explain_file_error(f"output {self._name}", self._failure) from self._failure

    def _run(self) -> None:
        # Goes on taking rows after a failure, so that nobody waits for room in the queue for ever.
        is_open = True
        while is_open:
            rows, is_open = self._next_rows()
            if self._failure is None:
                try:
                    self._write(rows)
                    if not is_open or self._num_unsynced >= self._sync_rows or time.monotonic() >= self._sync_at:
                        self._sync()
                except OSError as error:
                    self._failure = error

    def _next_rows(self) -> tuple[list[bytes], bool]:
        """Rows that are waiting, at least one unless a sync is due; and whether there will be more."""
        rows: list[bytes] = []
        num_bytes = 0
        timeout = None if self._sync_at == float("inf") else max(0.0, self._sync_at - time.monotonic())
        with contextlib.suppress(queue.Empty):
            row = self._rows.get(timeout=timeout)
            while row is not None:
                rows.append(row)
                num_bytes += len(row)
                if num_bytes >= _MAX_BYTES_PER_WRITE:
                    return rows, True
                row = self._rows.get_nowait()
            return rows, False
        return rows, True

    def _write(self, rows: list[bytes]) -> None:
        if not rows:
            return
        if self._num_unsynced == 0:
            self._sync_at = time.monotonic() + self._sync_seconds
        end = os.lseek(self._descriptor, 0, os.SEEK_END) if self._is_regular else 0
        try:
            write_all(self._descriptor, b"".join(rows))
        except OSError:
            self._remove_torn_row(end)
            raise
        self._num_unsynced += len(rows)

    def _remove_torn_row(self, start: int) -> None:
        """A full disk took a part of the rows: leave the whole ones. Resuming would repair it as well."""
        if not self._is_regular:
            return
        with contextlib.suppress(OSError), open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
            file.seek(start)
            written = file.read()
            os.ftruncate(self._descriptor, start + written.rfind(b"\n") + 1)

    def _sync(self) -> None:
        if self._is_regular and self._num_unsynced:
            os.fsync(self._descriptor)
        self._num_unsynced, self._sync_at = 0, float("inf")
