"""Appends rows to the output in a thread of its own, so that a slow disk does not hold up the model.

Rows reach the file at once, whole, and the disk in groups (fsync). With each group the writer checks that the file is
still there. A row that cannot be found in its file has no answer, however far it came: it is counted once it is there.
Knows nothing of what is in a row.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections import deque
from pathlib import Path

from npu_runner.batch.files.durable import explain_late_error, write_all
from npu_runner.batch.rows.counts import Counts
from npu_runner.errors import JobError, OutputLostError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.serving.replica import FinishedRow

_MAX_QUEUED_ROWS = 16_384
# Answers wait for a slow disk in memory, a row of log probabilities with 20 MB and more.
_MAX_QUEUED_BYTES = 64 << 20
_END = object()
_LONGEST_WAIT_SECONDS = 86_400.0
_MAX_BYTES_PER_WRITE = 4 << 20


class AnswerWriter:
    """Owns `descriptor`, opened for appending. After a failure it writes no more; `put` and `close` raise it.

    `path`: where the file must still be found when a group of rows is on disk; None for a stream, which is known only
    to have accepted the bytes.
    """

    def __init__(self, descriptor: int, name: str, *, path: Path | None = None, sync_rows: int = 64,
                 sync_seconds: float = 2.0):
        self._descriptor = descriptor
        self._name = name
        self._path = path
        self._sync_rows = sync_rows
        self._sync_seconds = sync_seconds
        self._is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._end = os.fstat(descriptor).st_size
        self._rows = ByteBoundedQueue(_MAX_QUEUED_BYTES, _MAX_QUEUED_ROWS)
        self._failure: JobError | None = None
        self._num_unsynced = 0
        self._sync_at = float("inf")
        self.num_put = 0
        self.num_kept = 0
        """Rows given to `put`, from the first one on, that were on disk, with the file in place, at the last check."""
        self._thread = threading.Thread(target=self._run, name="answer-writer", daemon=True)
        self._thread.start()

    def put(self, row: bytes) -> None:
        """Queue a row, once there is room. Raises JobError if an earlier one could not be written, OutputLostError if
        the file is gone."""
        self.raise_failure()
        self._rows.put(row, len(row))
        self.num_put += 1

    def close(self) -> None:
        """Write and sync the queued rows, then close the file. Raises the errors of `put`."""
        if self._thread.is_alive():
            self._rows.put(_END, 0)
            self._thread.join()
            os.close(self._descriptor)
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise the error that `put` would raise."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        # After a failure rows are still taken from the queue, so that no `put` waits for room in it for ever.
        is_open = True
        while is_open:
            rows, is_open = self._next_rows()
            if self._failure is None:
                try:
                    self._write(rows)
                    if not is_open or self._num_unsynced >= self._sync_rows or time.monotonic() >= self._sync_at:
                        self._sync()
                except OSError as error:
                    self._failure = explain_late_error(f"output {self._name}", error, was_tried=self._is_regular)
                except OutputLostError as error:
                    self.num_kept, self._failure = 0, error
                if self._failure is not None:
                    self._sync_at = float("inf")

    def _next_rows(self) -> tuple[list[bytes], bool]:
        """Rows that are waiting, at least one unless a sync is due; and whether there will be more."""
        row = self._rows.get(min(_LONGEST_WAIT_SECONDS, max(0.0, self._sync_at - time.monotonic())))
        rows = [] if row is None else [row]
        if row is not None and row is not _END:
            rows += self._rows.get_waiting(_MAX_BYTES_PER_WRITE - len(row))
        is_last = bool(rows) and rows[-1] is _END
        return rows[:-1] if is_last else rows, not is_last

    def _write(self, rows: list[bytes]) -> None:
        if not rows:
            return
        if self._num_unsynced == 0:
            self._sync_at = time.monotonic() + self._sync_seconds
        data = b"".join(rows)
        end = os.lseek(self._descriptor, 0, os.SEEK_END) if self._is_regular else 0
        try:
            write_all(self._descriptor, data)
        except OSError:
            self._keep_whole_rows(end)
            raise
        self._end += len(data)
        self._num_unsynced += len(rows)

    def _keep_whole_rows(self, start: int) -> None:
        """A full disk took a part of the rows: leave the whole ones. Resuming would repair it as well."""
        if not self._is_regular:
            return
        with contextlib.suppress(OSError):
            with open(f"/proc/self/fd/{self._descriptor}", "rb") as file:
                file.seek(start)
                whole = file.read().rpartition(b"\n")[0]
            num_bytes = len(whole) + bool(whole)
            os.ftruncate(self._descriptor, start + num_bytes)
            self._end += num_bytes
            self._num_unsynced += whole.count(b"\n") + bool(whole)
            self._sync()

    def _sync(self) -> None:
        if self._is_regular and self._num_unsynced:
            os.fsync(self._descriptor)
        if self._path is not None:
            self._check_place(self._path)
        self.num_kept += self._num_unsynced
        self._num_unsynced, self._sync_at = 0, float("inf")

    def _check_place(self, path: Path) -> None:
        """Raise OutputLostError unless the name leads to our file and just what was written is in it."""
        ours = os.fstat(self._descriptor)
        what = f"output {self._name}"
        remedy = "the same command answers again what is missing"
        try:
            found = os.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            raise OutputLostError(f"{what}: was removed or renamed while the job wrote it; {remedy}") from None
        if not os.path.samestat(ours, found):
            raise OutputLostError(f"{what}: another file was put in its place while the job wrote it; {remedy}")
        if ours.st_size != self._end:
            raise OutputLostError(
                f"{what}: has {ours.st_size} bytes where the job left {self._end}: another process cut it or wrote "
                f"to it; {remedy}")


class Delivery:
    """Owns the writers of a job while entered; rows go out as they come. After leaving, `tally` counts the rows that
    are in the files."""

    def __init__(self, tally: Counts, answers: AnswerWriter, errors: AnswerWriter | None = None):
        """`tally`: a row is added once it is found in its file. `errors`: for failed rows; None: they are answers."""
        self.tally = tally
        self._answers, self._errors = answers, answers if errors is None else errors
        self._uncounted: dict[AnswerWriter, deque[Counts]] = {answers: deque(), self._errors: deque()}

    def put(self, row: FinishedRow) -> None:
        """Queue a row for its file. Raises JobError when an earlier one could not be written."""
        writer = self._errors if row.outcome.failures_by_code else self._answers
        writer.put(row.data)
        self._uncounted[writer].append(row.outcome)

    def count(self) -> None:
        """Add to the tally what reached the files since the last call. Raises what the next `put` would raise."""
        self._count()
        for writer in self._uncounted:
            writer.raise_failure()

    def _count(self) -> None:
        for writer, uncounted in self._uncounted.items():
            while len(uncounted) > writer.num_put - writer.num_kept:
                self.tally.add(uncounted.popleft())

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with contextlib.ExitStack() as open_writers:
                for writer in reversed(self._uncounted):
                    open_writers.callback(writer.close)
        finally:
            self._count()
