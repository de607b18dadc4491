"""Files that are whole or not there, whatever happens, and errors of the file system in the user's words.

Knows nothing of rows or jobs.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

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
def late_file_errors(what: str) -> Iterator[None]:
    """Turn an OSError into a JobError, whatever it is: for what happens after the first row was written."""
    try:
        yield
    except OSError as error:
        raise explain_late_error(what, error) from error


def explain_late_error(what: str, error: OSError) -> JobError:
    """The error for an operation that failed while the job ran: the settings were good when it began."""
    explained = explain_file_error(what, error)
    if isinstance(explained, JobError):
        return explained
    return JobError(
        f"{what}: {error.strerror or error}, which was not so when the job began; when that is mended the same command "
        "goes on from here"
    )


def explain_file_error(what: str, error: OSError) -> JobError | ConfigError:
    """The error a user gets for a failed operation on a file."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JobError(f"{what}: {reason}; make room and run the same command again, finished rows are kept")
    if error.errno == errno.EPIPE:
        return JobError(f"{what}: the reader of the answers has gone ({reason})")
    if error.errno in _MACHINE_GAVE_OUT:
        return JobError(f"{what}: {reason}; when that is mended the same command goes on from here")
    return ConfigError(f"{what}: {reason}; choose a place that exists and can be written")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a new version of a file: killed at any moment, the old one or the new one is there, whole and on disk."""
    new = _new_version(path)
    try:
        with open(new, "wb") as file:
            if path.exists():
                os.fchmod(file.fileno(), path.stat().st_mode & 0o777)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def remove_torn_version(path: Path) -> None:
    """Remove what a process left that was killed in `replacing`: it may be as large as the file."""
    _new_version(path).unlink(missing_ok=True)


def _new_version(path: Path) -> Path:
    # Always the same name: what a killed process leaves is found by the next one.
    return path.with_name(f".{path.name}.new")


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
