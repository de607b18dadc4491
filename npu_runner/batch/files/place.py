"""The files and streams that a command writes to, told apart from all that it reads and from all that it makes itself.

Settings say in their metadata which files they read (`npu_runner.config.READ`), so every command has one check. Two
names are the same by path or by inode. Knows nothing of the content.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO, TypeAlias

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.fingerprint import files_of_model
from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.names import own_files
from npu_runner.config import READ, flat_fields, flat_values
from npu_runner.errors import ConfigError
from npu_runner.processes.patient_streams import patient
from npu_runner.prompts.media.file_kinds import image_kind, video_kind

Named: TypeAlias = tuple[str, str | Path | None]
"""An option, and the file that it names; None: it names none."""
_STDOUT = 1
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_HEAD_BYTES = 64


class Place:
    """A file, or a stream (a device, a pipe, standard output). A file is tried when the place is entered, before
    anything is loaded; a stream is open from then on."""

    def __init__(self, option: str, name: str):
        """Raises ConfigError for a name that cannot be written."""
        self.option = option
        self.name = "standard output" if name == STANDARD_STREAM else name
        self.path: Path | None = None
        """Where the file is or will be, links followed; None: it is a stream."""
        self.descriptor = -1
        """The stream is open under this number while the place is entered."""
        self._number = _own_descriptor(name)
        found = None
        with clear_file_errors(self.title), contextlib.suppress(FileNotFoundError):
            found = os.stat(name) if self._number is None else self._stat_own(self._number)
        if found is not None and (stat.S_ISDIR(found.st_mode) or stat.S_ISBLK(found.st_mode)):
            raise ConfigError(f"{self.title}: is a {'folder' if stat.S_ISDIR(found.st_mode) else 'disk'}; name a file")
        if found is not None and (self._number is not None or not stat.S_ISREG(found.st_mode)):
            self.keys: list[Hashable] = [(found.st_dev, found.st_ino)]
            """Two places with one of these in common are one."""
            return
        self.path = Path(os.path.realpath(name))
        self.keys = _keys(self.path)
        if not self.path.parent.is_dir():
            raise ConfigError(f"{self.title}: is in no existing folder ({self.path.parent} does not exist); make it "
                              "first")

    @property
    def title(self) -> str:
        return f"{self.option} {self.name}"

    @property
    def is_stream(self) -> bool:
        return self.path is None

    def __enter__(self) -> Place:
        """Raises ConfigError where it cannot be written."""
        with clear_file_errors(self.title):
            if self.path is None:
                self.descriptor = self._open()
                return self
            with tempfile.TemporaryFile(dir=self.path.parent):
                pass
            if self.path.exists() and self.path.stat().st_dev != self.path.parent.stat().st_dev:
                raise ConfigError(f"{self.title}: is mounted by itself, so no next version can take its place; mount "
                                  "its folder")
        return self

    def __exit__(self, *_: object) -> None:
        if self.descriptor < 0:
            return
        if self._number == _STDOUT:
            _flush(sys.__stdout__)
            os.dup2(self.descriptor, _STDOUT)
        os.close(self.descriptor)
        self.descriptor = -1

    def late_errors(self) -> contextlib.AbstractContextManager[None]:
        """For writes after the first row: of a stream nothing could be tried but that it opens."""
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

    def _stat_own(self, number: int) -> os.stat_result:
        # Where a standard stream was closed, another file may have its number.
        is_closed = number in (1, 2) and (sys.__stdout__, sys.__stderr__)[number - 1] is None
        if is_closed or fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise ConfigError(f"{self.title}: this descriptor is closed, or open for reading alone; name a file")
        return os.fstat(number)

    def _open(self) -> int:
        if self._number is None:
            return os.open(self.name, os.O_WRONLY | os.O_NOCTTY | os.O_CLOEXEC)
        descriptor = os.dup(self._number)
        if self._number == _STDOUT:
            _flush(sys.__stdout__)
            # The words of a library or a compiler must not end up among what is written here.
            os.dup2(2, _STDOUT)
        return descriptor


def _flush(stream: TextIO | None) -> None:
    if stream is not None and not stream.closed:
        patient(stream).flush()


def _own_descriptor(name: str) -> int | None:
    """The number, where the name is one of a descriptor of this process: -, /dev/stdout, the /dev/fd/63 of a shell."""
    if name == STANDARD_STREAM:
        return _STDOUT
    given = Path(name)
    for path in (given, given.parent / os.readlink(given) if os.path.islink(given) else given):
        if path.name.isdecimal() and os.path.realpath(path.parent) == os.path.realpath("/proc/self/fd"):
            return int(path.name)
    return None


# -- places that are something else already ----------------------------------------------------------------------------


def find_places(written: Iterable[Named], read: Iterable[Named],
                reserved_in: Callable[[Path], Mapping[Path, str]] = lambda folder: {}) -> dict[str, Place]:
    """The places by their options. Raises ConfigError for a name that stands for two things, or for an image or a
    video, which no command writes there.

    `read`: names that are read, as from `read_by`; a folder stands for the files of its checkpoint or adapter.
    `reserved_in` names further files of a folder that are not to be written to, and says what each is.
    """
    places = {option: Place(option, str(name)) for option, name in written if name is not None}
    names = dict(_read_keys(read))
    for place in places.values():
        _refuse_media(place)
        for key in place.keys:
            if key in names:
                raise ConfigError(f"{place.title}: is the {names[key]} as well; choose another name")
        names |= dict.fromkeys(place.keys, place.option)
    files = {place.path: place for place in places.values() if place.path is not None}
    kept = [(own, f"{name} of the {place.option}, which the job makes itself")
            for path, place in files.items() for own, name in own_files(place.option, path).items()]
    kept += [pair for folder in {path.parent for path in files} for pair in reserved_in(folder).items()]
    reserved = {key: name for path, name in kept for key in _keys(path)}
    for number, name in ((1, "standard output"), (2, "standard error")):
        with contextlib.suppress(OSError):
            found = os.fstat(number)
            reserved[found.st_dev, found.st_ino] = f"file that {name} goes to"
    for place in files.values():
        for key in place.keys:
            if key in reserved:
                raise ConfigError(f"{place.title}: is the {reserved[key]}; choose another name")
    return places


def read_by(*settings: Any) -> list[Named]:
    """The files that these settings read: the value of each option whose metadata says that it is read."""
    found: list[Named] = []
    for each in settings:
        values = flat_values(each)
        found += [(name, getattr(values[name], "file", values[name]))  # the file of a template's text
                  for name, field in flat_fields(type(each)).items() if field.metadata.get("file") == READ]
    return found


def _refuse_media(place: Place) -> None:
    """It may lie below the folder of a job's media, or be a source of rows."""
    if place.path is None or not place.path.is_file():
        return
    with contextlib.suppress(OSError), open(place.path, "rb") as file:  # no job has read what we may not read
        head = file.read(_HEAD_BYTES)
        if kind := image_kind(head) or video_kind(head):
            raise ConfigError(f"{place.title}: is an image or a video ({kind}), which would be lost; choose another "
                              "name")


def _read_keys(read: Iterable[Named]) -> Iterator[tuple[Hashable, str]]:
    for option, name in read:
        if name is None:
            continue
        folder = Path("/proc/self/fd/0" if name == STANDARD_STREAM else name)
        files = [(option, folder)] if not folder.is_dir() else []
        if any((folder / config).is_file() for config in ("config.json", _ADAPTER[0])):
            files = [(f"{option}'s {path.name}", path)
                     for path in (*files_of_model(folder), *(folder / each for each in _ADAPTER))]
        for title, path in files:
            yield os.path.realpath(path), title
            with contextlib.suppress(OSError):  # the command that reads it says what is wrong
                found = os.stat(path)
                # A terminal and other devices may be read and written.
                if stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                    yield (found.st_dev, found.st_ino), title


def _keys(path: Path) -> list[Hashable]:
    keys: list[Hashable] = [os.path.join(os.path.realpath(path.parent), path.name)]
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        keys.append((found.st_dev, found.st_ino))
    return keys
