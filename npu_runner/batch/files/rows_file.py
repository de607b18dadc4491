"""One file of result rows that a job owns: locked, looked at, repaired, opened for more, put in order.

Nothing is changed before `open`. Knows nothing of which rows belong into it.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import clear_file_errors, remove_torn_version, sync_folder
from npu_runner.batch.files.output_file import OutputLock, OutputScan, keep_rows, rewrite_rows, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.errors import ConfigError, JobError

_SYNC_ROWS = 64
_SYNC_SECONDS = 2.0


class RowsFile:
    """Entered while a job runs; `scan` is what `look` has found. Raises ConfigError for a stream."""

    scan: OutputScan

    def __init__(self, place: Place):
        if place.path is None:
            raise ConfigError(f"{place.title}: is no file; a stream cannot be resumed")
        self._place = place
        # Through links, so that two names of one file share one lock, and a link stays a link.
        self.path = place.path
        self.name = place.name
        self._lock = OutputLock(self.path)
        self._seen: tuple[int, ...] | None = None

    @property
    def title(self) -> str:
        return self._place.title

    def __enter__(self) -> RowsFile:
        with clear_file_errors(self.title):
            self._place.try_own_names()
        self._lock.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.__exit__()

    def look(self) -> None:
        with clear_file_errors(self.title):
            self._seen = _state_of(self.path)
            self.scan = scan_output(self.path)

    def try_to_append(self) -> None:
        """Raises ConfigError where rows could not be added to the file."""
        if self._seen is not None:
            with clear_file_errors(self.title):
                os.close(_open(self.path, 0))

    def refuse_changes(self) -> None:
        """Raises JobError where the file is not what `look` has found."""
        if _state_of(self.path) != self._seen:
            raise JobError(f"{self.title}: was changed while the model loaded; run the same command again")

    def replace(self) -> None:
        """Begin with nothing."""
        self.path.unlink(missing_ok=True)
        remove_torn_version(self.path)

    def keep(self, wanted: np.ndarray) -> None:
        """Leave only these of the rows that `look` has found, and whole ones."""
        remove_torn_version(self.path)
        keep_rows(self.path, self.scan, wanted)

    def append_from(self, other: RowsFile, wanted: np.ndarray) -> None:
        """Add these rows of another file, whole and on disk."""
        if not wanted.any():
            return
        with open(other.path, "rb") as source, open(_open(self.path), "ab") as target:
            for index in np.flatnonzero(wanted):
                source.seek(int(other.scan.starts[index]))
                target.write(source.readline())
            target.flush()
            os.fsync(target.fileno())

    def open(self) -> AnswerWriter:
        descriptor = _open(self.path)
        sync_folder(self.path.parent)
        return AnswerWriter(descriptor, self.name, path=self.path, sync_rows=_SYNC_ROWS, sync_seconds=_SYNC_SECONDS)

    def put_in_order(self, scan: OutputScan, found: np.ndarray) -> None:
        """`found`: for every row of the input its number in the file now (`scan`), -1 where it is not there."""
        order = found[found >= 0]
        if scan.num_broken_lines or not np.array_equal(order, np.arange(scan.num_rows)):
            rewrite_rows(self.path, scan, order)


def _open(path: Path, create: int = os.O_CREAT) -> int:
    """For more rows. Links were followed when the place was found: one that stands there now is somebody else's."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o666)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes when somebody writes to a file or puts another in its place; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
