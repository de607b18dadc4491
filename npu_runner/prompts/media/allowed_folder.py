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

# A descriptor of what a name means, a link or a device too, which is not opened.
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
        with self._found(name) as (_, _, status):
            return status.st_size

    def read(self, name: str, max_bytes: int) -> bytes:
        """A regular file, from its beginning to `max_bytes` at most. Raises as `num_bytes` does."""
        with self._found(name) as (parent, last, status):
            _require_regular(status)
            # It may be another file by now, but no link, and in a folder that was reached without one.
            descriptor = os.open(last, _READ, dir_fd=parent)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            _require_regular(status)
            return file.read(min(status.st_size, max_bytes))  # read() takes all the memory it is asked for at once

    @contextlib.contextmanager
    def _found(self, name: str) -> Iterator[tuple[int, str, os.stat_result]]:
        """The folder in which `name` ends, its last component there, and what that is; no link."""
        walk = _Walk(self._root)
        try:
            rest = self._components(name)
            while rest:
                component = rest.pop()
                if component == "..":
                    if not walk.leave():  # back through the folder's own name, or out
                        rest = self._components(os.path.join(os.path.dirname(self._place()), *reversed(rest)))
                        walk.count_link()
                    continue
                target = walk.enter(component, is_last=not rest)
                if target is None:
                    continue
                if target.startswith("/"):
                    walk.return_to_root()
                    rest = self._components(os.path.join(target, *reversed(rest)))
                else:
                    rest += _split(target)
            yield walk.parent, walk.last, walk.status
        finally:
            walk.close()

    def _components(self, name: str) -> list[str]:
        """A name's components below this folder, the last one first."""
        if not name.startswith("/"):
            return _split(name)
        if _is_below(name, self._given):
            return _split(name[len(self._given) :])
        # It may lead here by links that lie elsewhere. What they say now is walked from here all the same.
        place = self._place()
        for path in (name, os.path.realpath(name)):
            if _is_below(path, place):
                return _split(path[len(place) :])
        raise OutsideError(name)

    def _place(self) -> str:
        return os.path.realpath(self._given)


class _Walk:
    """Where one has come to from a folder: a descriptor of each folder on the way."""

    def __init__(self, root: int):
        self._root = root
        self._opened: list[int] = []
        self._names: list[str] = []
        self._num_links = 0

    @property
    def parent(self) -> int:
        return self._opened[-2] if len(self._opened) > 1 else self._root

    @property
    def last(self) -> str:
        return self._names[-1] if self._names else "."

    @property
    def status(self) -> os.stat_result:
        return os.fstat(self._opened[-1] if self._opened else self._root)

    def enter(self, component: str, *, is_last: bool) -> str | None:
        """Go to what has this name; of a link stay, and return where it leads."""
        here = self._opened[-1] if self._opened else self._root
        if not is_last:
            with contextlib.suppress(NotADirectoryError):  # it may be a link
                self._opened.append(os.open(component, _FOLDER, dir_fd=here))
                self._names.append(component)
                return None
        found = os.open(component, _NAMED, dir_fd=here)
        self._opened.append(found)
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            self._names.append(component)
            return None
        self.count_link()
        target = os.readlink("", dir_fd=found)
        os.close(self._opened.pop())
        return target

    def leave(self) -> bool:
        """One up; False: this is the root."""
        if not self._opened:
            return False
        os.close(self._opened.pop())
        self._names.pop()
        return True

    def return_to_root(self) -> None:
        while self.leave():
            pass

    def count_link(self) -> None:
        self._num_links += 1
        if self._num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    def close(self) -> None:
        for descriptor in self._opened:
            os.close(descriptor)


def _is_below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder.rstrip('/')}/")


def _split(path: str) -> list[str]:
    return [component for component in reversed(path.split("/")) if component not in ("", ".")]


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
