"""Reads an output and the error file behind it: each row once, by one law for everybody who looks at answers.

A row with an `error`, or with a status code other than 200, is a failure. Of several whole lines with one key the first
counts, but a whole answer counts more than one with a flaw, and any answer more than a failure. A line that is cut off
or is no result row never counts. Knows nothing of the text of an answer.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import os
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from npu_runner.batch.files.durable import clear_file_errors, replacing, sync_folder
from npu_runner.batch.files.row_book import keys_array
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.flaws import flaws_of
from npu_runner.batch.rows.openai_response import FAULTS, error_of, key_of_answer
from npu_runner.batch.rows.shape import parse_json
from npu_runner.errors import ConfigError, JobError, OutputLostError

if TYPE_CHECKING:
    from typing_extensions import Self  # of typing from Python 3.11 on

Answer = dict[str, Any]
_NO_CODE = "unknown"


class Line(NamedTuple):
    """A line of one of the files."""

    file: int
    start: int
    number: int = 0
    """From 1; 0 where it is not kept."""


def lines_that_count(keys: np.ndarray, flaws: np.ndarray) -> np.ndarray:
    """The law: the places of the lines that count, in order. Of each key this is the first of its whole answers, else
    the first of its answers, else its first failure."""
    if not has_twins(keys):
        return np.arange(len(keys))
    rank = np.where(have_any(flaws, Flaw.ERRORS), 2, flaws != 0)
    order = np.lexsort((np.arange(len(keys)), rank, keys))
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = keys[order][1:] != keys[order][:-1]
    return np.sort(order[is_first])


def has_twins(keys: np.ndarray) -> bool:
    ordered = np.sort(keys)
    return bool((ordered[1:] == ordered[:-1]).any())


def have_any(flaws: np.ndarray, wanted: Flaw) -> np.ndarray:
    """Whether each row has one of these flaws."""
    found: np.ndarray = (flaws & np.uint8(wanted)) != 0
    return found


class AnswerFile:
    """An output, and the file of failed rows behind it where there is one. `scan` reads both once, as far as they go at
    that moment: a job may append meanwhile, and a file that is replaced stays readable until `close`.

    `paths`: empty for a stream, which has no rows to read. A file that does not exist has no rows. `titles`: names of
    the files in messages. A line of more than `max_row_bytes` is an error. `file_errors` turns an OSError into the
    error of the caller.
    """

    # A rows that count, in the order of the files; each key once
    keys_A: np.ndarray
    flaws_A: np.ndarray
    """The Flaw of each row, as a byte."""
    codes_A: np.ndarray
    """The code of each failed row, as an object; None for an answer."""
    sizes_A: np.ndarray
    """The numbers that `visit` has returned; -1 for a row that it could not read."""
    files_A: np.ndarray
    starts_A: np.ndarray
    """The file of each row, and the byte where its line starts."""
    broken: list[Line]
    """Whole lines that are no result rows."""
    torn: list[Line]
    """Last lines without an end: a job writes them now, or was killed while it did."""
    unread: list[Line]
    """Result rows that `visit` could not read."""
    repeated: list[Line]
    """Lines of rows of which another line counts; their `number` is 0."""
    states: list[FileState | None]
    """Each file when it was opened; None: it was not there."""

    def __init__(self, paths: Sequence[Path], *, titles: Sequence[str] | None = None,
                 max_row_bytes: int = sys.maxsize - 1,
                 file_errors: Callable[[str], contextlib.AbstractContextManager[None]] = clear_file_errors):
        self.paths = tuple(paths)
        self.titles = [f"output {path}" for path in paths] if titles is None else titles
        self._max_row_bytes = max_row_bytes
        self._file_errors = file_errors
        self._files: list[BinaryIO | None] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files:
            if file is not None:
                file.close()
        self._files.clear()

    def scan(self, visit: Callable[[Answer], int] = lambda row: 1) -> Self:
        """Read all lines. `visit` is called with each result row, and may raise one of FAULTS. Returns this."""
        self.close()
        self.broken, self.torn, self.unread = [], [], []
        self._num_lines, self.states = [0] * len(self.paths), []
        keys, flaws, files, codes = bytearray(), bytearray(), bytearray(), list[str | None]()
        starts, sizes = array("Q"), array("i")
        for line, data in self._lines():
            row = parse_result(data)
            if row is None:
                lines = self.broken if data.endswith(b"\n") else self.torn
                lines += [line] if data.strip() else []
                continue
            keys += row.key
            flaws.append(row.flaws)
            codes.append(_code_of(row.fields) if Flaw.ERRORS in row.flaws else None)
            files.append(line.file)
            starts.append(line.start)
            try:
                sizes.append(visit(row.fields))
            except FAULTS:
                self.unread.append(line)
                sizes.append(-1)
        self.keys_A, self.flaws_A = keys_array(keys), np.frombuffer(flaws, dtype=np.uint8)
        self.codes_A, self.sizes_A = np.array(codes, dtype=object), np.array(sizes, dtype=np.int32)
        self.files_A, self.starts_A = np.frombuffer(files, dtype=np.uint8), np.array(starts, dtype=np.uint64)
        self._leave(lines_that_count(self.keys_A, self.flaws_A))
        return self

    def _leave(self, places: np.ndarray) -> None:
        is_left_out = np.ones(len(self.keys_A), dtype=bool)
        is_left_out[places] = False
        self.repeated = list(map(self.line, np.flatnonzero(is_left_out).tolist()))
        if self.repeated:
            for name in ("keys_A", "flaws_A", "codes_A", "sizes_A", "files_A", "starts_A"):
                setattr(self, name, getattr(self, name)[places])

    def _lines(self) -> Iterator[tuple[Line, bytes]]:
        for file, path in enumerate(self.paths):
            with self._file_errors(self.titles[file]):
                opened = _opened(path)
                self._files.append(opened)
                state = None if opened is None else _state_of(os.fstat(opened.fileno()))
                self.states.append(state)
                start, end = 0, 0 if state is None else state.num_bytes
                while opened is not None and start < end:
                    data = self._read_line(file, opened, end - start)
                    self._num_lines[file] += 1
                    yield Line(file, start, self._num_lines[file]), data
                    start += len(data)

    def _read_line(self, file: int, opened: BinaryIO, num_bytes: int) -> bytes:
        data = opened.readline(min(self._max_row_bytes + 1, num_bytes))
        if len(data) > self._max_row_bytes:
            raise ConfigError(f"{self.titles[file]}: line {self._num_lines[file] + 1} has more than "
                              f"{self._max_row_bytes} bytes; raise --max-row-bytes")
        if not data:
            raise self._was_cut(file)
        return data

    def _was_cut(self, file: int) -> OutputLostError:
        return OutputLostError(f"{self.titles[file]}: was cut while it was read; run the same command again")

    def refuse_other_files(self) -> None:
        """Raises ConfigError for a file that has whole lines, and no result row among them."""
        for file, title in enumerate(self.titles):
            num_broken = sum(line.file == file for line in self.broken)
            if num_broken and not (self.files_A == file).any():
                raise ConfigError(f"{title}: none of its {num_broken} lines is a result row; name the output of a job")

    # -- rows ------------------------------------------------------------------------------------------------------

    @property
    def num_rows(self) -> int:
        return len(self.keys_A)

    @property
    def failed_A(self) -> np.ndarray:
        return have_any(self.flaws_A, Flaw.ERRORS)

    def counts(self, wanted_A: np.ndarray | None = None) -> Counts:
        """The counts of all rows, or of those that are True in `wanted_A`."""
        flaws = self.flaws_A if wanted_A is None else self.flaws_A[wanted_A]
        codes = self.codes_A if wanted_A is None else self.codes_A[wanted_A]
        failed = have_any(flaws, Flaw.ERRORS)
        num_failed = int(failed.sum())
        return Counts(
            num_answered=len(flaws) - num_failed, num_not_whole=int((flaws != 0).sum()) - num_failed,
            num_cut_off=int(have_any(flaws, Flaw.CUT_OFF).sum()),
            num_repetition=int(have_any(flaws, Flaw.REPETITION).sum()),
            num_unparsed=int(have_any(flaws, Flaw.UNPARSED).sum()),
            failures_by_code=dict(Counter(codes[failed].tolist())))

    def find(self, keys: np.ndarray) -> np.ndarray:
        """For every key the place of its row; -1 where there is none."""
        if not self.num_rows:
            return np.full(len(keys), -1, dtype=np.int64)
        by_key = np.argsort(self.keys_A, kind="stable")
        places = np.searchsorted(self.keys_A, keys, sorter=by_key)
        found = by_key[np.minimum(places, self.num_rows - 1)]
        return np.where(self.keys_A[found] == keys, found, -1)

    def line(self, place: int) -> Line:
        """The line of the row at this place."""
        return Line(int(self.files_A[place]), int(self.starts_A[place]))

    def data_at(self, line: Line) -> bytes:
        """A line as it stands in its file."""
        opened, state = self._files[line.file], self.states[line.file]
        assert opened is not None, f"{self.titles[line.file]}: was not there, and has no line"
        assert state is not None, "it has the state of when it was opened"
        with self._file_errors(self.titles[line.file]):
            opened.seek(line.start)
            return self._read_line(line.file, opened, state.num_bytes - line.start)

    def data(self, place: int) -> bytes:
        """The line of the row at this place. Raises OutputLostError where it has no end any more."""
        line = self.line(place)
        data = self.data_at(line)
        if not data.endswith(b"\n"):
            raise self._was_cut(line.file)
        return data

    def row(self, place: int) -> Answer:
        return _fields_of(self.data(place))

    # -- for the owner of the lock ---------------------------------------------------------------------------------

    def refuse_changes(self) -> None:
        """Raises JobError where a file is not what `scan` has read."""
        for title, path, state in zip(self.titles, self.paths, self.states, strict=True):
            if _state_now(path) != state:
                raise JobError(f"{title}: was changed while the model loaded; run the same command again")

    def rewrite(self, file: int, places: np.ndarray) -> None:
        """Leave these of its rows in a file, in this order, and nothing else. Killed at any moment, the old or the new
        file is there. Places stay those of the old file until the next `scan`."""
        if len(places) == self._num_lines[file] and (np.diff(places) > 0).all():
            return
        with replacing(self.paths[file]) as copy:
            for place in places.tolist():
                copy.write(self.data(place))

    def append_to(self, path: Path, wanted_A: np.ndarray) -> None:
        """Add the rows that are True to another file, whole and on disk, each line that is not there yet. A line
        without an end, which a killed process left there, goes."""
        if not wanted_A.any():
            return
        with open(open_for_rows(path, os.O_RDWR), "r+b") as copy:
            known, end = set(), 0
            for line in copy:
                if line.endswith(b"\n"):
                    known.add(_digest(line))
                    end += len(line)
            copy.truncate(end)
            for place in np.flatnonzero(wanted_A).tolist():
                if _digest(line := self.data(place)) not in known:
                    copy.write(line)
            copy.flush()
            os.fsync(copy.fileno())
            sync_folder(path.parent)


class Result(NamedTuple):
    """A line that is a result row."""

    key: bytes
    flaws: Flaw
    fields: Answer


def parse_result(data: bytes) -> Result | None:
    """None where the line is not a whole result row."""
    if not data.endswith(b"\n"):
        return None
    try:
        fields = _fields_of(data)
        return Result(key_of_answer(fields), flaws_of(fields), fields)
    except FAULTS:
        return None


def _fields_of(data: bytes) -> Answer:
    fields: Answer = parse_json(data.removeprefix(codecs.BOM_UTF8).decode())
    return fields


def _code_of(fields: Answer) -> str:
    code = error_of(fields).get("code")
    return sys.intern(code) if isinstance(code, str) else _NO_CODE  # a million failed rows have few codes


def _digest(line: bytes) -> bytes:
    return hashlib.blake2b(line, digest_size=16).digest()


def _opened(path: Path) -> BinaryIO | None:
    with contextlib.suppress(FileNotFoundError):
        return open(path, "rb")
    return None


def open_for_rows(path: Path, access: int = os.O_WRONLY) -> int:
    """A descriptor that appends. Links were followed when the place was found: one that stands there now is foreign."""
    return os.open(path, access | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


class FileState(NamedTuple):
    """It differs when a process has written to a file or has put another in its place."""

    device: int
    inode: int
    num_bytes: int
    mtime_ns: int


def _state_of(found: os.stat_result) -> FileState:
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


def _state_now(path: Path) -> FileState | None:
    """None where there is no file."""
    with contextlib.suppress(FileNotFoundError):
        return _state_of(os.stat(path))
    return None
