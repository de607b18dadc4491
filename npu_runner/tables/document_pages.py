"""The documents among the sources. Worker processes open them and count their pages, so that a broken one is a failed
row and neither a crash nor a command that hangs.

Knows nothing of rows. No page is loaded.
"""

from __future__ import annotations

import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import BinaryIO

from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.document_files import Document, document_version, open_document
from npu_runner.prompts.media.file_kinds import HEAD_BYTES, image_kind
from npu_runner.prompts.media.page_options import PageOptions
from npu_runner.prompts.media.pdf_passwords import password_of
from npu_runner.readers.reader import PageFields
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool
from npu_runner.tables.sources import DOCUMENT, IMAGE, Source

_RANGE = re.compile(r"(r?)([1-9][0-9]{0,8})(?:-(r?)([1-9][0-9]{0,8}))?", re.ASCII)
# Files that wait in order. One slow document keeps the workers busy with those behind it.
_NUM_AHEAD = 256
_TIFF = (".tif", ".tiff")
_PATIENCE_SECONDS = 1.0


@dataclass(frozen=True)
class PageRanges:
    """The pages of each document of which rows are made. `ranges`: (first, last), counted from the end where negative;
    empty: all."""

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, text: str | None) -> PageRanges:
        """Reads `1-5,r3-r1`, where r1 is the last page. Raises ConfigError for any other text."""
        found = []
        for part in [] if text is None else text.split(","):
            match = _RANGE.fullmatch(part.strip())
            if match is None:
                raise ConfigError(f"pages: {part.strip()!r} is no range of pages; write 3, 1-5 or r3-r1, where r1 is "
                                  "the last page, with commas between them")
            mark, first, last_mark, last = match.groups()
            start = -int(first) if mark else int(first)
            end = start if last is None else -int(last) if last_mark else int(last)
            if start > end and (start < 0) == (end < 0):
                raise ConfigError(f"pages: {part.strip()!r} ends before it begins; write the earlier page first, as in "
                                  "1-5 or r3-r1")
            found.append((start, end))
        return cls(tuple(found))

    def numbers(self, num_pages: int) -> Sequence[int]:
        """The chosen pages of a document, from 1 on, in order."""
        if not self.ranges:
            return range(1, num_pages + 1)
        ends = [[end if end > 0 else num_pages + 1 + end for end in pair] for pair in self.ranges]
        return sorted(set().union(*(range(max(1, low), min(high, num_pages) + 1) for low, high in ends)))


@dataclass(frozen=True, kw_only=True)
class OpenedDocument:
    """The facts of a document. One that does not open has an `error`, a code and a message, and counts as a page."""

    num_bytes: int = 0
    version: str | None = None
    num_pages: int = 1
    is_encrypted: bool = False
    error: tuple[str, str] | None = None
    sizes: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """The pixels of the chosen pages, where a reader's grid makes them."""


@dataclass(frozen=True, kw_only=True)
class DocumentOpener:
    """Opens one document: (number, path, address in rows). Runs in a worker process; picklable."""

    ranges: PageRanges = PageRanges()
    page: PageFields = field(default_factory=PageFields)
    passwords: Mapping[str, str] = field(default_factory=dict)
    """By the address in rows."""

    def __call__(self, task: tuple[int, str, str]) -> OpenedDocument:
        _, path, address = task
        found = OpenedDocument()
        try:
            with open_file(path) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode):
                    raise RequestError("it is no regular file", "media_missing")
                found = replace(found, num_bytes=status.st_size, version=document_version(file))
                with open_document(file, password=password_of(self.passwords, address, None),
                                   name=path) as document:
                    return replace(found, num_pages=document.num_pages, is_encrypted=document.is_encrypted,
                                   sizes=self._sizes(document))
        except RequestError as error:
            return replace(found, error=(str(error.code), error.message), is_encrypted=error.code == "pdf_password")
        except OSError as error:
            return replace(found, error=("media_missing", error.strerror or str(error)))

    def _sizes(self, document: Document) -> dict[int, tuple[int, int]]:
        page = self.page
        if page.grid is None:
            return {}
        options = PageOptions(dpi=page.dpi, longest=page.longest, shortest=page.shortest)
        return {number: page.grid.size(*document.size(number - 1, options))
                for number in self.ranges.numbers(document.num_pages)}


def open_file(path: str) -> BinaryIO:
    """The file, or a pipe, whose writer is not waited for."""
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def image_version(path: str) -> str | None:
    """`document_version` of an image; None of a file that is none by its first bytes, which may be mended later, and of
    one that cannot be read."""
    try:
        with open_file(path) as file:
            is_image = stat.S_ISREG(os.fstat(file.fileno()).st_mode) and image_kind(file.read(HEAD_BYTES)) is not None
            return document_version(file) if is_image else None
    except OSError:
        return None


class Documents:
    """Opens the documents of the sources ahead of their use, in the order of the sources."""

    def __init__(self, opener: DocumentOpener, limits: PoolLimits, is_known: Callable[[Source, str], bool],
                 address: Callable[[str], str]):
        """`is_known`: the rows have this document already, which is left out. `address` of a path in rows."""
        self._opener, self._limits, self._is_known, self._address = opener, limits, is_known, address

    def pages_of(self, document: OpenedDocument) -> Sequence[int]:
        """The pages of which there are rows. A document that does not open has one row, which fails by name."""
        return (1,) if document.error is not None else self._opener.ranges.numbers(document.num_pages)

    def opened(self, sources: Iterable[tuple[Source, str]]) -> Iterator[tuple[Source, str, OpenedDocument | None]]:
        """Each source with its name and, where it is a document, the facts of it. An image, and a TIFF of one page,
        has None."""
        results: dict[int, OpenedDocument] = {}
        waiting: deque[tuple[int, Source, str]] = deque()
        with WorkerPool(self._opener, self._limits) as pool:
            for number, (source, name) in enumerate(sources):
                if self._is_known(source, name):
                    continue
                if source.kind == DOCUMENT and find_spec("pypdfium2") is None:
                    raise ConfigError(f"source {name!r}: is a PDF, and pypdfium2 is not installed here; pip install "
                                      "'pypdfium2>=5.15'")
                if _may_have_pages(source):
                    pool.submit((number, source.path, self._address(source.path)))
                waiting.append((number, source, name))
                if len(waiting) > _NUM_AHEAD:
                    yield self._first(waiting, pool, results)
            while waiting:
                yield self._first(waiting, pool, results)

    def _first(self, waiting: deque[tuple[int, Source, str]], pool: WorkerPool[tuple[int, str, str]],
               results: dict[int, OpenedDocument]) -> tuple[Source, str, OpenedDocument | None]:
        number, source, name = waiting.popleft()
        if not _may_have_pages(source):
            return source, name, None
        while number not in results:
            if (item := pool.get(_PATIENCE_SECONDS)) is not None:
                failed = item.result if isinstance(item.result, WorkerFailure) else None
                results[item.task[0]] = item.result if failed is None else OpenedDocument(
                    error=(str(failed.code), failed.message))
        found = results.pop(number)
        # A broken TIFF is an image of one page, which fails when it is served.
        is_image = source.kind == IMAGE and (found.num_pages == 1 or found.error is not None)
        return source, name, None if is_image else found


def _may_have_pages(source: Source) -> bool:
    return source.kind == DOCUMENT or (source.kind == IMAGE and is_tiff(source.path))


def is_tiff(path: str) -> bool:
    """By the suffix."""
    return path.lower().endswith(_TIFF)
