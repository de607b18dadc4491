"""Rows, and the file beside them that has a line for each document of theirs: OUTPUT.documents.jsonl.

Its first line describes the rows: the reader, the origin of the prompt, and a digest of all settings. Rows are replaced
before it, so a killed command leaves rows of documents without a line. `--append` opens such documents again, and finds
their rows there. Knows nothing of how documents are opened.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.place import Named, Place
from npu_runner.batch.rows.openai_format import read_json
from npu_runner.errors import ConfigError, RequestError
from npu_runner.prompts.media.document_files import document_version
from npu_runner.tables.document_pages import OpenedDocument, PageRanges, is_tiff, open_file
from npu_runner.tables.page_answers import PageRow, images_of
from npu_runner.tables.places import find_outputs
from npu_runner.tables.sources import Source

_ANEW = "make all rows anew, without --append (read: --overwrite, or another folder)"


def documents_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.documents.jsonl")


def find_place(output: str, read: Sequence[Named]) -> Place:
    """The place of rows. Raises ConfigError where it, or that of their documents, is something else already."""
    (place,) = find_outputs([("rows", output)], read)
    if place.path is not None:
        find_outputs([("documents", documents_path(place.path))], read)
    return place


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first line. `settings`: a digest of all that decides the bytes of a document's rows; None: no row is ever
    added."""

    reader: str | None
    parser: str | None
    """The parser of the reader's answers."""
    prompt: dict[str, str | None] | None
    """Its package, version and sha256; None: a template makes it."""
    settings: str | None
    root: str | None = None
    """The folder at which the paths in rows begin."""


class DescribedRows:
    """Rows, and the file of their documents."""

    def __init__(self, output: Path | None, head: Head, *, appended: PageRanges | None = None, is_needed: bool = False):
        """`output` None: a stream, whose documents no file describes. `appended`: the pages of each document that rows
        which are there have, and are kept; None: rows are made anew. `is_needed`: the file is written without
        documents, too. Raises ConfigError where rows that are there cannot be continued."""
        self._rows, self._path = output, None if output is None else documents_path(output)
        self._head, self._root = head, head.root
        self._is_needed, self._is_appended = is_needed, appended is not None
        self._earlier: dict[str, dict[str, Any]] = {}
        """The lines of documents of rows that are there, by name."""
        self._num_rows: dict[str, int] = {}
        """The numbers of their rows."""
        self._images: dict[str, str] = {}
        """The versions of images of rows that are there, as far as rows have them, by name."""
        self._tiffs: set[str] = set()
        """The names of those that may have pages now."""
        self._seen: set[str] = set()
        self._entered = contextlib.ExitStack()
        self._lines: BinaryIO | None = None
        self.num_documents = self.num_unread_pages = 0
        """Documents that were added, and their pages that --pages leaves out."""
        self.errors: dict[str, str] = {}
        """The codes of documents that do not open."""
        if appended is not None and self._path is not None:
            self._read_earlier(self._path, appended)

    def _read_earlier(self, path: Path, ranges: PageRanges) -> None:
        with clear_file_errors(f"rows {self._rows}"):
            if not path.is_file() or not (self._rows and self._rows.is_file()):
                raise ConfigError(f"rows {str(self._rows)!r}: there is no {path.name} beside them, which names their "
                                  f"documents; {_ANEW}")
            lines = path.read_bytes().splitlines()
        try:
            head, *documents = map(json.loads, lines)
            self._root, reader, settings = head["root"], head["reader"], head["settings"]
            for each in documents:
                name, error = each["path"], each["error"]
                self._earlier[name], self._num_rows[name] = each, 1 if error else len(ranges.numbers(each["pages"]))
                self.errors |= {name: error["code"]} if error else {}
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{str(path)!r}: describes no rows and their documents ({error}); {_ANEW}") from error
        if settings != self._head.settings:
            raise ConfigError(f"rows {str(self._rows)!r}: were made with another reader, prompt or option (reader: "
                              f"{reader}); give the same ones, or {_ANEW}")

    def earlier_rows(self) -> Iterator[tuple[str, bytes]]:
        """The custom_ids and lines of rows that are there. Raises ConfigError where some of a document are not."""
        missing = dict(self._num_rows)
        with contextlib.ExitStack() as entered:
            entered.enter_context(clear_file_errors(f"rows {self._rows}"))
            lines = entered.enter_context(self._rows.open("rb")) if self._is_appended and self._rows else ()
            for number, line in enumerate(lines, 1):
                try:
                    request = read_json(line)
                except RequestError as error:
                    raise ConfigError(f"rows {str(self._rows)!r}, line {number}: {error.message}; {_ANEW}") from error
                if (name := PageRow.from_request(request).document) in missing:
                    missing[name] -= 1
                else:
                    self._record_image(name, request)
                yield str(request.get("custom_id")), line
        if lacking := next((each for each, count in missing.items() if count), None):
            made = self._num_rows[lacking]
            raise ConfigError(f"rows {str(self._rows)!r}: have {made - missing[lacking]} of the {made} rows of "
                              f"{lacking!r}; put the file back, or {_ANEW}")

    def _record_image(self, name: str, request: Mapping[str, Any]) -> None:
        if is_tiff(name) and request.get("custom_id") == name:
            self._tiffs.add(name)
        if (version := next(images_of(request), {}).get("version")) is not None:
            self._images[name] = version

    def unread_line(self) -> str:
        """The pages that --pages leaves out, in words; empty where there are none."""
        count = self.num_unread_pages
        return f"{count} page{'s' if count != 1 else ''} that --pages does not name" if count else ""

    @property
    def gone(self) -> list[str]:
        """The documents and images of earlier rows that are not there any more."""
        return [name for names in (self._earlier, self._images) for name in names if name not in self._seen]

    def has(self, source: Source, name: str) -> bool:
        """Whether earlier rows have this document; images are found by their rows. Raises ConfigError where the file
        has changed since."""
        known = self._earlier.get(name)
        version = self._images.get(name) if known is None else known["version"]
        if known is None and version is None:
            return False
        self._seen.add(name)
        with clear_file_errors(f"source {name!r}"), open_file(source.path) as file:
            if version is not None and version != document_version(file):
                raise self._changed(name)
        return known is not None

    def refuse_grown_image(self, name: str) -> None:
        """Raises ConfigError where earlier rows have this document of several pages as one image."""
        if name in self._tiffs:
            raise self._changed(name)

    def _changed(self, name: str) -> ConfigError:
        return ConfigError(f"document {name!r}: has changed since its rows were made, which are kept; put the earlier "
                           f"version back, give the new one another name, or {_ANEW}")

    def refuse_other_folder(self, *, has_earlier_images: bool) -> None:
        """Raises ConfigError where the sources have another root, and no document or image of earlier rows."""
        if self._root != self._head.root and not (has_earlier_images or self._seen):
            raise ConfigError(f"rows: none of their documents and images is below {self._head.root}; those of the "
                              f"first command were below {self._root}; name that folder, or {_ANEW}")

    def add(self, name: str, found: OpenedDocument, num_pages: int) -> None:
        """A line for a document of which `num_pages` rows are made."""
        self.num_documents += 1
        self.num_unread_pages += found.num_pages - num_pages
        code, message = found.error or (None, None)
        if code is not None:
            self.errors[name] = code
        self._write({"path": name, "bytes": found.num_bytes, "pages": found.num_pages if code is None else None,
                     "encrypted": found.is_encrypted,
                     "error": None if code is None else {"code": code, "message": message}, "version": found.version})

    @contextlib.contextmanager
    def writing(self, place: Place) -> Iterator[BinaryIO]:
        """The file of rows. The file of their documents is put in place after it, if there are documents."""
        with self._entered:
            if self._is_needed or self._is_appended:
                self._write()
            with place.writing() as file:
                yield file
                if self._path is not None and not self._is_appended:
                    self._path.unlink(missing_ok=True)  # it describes the rows that are replaced now

    def _write(self, *documents: dict[str, Any]) -> None:
        if self._path is None:
            return
        if self._lines is None:
            self._entered.enter_context(late_file_errors(f"documents {self._path}"))
            self._lines = self._entered.enter_context(replacing(self._path))
            documents = (asdict(self._head), *self._earlier.values(), *documents)
        self._lines.writelines(json.dumps(each, ensure_ascii=False).encode() + b"\n" for each in documents)
