"""A folder that a job writes as a whole: an index, and the version of its pages that the index names.

Each version is a folder of its own. When it is on disk, the index is replaced, and that is the moment in which the new
one takes the place of the old one: killed at any other moment, one of them is there, whole. What a killed process
leaves of a version is removed after the next one. Knows nothing of what is on a page.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from npu_runner.batch.files.durable import clear_file_errors, replacing, sole_writer, sync_files, sync_folder
from npu_runner.batch.files.names import new_version_path
from npu_runner.batch.files.place import Place, own_descriptor, try_to_replace
from npu_runner.errors import ConfigError

INDEX = "index.html"
MARK = b"<!doctype html>\n<!-- npu-runner report"
"""How every index begins, so that one is known from somebody else's."""
_VERSION = re.compile(r"pages-([0-9]{1,9})")


class FolderPlace(Place):
    """Entered while a job runs; it is only tried then."""

    @property
    def index(self) -> Path:
        assert self.path is not None, f"{self.title} is a stream"
        return self.path / INDEX

    def own_files(self) -> dict[Path, str]:
        return {self.index: "index", new_version_path(self.index): "next version of the index"}

    def holds(self, path: Path) -> bool:
        """Whether it lies in this folder."""
        return self.path in path.parents

    def __enter__(self) -> FolderPlace:
        """Raises ConfigError where it cannot be written, or holds what is no report."""
        assert self.path is not None, f"{self.title} is a stream"
        with clear_file_errors(self.title):
            is_there = self.path.exists()
            if is_there:
                self._refuse_foreign()
                try_to_replace(self.title, self.index)
            else:
                with tempfile.TemporaryFile(dir=self.path.parent):
                    pass
        return self

    @contextlib.contextmanager
    def next_version(self) -> Iterator[Version]:
        """A version of pages to be written, which counts from its `index` on. Left before that, it is removed."""
        assert self.path is not None, f"{self.title} is a stream"
        with contextlib.suppress(FileExistsError):
            self.path.mkdir()
            sync_folder(self.path.parent)
        self._refuse_foreign()
        with sole_writer(self.path):  # the first to end would remove the pages of the other
            number = 1 + max((number for number, _ in self._versions()), default=0)
            version = Version(self, f"pages-{number}")
            version.path.mkdir()
            try:
                yield version
            finally:
                if not version.is_current:
                    shutil.rmtree(version.path)

    def remove_versions_but(self, name: str) -> None:
        for _, path in self._versions():
            if path.name != name:
                if path.is_symlink() or not path.is_dir():
                    path.unlink()
                else:
                    shutil.rmtree(path)

    def _versions(self) -> list[tuple[int, Path]]:
        assert self.path is not None, f"{self.title} is a stream"
        found = [(_VERSION.fullmatch(path.name), path) for path in self.path.iterdir()]
        return [(int(match[1]), path) for match, path in found if match]

    def _refuse_foreign(self) -> None:
        """A folder is a report's when its index says so, and may be one when nothing else is in it."""
        assert self.path is not None, f"{self.title} is a stream"
        if not self.path.is_dir():
            raise ConfigError(f"{self.title}: is a file, and this report is a folder of pages; name a folder")
        if _begins_as_ours(self.index):
            return
        ours = {path.name for _, path in self._versions()} | {new_version_path(self.index).name}
        foreign = sorted({path.name for path in self.path.iterdir()} - ours)
        if foreign:
            raise ConfigError(f"{self.title}: is a folder that holds {foreign[0]} and no report; name a new one, an "
                              "empty one, one with a report, or a file")


class Version:
    """The pages of one report, in a folder of their own."""

    def __init__(self, place: FolderPlace, name: str):
        assert place.path is not None, f"{place.title} is a stream"
        self._place = place
        self.name = name
        """As the index says it."""
        self.path = place.path / name
        self.is_current = False

    @contextlib.contextmanager
    def page(self, name: str) -> Iterator[BinaryIO]:
        """A new file."""
        with open(self.path / name, "xb") as file:
            yield file

    @contextlib.contextmanager
    def writing_index(self) -> Iterator[BinaryIO]:
        """The last file: when it is there, this version is the report, and earlier ones are removed."""
        sync_files(self.path)
        with replacing(self._place.index) as file:
            yield file
        self.is_current = True
        self._place.remove_versions_but(self.name)


def find_folder(option: str, name: str | Path, *, reason: str) -> FolderPlace:
    """The folder of that name, or where it will be. `reason`: why it has to be one. Raises ConfigError for what can be
    none."""
    title = f"{option} {name}"
    if own_descriptor(str(name)) is not None:
        raise ConfigError(f"{title}: is a stream, and {reason}; name a folder")
    with clear_file_errors(title):
        try:
            found = os.stat(name)
        except FileNotFoundError:
            found = None
    path = Path(os.path.realpath(name))
    if found is not None and not stat.S_ISDIR(found.st_mode):
        raise ConfigError(f"{title}: is no folder, and {reason}; name a folder")
    if not path.parent.is_dir():
        raise ConfigError(f"{title}: is in no existing folder ({path.parent} does not exist); make it first")
    identity = None if found is None else (found.st_dev, found.st_ino)
    return FolderPlace(option, str(name), path=path, number=None, identity=identity)


def _begins_as_ours(index: Path) -> bool:
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(index, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            return file.read(len(MARK)) == MARK
    return False
