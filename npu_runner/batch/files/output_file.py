"""The file of answers: how it is locked and repaired, and how rows are added so that none is lost.

Knows nothing of what an answer says.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import stat
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.durable import (
    clear_file_errors,
    explain_file_error,
    remove_torn_version,
    replacing,
    sync_folder,
)
from npu_runner.batch.files.names import lock_path
from npu_runner.batch.files.output_scan import OutputScan, scan_output
from npu_runner.batch.files.place import Place
from npu_runner.errors import ConfigError, JobError, OutputLostError

# A process that is gone may have left a child that is not another program yet and holds what it held.
_LEAVING_SECONDS = 5.0
_LOOKING_SECONDS = 0.1


class OutputLock:
    """Holds `<output>.lock` while a job runs; a second job on the output gets a ConfigError with the holder's pid.

    One whose holder is gone is waited for, for seconds.
    """

    def __init__(self, output: Path):
        self._path = lock_path(output)
        self._output = output
        self._descriptor = -1

    def __enter__(self) -> OutputLock:
        began = time.monotonic()
        while self._descriptor < 0:
            descriptor = _open_lock(self._path)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                os.close(descriptor)
                # A job that looks from outside (job_at_work) has a lock for a moment, too.
                patience = _LEAVING_SECONDS if _is_gone(holder) else _LOOKING_SECONDS
                if time.monotonic() < began + patience:
                    time.sleep(0.01)
                    continue
                raise ConfigError(
                    f"output {self._output}: another job (pid {holder}) is writing it; wait or choose another output"
                ) from None
            # The holder before us may have removed the file between our open and our lock.
            if _is_still_there(self._path, descriptor):
                self._descriptor = descriptor
            else:
                os.close(descriptor)
        try:
            with clear_file_errors(f"lock {self._path}"):
                os.ftruncate(self._descriptor, 0)
                os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        os.close(self._descriptor)


def job_at_work(output: Path) -> str | None:
    """The pid of the job that holds the lock of this output; None: none does. Nothing is made or changed."""
    try:
        descriptor = os.open(lock_path(output), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    finally:
        os.close(descriptor)
    return None


def _holder(descriptor: int) -> str:
    return os.pread(descriptor, 64, 0).decode(errors="replace").strip() or "unknown"


def _is_gone(holder: str) -> bool:
    try:
        os.kill(int(holder), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OverflowError, PermissionError):
        return False
    return False


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


def _open_lock(path: Path) -> int:
    """Raises ConfigError where something else has the name: the pid is written into it, wherever a link leads."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise _no_lock(path) from error
        raise explain_file_error(f"lock {path}", error) from error
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise _no_lock(path)


def _no_lock(path: Path) -> ConfigError:
    return ConfigError(f"lock {path}: is a link, or no file, so no job has made it; remove it, or choose another name")


def _is_still_there(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.lstat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


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
