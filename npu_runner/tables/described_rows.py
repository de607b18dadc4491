"""The file beside rows that has a line for each document of theirs: OUTPUT.documents.jsonl.

Its first line describes the rows: the reader, the origin of the prompt, and a digest of the rows, by which `--append`
knows that both files belong together. Knows nothing of how documents are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing
from npu_runner.batch.files.place import Place
from npu_runner.errors import ConfigError
from npu_runner.prompts.media.document_files import document_version
from npu_runner.tables.document_pages import OpenedDocument, open_file
from npu_runner.tables.sources import Source

_ANEW = "make all rows anew, without --append (read: into another folder)"
_MOST_BYTES = 1 << 62


def documents_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.documents.jsonl")


@dataclass(frozen=True, kw_only=True)
class Head:
    """The first line. `settings`: a digest of all that decides the bytes of a document's rows."""

    reader: str | None
    parser: str | None
    """The parser of the reader's answers."""
    prompt: dict[str, str | None] | None
    """Its package, version and sha256; None: a template makes it."""
    settings: str
    root: str | None = None
    """The folder at which the paths in rows begin."""
    rows_bytes: int = _MOST_BYTES
    rows_digest: str = "0" * 32

    def to_line(self) -> bytes:
        """It has one length for any number of bytes, so that it can be written last."""
        text = json.dumps(asdict(self), ensure_ascii=False)
        return f"{text}{' ' * (len(str(_MOST_BYTES)) - len(str(self.rows_bytes)))}\n".encode()


class _EarlierRows:
    """Rows and documents to which new ones are added. Raises ConfigError where they do not belong together, or were
    made by other settings."""

    def __init__(self, output: Path, settings: str):
        self._output, path = output, documents_path(output)
        with clear_file_errors(f"rows {output}"):
            if not path.is_file() or not output.is_file():
                raise ConfigError(f"rows {str(output)!r}: there is no {path.name} beside them, which names their "
                                  f"documents; {_ANEW}")
            head, *self.lines = path.read_bytes().splitlines(keepends=True)
        described = _object_in(head, path)
        self._num_bytes = described.get("rows_bytes", 0)
        self.root = described.get("root")
        self.documents = {fields["path"]: fields for fields in (_object_in(line, path) for line in self.lines)}
        digest = hashlib.blake2b(digest_size=16)
        for line in self.rows():
            digest.update(line)
        if described.get("rows_digest") != digest.hexdigest():
            raise ConfigError(f"rows {str(output)!r}: are not those that {path.name} describes; {_ANEW}")
        if described.get("settings") != settings:
            raise ConfigError(f"rows {str(output)!r}: were made with another reader, prompt or option (reader: "
                              f"{described.get('reader')}); give the same ones, or {_ANEW}")

    def rows(self) -> Iterator[bytes]:
        """The lines of the rows. Lines behind them are those of a command that was killed: they are made again."""
        with clear_file_errors(f"rows {self._output}"), self._output.open("rb") as file:
            left = self._num_bytes
            while left > 0 and (line := file.readline()):
                left -= len(line)
                yield line


class DescribedRows:
    """Rows, and the file of their documents. Both are replaced, or neither is."""

    def __init__(self, output: Path | None, head: Head, *, is_appended: bool, is_needed: bool):
        """`output` None: a stream, whose documents no file describes. `is_needed`: the file is written without
        documents, too. Raises ConfigError where rows that are there cannot be continued."""
        self._is_needed = is_needed
        self._path = None if output is None else documents_path(output)
        self._head = head
        self._earlier = _EarlierRows(output, head.settings) if is_appended and output is not None else None
        self._lines: BinaryIO | None = None
        self._seen: set[str] = set()
        self.num_documents = self.num_unread_pages = 0
        """Documents that were added, and their pages that --pages leaves out."""
        self.errors = {} if self._earlier is None else {
            name: fields["error"]["code"] for name, fields in self._earlier.documents.items() if fields["error"]}
        """The codes of documents that do not open."""

    def unread_line(self) -> str:
        """The pages that --pages leaves out, in words; empty where there are none."""
        count = self.num_unread_pages
        return f"{count} page{'s' if count != 1 else ''} that --pages does not name" if count else ""

    def earlier_rows(self) -> Iterator[bytes]:
        return iter(()) if self._earlier is None else self._earlier.rows()

    @property
    def gone(self) -> list[str]:
        """The documents of earlier rows that are not there any more."""
        return [] if self._earlier is None else [name for name in self._earlier.documents if name not in self._seen]

    def has(self, source: Source, name: str) -> bool:
        """Whether earlier rows have this document. Raises ConfigError where it has changed since."""
        known = None if self._earlier is None else self._earlier.documents.get(name)
        if known is None:
            return False
        self._seen.add(name)
        with clear_file_errors(f"source {name!r}"), open_file(source.path) as file:
            if known["version"] is not None and known["version"] != document_version(file):
                raise ConfigError(f"document {name!r}: has changed since its rows were made, which are kept; put the "
                                  f"earlier version back, give the new one another name, or {_ANEW}")
        return True

    def refuse_other_folder(self, *, has_earlier_images: bool) -> None:
        """Raises ConfigError where the sources have another root, and no document or image of earlier rows."""
        if self._earlier is None or has_earlier_images or self._seen or self._earlier.root == self._head.root:
            return
        raise ConfigError(f"rows: none of their documents and images is below {self._head.root}; those of the first "
                          f"command were below {self._earlier.root}; name that folder, or {_ANEW}")

    def add(self, name: str, found: OpenedDocument, num_pages: int) -> None:
        """A line for a document of which `num_pages` rows are made."""
        self.num_documents += 1
        self.num_unread_pages += found.num_pages - num_pages
        code, message = found.error or (None, None)
        if code is not None:
            self.errors[name] = code
        if self._lines is not None:
            fields = {"path": name, "bytes": found.num_bytes, "pages": found.num_pages if code is None else None,
                      "encrypted": found.is_encrypted,
                      "error": None if code is None else {"code": code, "message": message}, "version": found.version}
            self._lines.write(json.dumps(fields, ensure_ascii=False).encode() + b"\n")

    @contextlib.contextmanager
    def writing(self, place: Place) -> Iterator[DigestedFile]:
        """The file of rows. The rows are replaced first: `--append` recognises rows that no file describes yet."""
        if self._path is None:
            with place.writing() as file:
                yield DigestedFile(file)
            return
        with contextlib.suppress(_NoDocuments), late_file_errors(f"documents {self._path}"), replacing(
                self._path) as self._lines:
            self._lines.write(self._head.to_line())
            self._lines.writelines([] if self._earlier is None else self._earlier.lines)
            with place.writing() as file:
                yield (rows := DigestedFile(file))
                self._lines.flush()
            if not (self.num_documents or self._is_needed or self._earlier is not None):
                self._remove_stale(self._path)
                raise _NoDocuments
            self._lines.seek(0)
            self._lines.write(replace(self._head, rows_bytes=rows.num_bytes,
                                      rows_digest=rows.digest.hexdigest()).to_line())

    @staticmethod
    def _remove_stale(path: Path) -> None:
        """It describes the rows that were replaced."""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
            if b'"rows_digest": "' in file.readline():
                os.unlink(path)


class DigestedFile:
    """A file that counts and digests the rows written to it."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self.num_bytes = 0
        self.digest = hashlib.blake2b(digest_size=16)

    def write(self, line: bytes) -> None:
        self._file.write(line)
        self.num_bytes += len(line)
        self.digest.update(line)


class _NoDocuments(Exception):
    """No file is written, since the rows have no documents."""


def _object_in(line: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{str(path)!r}: has a line that is no JSON ({error}); {_ANEW}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{str(path)!r}: has a line that is no object; {_ANEW}")
    return value
