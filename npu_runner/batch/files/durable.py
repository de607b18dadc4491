"""Files that are whole or not there, whatever happens, and errors of the file system in the user's words.

Knows nothing of rows or jobs.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from npu_runner.batch.files.names import new_version_path
from npu_runner.errors import ConfigError, JobError

# The settings were fine, the machine gave out: worth the same command again once there is room.
_MACHINE_GAVE_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ENOMEM, errno.ESTALE)


@contextlib.contextmanager
def clear_file_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a JobError (disk full, broken disk) or a ConfigError (wrong place). `what`: "output x"."""
    try:
        yield
    except OSError as error:
        raise explain_file_error(what, error) from error


@contextlib.contextmanager
def late_file_errors(what: str, *, was_tried: bool = True) -> Iterator[None]:
    """Turn an OSError into a JobError, whatever it is: for what happens after the first row was written.

    `was_tried`: the place could be read or written when the job began.
    """
    try:
        yield
    except OSError as error:
        raise explain_late_error(what, error, was_tried=was_tried) from error


def explain_late_error(what: str, error: OSError, *, was_tried: bool = True) -> JobError:
    """The error for an operation that failed while the job ran."""
    explained = explain_file_error(what, error)
    if isinstance(explained, JobError):
        return explained
    reason = f"{error.strerror or error}{', which was not so when the job began' if was_tried else ''}"
    return JobError(f"{what}: {reason}; when that is mended the same command goes on from here")


def explain_file_error(what: str, error: OSError) -> JobError | ConfigError:
    """The error a user gets for a failed operation on a file."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JobError(f"{what}: {reason}; make room and run the same command again, finished rows are kept")
    if error.errno == errno.EPIPE:
        return JobError(f"{what}: its reader has gone ({reason})")
    if error.errno in _MACHINE_GAVE_OUT:
        return JobError(f"{what}: {reason}; when that is mended the same command goes on from here")
    return ConfigError(f"{what}: {reason}; choose a place that exists and can be written")


@contextlib.contextmanager
def replacing(path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Write a new version of a file: killed at any moment, the old one or the new one is there, whole and on disk.

    `is_synced` false: a power cut may leave an empty one, for a file that is soon written again.
    """
    new = new_version_path(path)
    descriptor = _create(new)
    try:
        with open(descriptor, "wb") as file:
            _take_mode(file.fileno(), path)
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    if is_synced:
        sync_folder(path.parent)


def remove_torn_version(path: Path) -> None:
    """Remove what a process left that was killed in `replacing`: it may be as large as the file."""
    new_version_path(path).unlink(missing_ok=True)


def _create(path: Path) -> int:
    """A new, empty file. Whatever has the name goes: a link that somebody put there is not followed."""
    path.unlink(missing_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def _take_mode(descriptor: int, path: Path) -> None:
    """The permissions of the file that it will replace, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            os.fchmod(descriptor, mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Make names that were just created or replaced in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: bytes) -> None:
    """os.write until everything is written: a nearly full disk takes a part first."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
