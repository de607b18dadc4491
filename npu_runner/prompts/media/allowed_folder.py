"""Opens files below one folder and nothing else, even while another process replaces folders and links there.

A name is walked component by component from the folder's descriptor, and the system follows no link: each is read and
walked here. A check of the whole path before it is opened would be a guess by then. Knows nothing of what files hold.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

# A descriptor of the named object, which is not opened: a link or a device, too.
_NAMED = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
# The same of a folder only: with it the system mounts what is mounted on demand.
_FOLDER = _NAMED | os.O_DIRECTORY
# Not blocking: a pipe without a writer must not hang a worker.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
# As many as Linux follows.
_MAX_LINKS = 40


class OutsideError(Exception):
    """A name leads out of the folder."""


class AllowedFolder:
    """A folder, open as long as this context lasts. Raises NotADirectoryError or FileNotFoundError where it is none."""

    def __init__(self, folder: Path | str):
        self._given = os.path.abspath(folder)
        self._root = os.open(folder, _FOLDER & ~os.O_NOFOLLOW)

    def __enter__(self) -> AllowedFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    def num_bytes(self, name: str) -> int:
        """The size of a file. Raises OutsideError, or OSError as the system does."""
        with self._opened(name) as (_, _, status):
            return status.st_size

    def read(self, name: str, max_bytes: int) -> bytes:
        """A regular file, from its beginning to `max_bytes` at most. Raises as `num_bytes` does."""
        with self.open(name) as file:
            # read() allocates the whole size at once
            return file.read(min(os.fstat(file.fileno()).st_size, max_bytes))

    def open(self, name: str) -> BinaryIO:
        """A regular file. Raises as `num_bytes` does."""
        with self._opened(name) as (parent, last, status):
            _require_regular(status)
            # It may be another file by now, but no link, and in a folder that was reached without one.
            file = os.fdopen(os.open(last, _READ, dir_fd=parent), "rb")
        try:
            _require_regular(os.fstat(file.fileno()))
        except OSError:
            file.close()
            raise
        return file

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, str, os.stat_result]]:
        """The folder in which `name` ends, its last component there, and the status of that; no link."""
        way = [(self._root, ".")]  # a descriptor of each folder on the way, and its name
        num_links = 0
        target: str | None
        try:
            rest = self._components(name)
            while rest:
                component = rest.pop()
                if component == "..":
                    if len(way) > 1:
                        os.close(way.pop()[0])
                        continue
                    target = os.path.dirname(self._place())  # back through the folder's own name, or out
                else:
                    descriptor, target = _enter(component, way[-1][0], is_last=not rest)
                    if target is None:
                        way.append((descriptor, component))
                        continue
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                if target.startswith("/"):
                    while len(way) > 1:
                        os.close(way.pop()[0])
                    rest = self._components(os.path.join(target, *reversed(rest)))
                else:
                    rest += _split(target)
            yield way[-2:][0][0], way[-1][1], os.fstat(way[-1][0])
        finally:
            for descriptor, _ in way[1:]:
                os.close(descriptor)

    def _components(self, name: str) -> list[str]:
        """A name's components below this folder, the last one first."""
        if not name.startswith("/"):
            return _split(name)
        if _is_below(name, self._given):
            return _split(name[len(self._given) :])
        # It may lead here through links elsewhere. The path behind them is walked from here all the same.
        place = self._place()
        for path in (name, os.path.realpath(name)):
            if _is_below(path, place):
                return _split(path[len(place) :])
        raise OutsideError(name)

    def _place(self) -> str:
        return os.path.realpath(self._given)


def _enter(component: str, folder: int, *, is_last: bool) -> tuple[int, str | None]:
    """A descriptor of `component` in `folder`, and None; of a link a closed one, and the link's target."""
    if not is_last:
        with contextlib.suppress(NotADirectoryError):  # it may be a link
            return os.open(component, _FOLDER, dir_fd=folder), None
    descriptor = os.open(component, _NAMED, dir_fd=folder)
    if not stat.S_ISLNK(os.fstat(descriptor).st_mode):
        return descriptor, None
    try:
        return descriptor, os.readlink("", dir_fd=descriptor)
    finally:
        os.close(descriptor)


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _split(path: str) -> list[str]:
    return [component for component in reversed(path.split("/")) if component not in ("", ".")]


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
