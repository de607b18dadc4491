"""Files that are whole or not there, whatever happens, and errors of the file system in the user's words.

Knows nothing of rows or jobs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

from npu_runner.batch.files.names import new_version_path
from npu_runner.errors import ConfigError, JobError

FileErrors: TypeAlias = Callable[[str], contextlib.AbstractContextManager[None]]
"""`clear_file_errors` or `late_file_errors`: turns an OSError within into the error of a user."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_FOR_WRITING = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_REMEDY = "choose a place that exists and can be written"
# The settings were fine, the machine gave out: worth the same command again once there is room.
_MACHINE_GAVE_OUT = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.ENOMEM, errno.ESTALE)


@contextlib.contextmanager
def clear_file_errors(what: str, remedy: str = _REMEDY) -> Iterator[None]:
    """Turn an OSError into a JobError (disk full, broken disk) or a ConfigError (wrong place). `what`: "output x"."""
    try:
        yield
    except OSError as error:
        raise explain_file_error(what, error, remedy) from error


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


def has_given_out(error: OSError) -> bool:
    """Whether the machine is at fault, and not the place: a full or broken disk, a limit of size, no memory."""
    return error.errno in _MACHINE_GAVE_OUT


def explain_file_error(what: str, error: OSError, remedy: str = _REMEDY) -> JobError | ConfigError:
    """The error a user gets for a failed operation on a file."""
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return JobError(f"{what}: {reason}; make room and run the same command again")
    if error.errno == errno.EPIPE:
        return JobError(f"{what}: its reader has gone ({reason})")
    if has_given_out(error):
        return JobError(f"{what}: {reason}; when that is mended run the same command again")
    return ConfigError(f"{what}: {reason}; {remedy}")


@contextlib.contextmanager
def replacing(path: Path, *, is_synced: bool = True, waits: bool = False) -> Iterator[BinaryIO]:
    """Write a new version of a file: killed at any moment, the old one or the new one is there, whole and on disk.

    Two processes never write one new version. The second raises JobError, or with `waits` it waits for the first.
    `is_synced` false: a power cut may leave an empty file, which is for one that is soon written again or synced later.
    """
    new = new_version_path(path)
    try:
        descriptor = _create(new, waits=waits)
    except BlockingIOError:
        raise _two_writers(path) from None
    with open(descriptor, "wb") as file:
        try:
            _copy_mode(file.fileno(), path)
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            if not is_at(file.fileno(), new):  # a writer without a lock has removed it
                raise _two_writers(path)
            os.replace(new, path)
        except BaseException:
            if is_at(file.fileno(), new):
                new.unlink()
            raise
    if is_synced:
        sync_folder(path.parent)


@contextlib.contextmanager
def folder_below(root: str | Path, names: Iterable[str]) -> Iterator[int]:
    """The descriptor of a folder below `root`, which is made where it is not there. Raises OSError where one of the
    names is a link."""
    with contextlib.ExitStack() as entered:
        parent = os.open(root, _FOLDER)
        entered.callback(os.close, parent)
        for name in names:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, dir_fd=parent)
            parent = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
            entered.callback(os.close, parent)
        yield parent


def remove_torn_version(path: Path) -> None:
    """Remove what a process left that was killed in `replacing`: it may be as large as the file. One that a process is
    writing stays."""
    with contextlib.suppress(BlockingIOError):
        _remove_left(new_version_path(path), waits=False)


def _create(path: Path, *, waits: bool) -> int:
    """A new, empty file, locked as long as it is open. Whatever else has the name is removed: a link that was put
    there is not followed. Raises BlockingIOError where a process is writing it."""
    while True:
        _remove_left(path, waits=waits)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, _FOR_WRITING | os.O_CREAT | os.O_EXCL, 0o666)
            # Between these two lines another process may take it for one that was left.
            if _lock(descriptor, waits=waits) and is_at(descriptor, path):
                return descriptor
            os.close(descriptor)


def _remove_left(path: Path, *, waits: bool) -> None:
    """Raises BlockingIOError where a process is writing it."""
    try:
        descriptor = os.open(path, _FOR_WRITING | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    except OSError:  # a link, a pipe without a reader, a file of another user: none that we could lock
        path.unlink(missing_ok=True)
        return
    try:
        if not _lock(descriptor, waits=waits):
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        if is_at(descriptor, path):
            path.unlink()
    finally:
        os.close(descriptor)


def _lock(descriptor: int, *, waits: bool) -> bool:
    """Whether the lock was free. On a file system without locks (NFS has none of folders) it always is."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
    return True


def is_at(descriptor: int, path: Path) -> bool:
    """Whether this open file still has this name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _two_writers(path: Path) -> JobError:
    return JobError(f"{path}: another process is writing it at this moment; wait until that has ended, or choose "
                    "another name")


def _copy_mode(descriptor: int, path: Path) -> None:
    """Set the permissions of the file that it will replace, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if stat.S_ISREG(mode):
            os.fchmod(descriptor, mode & 0o777)


def sync_folder(folder: Path) -> None:
    """Make names that were just created or replaced in a folder survive a power cut."""
    _sync(folder, os.O_DIRECTORY)


def _sync(path: str | Path, flags: int) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_files(folder: Path) -> None:
    """Make the files in a folder, and their names, survive a power cut. Their bytes are synced all at once at the end:
    the first file that is synced takes most of the others with it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):  # another process has renamed its new version
                    _sync(entry.path, os.O_NOFOLLOW)
    sync_folder(folder)


def write_all(descriptor: int, data: bytes) -> None:
    """os.write until everything is written: a nearly full disk takes a part first."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
