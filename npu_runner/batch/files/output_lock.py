"""Holds the lock of an output while a job writes it, and tells from outside who holds it. Knows nothing of rows."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from pathlib import Path

from npu_runner.batch.files.durable import clear_file_errors, explain_file_error, is_at
from npu_runner.batch.files.names import lock_path
from npu_runner.errors import ConfigError

# A process that is gone may have left a child that is not another program yet and holds what it held.
_LEAVING_SECONDS = 5.0
_READING_SECONDS = 0.1


class OutputLock:
    """Holds `<output>.lock` while a job runs; a second job on the output gets a ConfigError with the holder's pid.

    The lock of a holder that is gone is waited for, for seconds.
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
                # A command that reads the lock from outside (job_at_work) holds it for a moment, too.
                patience = _LEAVING_SECONDS if _is_gone(holder) else _READING_SECONDS
                if time.monotonic() < began + patience:
                    time.sleep(0.01)
                    continue
                raise ConfigError(
                    f"output {self._output}: another job (pid {holder}) is writing it; wait or choose another output"
                ) from None
            # The holder before us may have removed the file between our open and our lock.
            if is_at(descriptor, self._path):
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
