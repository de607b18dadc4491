"""Refuses a place that is something else already: what is read, what another place is, what a job keeps for itself.

Two names are the same by path or by inode. Knows nothing of what is written.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path

from npu_runner.batch.files.input_file import STANDARD_STREAM
from npu_runner.batch.files.names import own_files
from npu_runner.batch.files.place import Place
from npu_runner.errors import ConfigError

_STANDARD = {1: "standard output", 2: "standard error"}


def refuse_taken(places: Sequence[Place], read: Iterable[tuple[str, str | Path | None]],
                 others: Mapping[Path, str]) -> None:
    """Raises ConfigError for a place that stands for two.

    `read`: options, and what is read for each; None: nothing is. `others`: files that are not to be written to, and
    what each is.
    """
    _refuse_two_on_standard_output(places)
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


def _read_names(read: Iterable[tuple[str, str | Path | None]]) -> dict[Hashable, str]:
    """What is read is not written to. A terminal and other devices may be both."""
    taken: dict[Hashable, str] = {}
    for option, name in read:
        if name is None:
            continue
        is_standard = name == STANDARD_STREAM
        with contextlib.suppress(OSError):  # whoever reads it says what is wrong
            found = os.fstat(0) if is_standard else os.stat(name)
            if stat.S_ISREG(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                taken[found.st_dev, found.st_ino] = option
        if not is_standard:
            taken[os.path.realpath(name)] = option
    return taken


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
