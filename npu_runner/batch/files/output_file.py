"""The file of answers: how it is locked and repaired, and how rows are added so that none is lost.

Knows nothing of what an answer says.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import (
    clear_file_errors,
    remove_torn_version,
    replacing,
    sync_folder,
)
from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.batch.files.output_scan import OutputScan, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.errors import ConfigError, JobError, OutputLostError


def keep_rows(path: Path, scan: OutputScan, wanted: np.ndarray) -> OutputScan:
    """Leave only these rows in the file, and whole ones. Returns what is in it then."""
    if not scan.num_broken_lines and wanted.all():
        return scan
    return rewrite_rows(path, scan, np.flatnonzero(wanted))


def rewrite_rows(path: Path, scan: OutputScan, order: np.ndarray) -> OutputScan:
    """Replace the file by these of its rows in this order. Killed at any moment, the old or the new file is there."""
    starts, num_bytes = np.zeros(len(order), dtype=np.uint64), 0
    with open(path, "rb") as file, replacing(path) as copy:
        for place, index in enumerate(order):
            row = whole_row(path, file, int(scan.starts[index]))
            copy.write(row)
            starts[place] = num_bytes
            num_bytes += len(row)
    return scan.only(order, starts, num_bytes)


def whole_row(path: Path, file: BinaryIO, start: int) -> bytes:
    """The line that begins there. Raises OutputLostError where it has no end any more."""
    file.seek(start)
    row = file.readline()
    if not row.endswith(b"\n"):
        raise OutputLostError(f"output {path}: was cut while it was rewritten; run the same command again")
    return row


class RowsFile:
    """One file of result rows that a job owns: locked, looked at, repaired, opened for more, put in order.

    Entered while a job runs; nothing is changed before `open`. `scan` is what `look` has found. Raises ConfigError for
    a stream.
    """

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

    def __exit__(self, *_: object) -> None:
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
        """Leave only these of the rows in `scan`, and whole ones."""
        remove_torn_version(self.path)
        self.scan = keep_rows(self.path, self.scan, wanted)

    def copy_rows(self, path: Path, wanted: np.ndarray) -> None:
        """Add these rows to another file, whole and on disk, each line that is not there yet. A killed copy leaves at
        most a part of a line, which goes."""
        if not wanted.any():
            return
        with clear_file_errors(f"replaced answers {path}"), open(self.path, "rb") as source, \
                open(_open(path, os.O_CREAT | os.O_RDWR), "r+b") as copy:
            known, end = set(), 0
            for line in copy:
                if line.endswith(b"\n"):
                    known.add(hashlib.blake2b(line, digest_size=16).digest())
                    end += len(line)
            copy.truncate(end)
            for index in np.flatnonzero(wanted):
                line = whole_row(self.path, source, int(self.scan.starts[index]))
                if hashlib.blake2b(line, digest_size=16).digest() not in known:
                    copy.write(line)
            copy.flush()
            os.fsync(copy.fileno())
            sync_folder(path.parent)

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
        return AnswerWriter(descriptor, self.name, path=self.path)

    def put_in_order(self, scan: OutputScan, found: np.ndarray) -> None:
        """`found`: for every row of the input its number in the file now (`scan`), -1 where it is not there."""
        order = found[found >= 0]
        if scan.num_broken_lines or not np.array_equal(order, np.arange(scan.num_rows)):
            rewrite_rows(self.path, scan, order)


def _open(path: Path, create: int = os.O_CREAT) -> int:
    """For more rows. Links were followed when the place was found: one that stands there now is somebody else's."""
    access = 0 if create & os.O_RDWR else os.O_WRONLY
    return os.open(path, access | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | create, 0o666)


def _state_of(path: Path) -> tuple[int, ...] | None:
    """What changes when somebody writes to a file or puts another in its place; None: there is none."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
