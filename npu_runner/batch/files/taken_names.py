"""Refuses a place that is something else already: what is read, what another place is, what a job keeps for itself.

Settings say in their metadata which files they read (`npu_runner.config.READ`), so every command has one check. Two
names are the same by path or by inode. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from npu_runner.batch.files.fingerprint import files_that_count
from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.names import own_files
from npu_runner.batch.files.place import Place
from npu_runner.config import READ, flat_fields, flat_values
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.file_kinds import image_kind, video_kind

Named: TypeAlias = tuple[str, str | Path | None]
"""An option, and what it names; None: nothing."""
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_HEAD_BYTES = 64
_STANDARD = {1: "standard output", 2: "standard error"}


def read_by(*settings: Any) -> list[Named]:
    """The files that these settings read: of each option that says so in its metadata."""
    found: list[Named] = []
    for each in settings:
        fields, values = flat_fields(type(each)), flat_values(each)
        for name, field in fields.items():
            if field.metadata.get("file") == READ:
                value = values[name]
                found.append((name, getattr(value, "file", value)))  # the file of a template's text
    return found


def refuse_taken(places: Sequence[Place], read: Iterable[Named], others: Mapping[Path, str]) -> None:
    """Raises ConfigError for a place that stands for two, and for an image or a video, which no command writes there.

    `read`: as `read_by` has it. Of a folder it is the files of a checkpoint or an adapter. `others`: files that are not
    to be written to, and what each is.
    """
    _refuse_two_on_standard_output(places)
    _refuse_media(places)
    taken = _read_names(read)
    for place in places:
        for key in _keys(place):
            if key in taken:
                raise ConfigError(f"{place.title}: is the {taken[key]} as well; choose another name")
        taken |= dict.fromkeys(_keys(place), place.option)
    kept = _kept_names(places, others)
    for place in places:
        for key in [] if place.is_stream else _keys(place):
            if key in kept:
                raise ConfigError(f"{place.title}: is the {kept[key]}; choose another name")


def _refuse_two_on_standard_output(places: Sequence[Place]) -> None:
    found = [place.option for place in places if place.number == 1]
    if len(found) > 1:
        raise ConfigError(f"{' and '.join(found)}: both would go to standard output, which takes one; name a file for "
                          "the other")


def _refuse_media(places: Sequence[Place]) -> None:
    """It may lie below the folder of a job's media, or be a source of rows."""
    for place in places:
        if place.path is None or not place.path.is_file():
            continue
        with contextlib.suppress(OSError), open(place.path, "rb") as file:  # no job has read what we may not read
            head = file.read(_HEAD_BYTES)
            if kind := image_kind(head) or video_kind(head):
                raise ConfigError(f"{place.title}: is an image or a video ({kind}), which would be lost; choose "
                                  "another name")


def _read_names(read: Iterable[Named]) -> dict[Hashable, str]:
    """A file that is read is not written to. A terminal and other devices may be both."""
    taken: dict[Hashable, str] = {}
    for option, name in _with_files_of_folders(read):
        is_standard = name == STANDARD_STREAM
        with contextlib.suppress(OSError):  # the command that reads it says what is wrong
            found = os.fstat(0) if is_standard else os.stat(name)
            if stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                taken[found.st_dev, found.st_ino] = option
        if not is_standard:
            taken[os.path.realpath(name)] = option
    return taken


def _with_files_of_folders(read: Iterable[Named]) -> Iterator[tuple[str, str | Path]]:
    for option, name in read:
        if name is None:
            continue
        folder = Path(name)
        if not folder.is_dir():
            yield option, name
        elif any((folder / config).is_file() for config in ("config.json", _ADAPTER[0])):
            for path in (*files_that_count(folder), *(folder / name for name in _ADAPTER)):
                yield f"{option}'s {path.name}", path


def _kept_names(places: Sequence[Place], others: Mapping[Path, str]) -> dict[Hashable, str]:
    """Names that the places need for themselves, or that others write to, and what each is."""
    kept: dict[Hashable, str] = {}
    for place in places:
        for path, name in ({} if place.path is None else own_files(place.option, place.path)).items():
            kept |= dict.fromkeys(_keys_of_file(path), f"{name} of the {place.option}, which the job makes itself")
    for path, name in others.items():
        kept |= dict.fromkeys(_keys_of_file(path), name)
    if any(not place.is_stream for place in places):
        for number, name in _STANDARD.items():
            with contextlib.suppress(OSError):
                found = os.fstat(number)
                if stat.S_ISREG(found.st_mode):
                    kept[found.st_dev, found.st_ino] = f"file that {name} goes to"
    return kept


def _keys(place: Place) -> list[Hashable]:
    """Two places with one of these in common are one."""
    keys: list[Hashable] = [] if place.identity is None else [place.identity]
    return keys if place.path is None else [*keys, str(place.path)]


def _keys_of_file(path: Path) -> list[Hashable]:
    keys: list[Hashable] = [os.path.realpath(path.parent) + os.sep + path.name]
    with contextlib.suppress(OSError):
        found = os.lstat(path)
        if not stat.S_ISLNK(found.st_mode):
            keys.append((found.st_dev, found.st_ino))
    return keys
