"""The Markdown files of documents below one folder: each is whole or not there, and none lies outside.

A document's name comes from rows, so it is walked by descriptors, and no link is followed. Knows nothing of pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.errors import ConfigError

_ENDING = ".md"
_MOST_NAME_BYTES = 240
"""A file system has names of 255 bytes, and a new version has a longer name."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class DocumentNames:
    """The documents of rows, in their order. It has a few bytes of each, however many there are."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._num_rows = 0
        # D documents: digests of their names, of their names without case, and the first row of each
        self._names, self._folded, self._rows = array("Q"), array("Q"), array("Q")

    def add(self, name: str) -> None:
        """Add the document of the next row. Raises ConfigError for a name that cannot be a file below a folder."""
        self._num_rows += 1
        if name == self._last:
            return
        self._last = name
        path = _path_of(name)
        self._names.append(_number(name))
        self._folded.append(_number(_folded(path)))
        self._rows.append(self._num_rows)

    def are_alike(self) -> np.ndarray:
        """Whether each document has a name that differs from an earlier one in case or in Unicode's forms alone. Raises
        ConfigError where the pages of a document do not stand together."""
        names_D = np.array(self._names, dtype=np.uint64)
        order = np.argsort(names_D, kind="stable")
        (again,) = np.nonzero(names_D[order][1:] == names_D[order][:-1])
        if again.size:
            row = self._rows[int(order[again[0] + 1])]
            raise ConfigError(f"rows: row {row} is a page of a document whose other pages stand further up; bring the "
                              "rows of each document together")
        first = np.unique(np.array(self._folded, dtype=np.uint64), return_index=True)[1]
        is_first = np.zeros(len(names_D), dtype=bool)
        is_first[first] = True
        return ~is_first

    def folded(self) -> np.ndarray:
        """Digests of all names without case, in order."""
        return np.sort(np.array(self._folded, dtype=np.uint64))


class MarkdownFolder:
    """`folder` is made where its parent is there. `read`: files that are never replaced."""

    def __init__(self, folder: Path, names: DocumentNames, read: Iterable[str | Path | None]):
        self._are_alike, self._folded_D = names.are_alike(), names.folded()
        self._num_documents = 0
        self._read: set[tuple[int, int]] = set()
        for path in (each for each in read if each is not None):
            with contextlib.suppress(OSError):  # who reads it says what is wrong
                self._read.add(_inode(os.stat(path)))
        with clear_file_errors(f"markdown {folder}"):
            folder.mkdir(exist_ok=True)
            self._root = os.open(folder, _FOLDER)

    def __enter__(self) -> MarkdownFolder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._root)

    @contextlib.contextmanager
    def writing(self, document: str) -> Iterator[BinaryIO]:
        """The new version of a document's file, in the order in which the names were added. Raises ConfigError where it
        would lie behind a link, or in place of another file."""
        title = f"markdown of {document!r}"
        *folders, last = self._place(document).split("/")
        with contextlib.ExitStack() as entered:
            with clear_file_errors(title):
                parent = os.open(".", _FOLDER, dir_fd=self._root)
                entered.callback(os.close, parent)
                for name in folders:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=parent)
                    # A link in place of a folder is an error.
                    parent = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
                    entered.callback(os.close, parent)
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(last, dir_fd=parent, follow_symlinks=False)
                    if _inode(found) in self._read:
                        raise ConfigError(f"{title}: would replace {last!r}, which this command reads; name another "
                                          "folder")
            # By the open folder, since its name may be replaced by now.
            with late_file_errors(title, was_tried=False), replacing(Path(f"/proc/self/fd/{parent}", last)) as file:
                yield file

    def _place(self, document: str) -> str:
        path = _path_of(document)
        is_alike = bool(self._are_alike[self._num_documents])
        self._num_documents += 1
        folder, slash, name = path.rpartition("/")
        data = os.fsencode(name)
        if not is_alike and len(data) <= _MOST_NAME_BYTES:
            return path + _ENDING
        most = _MOST_NAME_BYTES - len("~") - 16
        kept = data[:most].decode("utf-8", "ignore") if len(data) > most else name
        found = f"{folder}{slash}{kept}~{_number(document):016x}"
        number = np.uint64(_number(_folded(found)))
        if number in self._folded_D[np.searchsorted(self._folded_D, number):][:1]:
            raise ConfigError(f"markdown of {document!r}: would be {found + _ENDING!r}, which is the file of another "
                              "document; rename one of them")
        return found + _ENDING


def _path_of(name: str) -> str:
    """The name without empty components."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    with contextlib.suppress(UnicodeEncodeError):
        os.fsencode(name)
        if parts and ".." not in parts and "\0" not in name:
            return "/".join(parts)
    raise ConfigError(f"document {name!r}: its Markdown would lie outside of the folder, or have no name; rename it")


def _inode(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _folded(path: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", path).casefold())


def _number(text: str) -> int:
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
