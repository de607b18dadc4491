"""The Markdown files of documents below one folder: each is whole or not there, and none lies outside.

A document's name comes from rows, so its folders are opened one after another, and no link is followed. Knows nothing
of pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from npu_runner.batch.files.durable import clear_file_errors, folder_below, late_file_errors, replacing
from npu_runner.errors import ConfigError

_ENDING = ".md"
_MOST_NAME_BYTES = 240
"""A file system has names of 255 bytes, and a new version has a longer name."""


class DocumentNames:
    """The documents of rows, in their order. It holds a digest of each."""

    def __init__(self) -> None:
        self._last: str | None = None
        self._num_rows = 0
        self._digests: set[int] = set()

    def add(self, name: str) -> None:
        """Add the document of the next row. Raises ConfigError for a name that cannot be a file below a folder, and
        where the pages of a document do not stand together."""
        self._num_rows += 1
        if name == self._last:
            return
        self._last = name
        _path_of(name)
        if not _add(self._digests, name):
            raise ConfigError(f"rows: row {self._num_rows} is a page of a document whose other pages stand further up; "
                              "bring the rows of each document together")


class MarkdownFolder:
    """`folder` is made where its parent is there. `read`: files that are never replaced."""

    def __init__(self, folder: Path, read: Iterable[str | Path | None]):
        self._folder = folder
        self._used: set[int] = set()
        """Digests of the files so far, without case: names that differ in it alone are one file on some systems."""
        self._read: set[tuple[int, int]] = set()
        for path in (each for each in read if each is not None):
            with contextlib.suppress(OSError):  # who reads it says what is wrong
                self._read.add(_inode(os.stat(path)))
        with clear_file_errors(f"markdown {folder}"):
            folder.mkdir(exist_ok=True)

    @contextlib.contextmanager
    def writing(self, document: str) -> Iterator[BinaryIO]:
        """The new version of the next document's file. Raises ConfigError where it would lie behind a link, or in place
        of another file."""
        title = f"markdown of {document!r}"
        *folders, last = self._place(document).split("/")
        with contextlib.ExitStack() as entered:
            with clear_file_errors(title):
                parent = entered.enter_context(folder_below(self._folder, folders))
                with contextlib.suppress(FileNotFoundError):
                    found = os.stat(last, dir_fd=parent, follow_symlinks=False)
                    if _inode(found) in self._read:
                        raise ConfigError(f"{title}: would replace {last!r}, which this command reads; name another "
                                          "folder")
            # By the open folder, since its name may be replaced by now.
            with late_file_errors(title, was_tried=False), replacing(Path(f"/proc/self/fd/{parent}", last)) as file:
                yield file

    def _place(self, document: str) -> str:
        # A folder may have the name of a file that was written or will be: a.pdf beside a.pdf.md/b.png.
        folder, slash, name = re.sub(r"\.md/", "~md/", _path_of(document), flags=re.I).rpartition("/")
        path = folder + slash + name
        data = os.fsencode(name)
        if len(data) <= _MOST_NAME_BYTES and _add(self._used, _folded(path)):
            return path + _ENDING
        most = _MOST_NAME_BYTES - len("~") - 16
        kept = data[:most].decode("utf-8", "ignore") if len(data) > most else name
        found = f"{folder}{slash}{kept}~{_number(document):016x}"
        if not _add(self._used, _folded(found)):
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


def _add(digests: set[int], text: str) -> bool:
    """Whether the text's digest was none of these."""
    number, before = _number(text), len(digests)
    digests.add(number)
    return len(digests) > before
