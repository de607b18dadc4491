"""A place that a job writes to: a file, or a stream (a device, a pipe, standard output), and how it is written.

It is looked at when it is found and tried when it is entered, before anything is loaded. Knows nothing of what is
written.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.names import own_files
from npu_runner.errors import ConfigError
from npu_runner.processes.patient_streams import patient

_STDOUT = 1

Identity = tuple[int, int]
"""Device and inode."""


class Place:
    """Entered while a job runs. A file is only tried then; a stream is open until it is left."""

    def __init__(self, option: str, name: str, *, path: Path | None, number: int | None, identity: Identity | None):
        self.option = option
        self.name = "standard output" if name == STANDARD_STREAM else name
        self.path = path
        """Where the file is or will be, links followed; None: it is a stream."""
        self.number = number
        """The open descriptor of this process that the name stands for; None: it names a file or a device."""
        self.identity = identity
        """The file that is there; None: there is none."""
        self.descriptor = -1
        """The stream is open under this number while the place is entered."""

    @property
    def title(self) -> str:
        return f"{self.option} {self.name}"

    @property
    def is_stream(self) -> bool:
        return self.path is None

    def own_files(self) -> dict[Path, str]:
        """The files that the job makes beside this one, each with its name in messages."""
        return {} if self.path is None else own_files(self.option, self.path)

    def __enter__(self) -> Place:
        """Raises ConfigError where it cannot be written."""
        with clear_file_errors(self.title):
            if self.path is not None:
                self.try_own_names()
                try_to_replace(self.title, self.path)
            else:
                self.descriptor = self._open()
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor < 0:
            return
        if self.number == _STDOUT:
            _flush(sys.__stdout__)
            os.dup2(self.descriptor, _STDOUT)
        os.close(self.descriptor)
        self.descriptor = -1

    def try_own_names(self) -> None:
        """Raises OSError or ConfigError where the files that belong beside this one could not be there."""
        assert self.path is not None, f"{self.title} is a stream"
        for own, name in self.own_files().items():
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.lstat(own).st_mode):
                    raise ConfigError(f"{self.title}: its {name} would be {own}, which is a folder; move it away")

    def late_errors(self) -> contextlib.AbstractContextManager[None]:
        """For what is written after the first row: of a stream nothing could be tried but that it opens."""
        return late_file_errors(self.title, was_tried=not self.is_stream)

    @contextlib.contextmanager
    def writing(self) -> Iterator[BinaryIO]:
        """Put a new version in place of the file, whole or not at all, or write to the stream. Raises JobError."""
        with self.late_errors():
            if self.path is not None:
                with replacing(self.path) as file:
                    yield file
                return
            with open(os.dup(self.descriptor), "wb") as file:
                yield file

    def _open(self) -> int:
        if self.number is None:
            return os.open(self.name, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        if self.number == _STDOUT:
            _flush(sys.__stdout__)
            descriptor = os.dup(_STDOUT)
            # The words of a library or a compiler must not end up among what is written here.
            os.dup2(2, _STDOUT)
            return descriptor
        return os.dup(self.number)


def _flush(stream: TextIO | None) -> None:
    """The bytes that it holds back go out now, or nowhere."""
    if stream is not None and not stream.closed:
        patient(stream).flush()


def find_place(option: str, name: str | Path) -> Place:
    """The file or stream of this name. Raises ConfigError for one that cannot be written."""
    name = str(name)
    title = f"{option} {name}"
    number = own_descriptor(name)
    if number is not None:
        return Place(option, name, path=None, number=number, identity=_identity(_state_of(title, number)))
    with clear_file_errors(title):
        try:
            found = os.stat(name)
        except FileNotFoundError:
            found = None
    path = Path(os.path.realpath(name))
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{title}: is a folder; name a file in it")
    if found is not None and stat.S_ISBLK(found.st_mode):
        raise ConfigError(f"{title}: is a disk, and what is on it would be written over; name a file")
    if found is not None and not stat.S_ISREG(found.st_mode):
        return Place(option, name, path=None, number=None, identity=_identity(found))
    if not path.parent.is_dir():
        raise ConfigError(f"{title}: is in no existing folder ({path.parent} does not exist); make it first")
    return Place(option, name, path=path, number=None, identity=None if found is None else _identity(found))


def own_descriptor(name: str) -> int | None:
    """The number, where the name is one of a descriptor of this process: -, /dev/stdout, the /dev/fd/63 of a shell."""
    if name == STANDARD_STREAM:
        return _STDOUT
    ours = {os.path.realpath(f"/proc/{which}/fd") for which in ("self", "thread-self")}
    given = Path(name)
    for path in (given, given.parent / os.readlink(given) if os.path.islink(given) else given):
        if path.name.isdecimal() and os.path.realpath(path.parent) in ours:
            return int(path.name)
    return None


def _state_of(title: str, number: int) -> os.stat_result:
    """Raises ConfigError for a descriptor that nothing can be written to."""
    was_closed = number in (1, 2) and (sys.__stdout__, sys.__stderr__)[number - 1] is None
    try:
        mode = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE
        found = os.fstat(number)
    except OSError:
        was_closed, mode = True, os.O_WRONLY
    if was_closed:
        raise ConfigError(f"{title}: this descriptor is closed; open it, or name a file")
    if mode == os.O_RDONLY:
        raise ConfigError(f"{title}: this descriptor is open for reading alone; name a file")
    return found


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def try_to_replace(title: str, path: Path) -> None:
    """Raises OSError or ConfigError where `replacing` would fail."""
    with tempfile.TemporaryFile(dir=path.parent):
        pass
    if path.exists() and path.stat().st_dev != path.parent.stat().st_dev:
        raise ConfigError(f"{title}: is mounted by itself, so no next version can take its place; mount its folder")
