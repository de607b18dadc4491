"""The file of requests: read twice, once to know its rows by name and once to serve them. Rows are never all in memory,
and of a large row only a piece at a time.

What the first reading saw the others must find: a row that changed in between ends the job, so that no answer stands
under another question's name. Rows that arrive at the end meanwhile, and a file put in its place, are left for the next
job. Knows nothing of what a row asks for.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import io
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors
from npu_runner.batch.files.input_identity import NAME_BYTES, InputIdentity
from npu_runner.batch.files.packed import NUM_HEAD_BYTES, packing_of, unpack
from npu_runner.batch.rows.shape import CHECKSUM_BYTES, KEY_BYTES, PIECE_BYTES, NameReader, RowSource, row_key
from npu_runner.errors import ConfigError, JobError
from npu_runner.serving.replica import INDEX, LINE, NUM_BYTES, START, RawRow, RowRun

STANDARD_STREAM = "-"
_MAX_DUPLICATES_SHOWN = 5
_ROWS_AT_ONCE = 1024
_LEAST_FREE_BYTES = 1 << 30


@dataclass(frozen=True)
class InputScan:
    """The result of one pass over the input. `keys`: 16 bytes per row, in order; `lines`: where each row stands.

    `starts` and `sizes`: each row's bytes in the file, its line end with it; `checksums`: of these bytes.
    """

    keys: np.ndarray
    lines: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    identity: InputIdentity
    continues_earlier: bool
    """It begins with the whole of the earlier input, byte for byte."""

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    # R rows of a run
    def run(self, numbers_R: np.ndarray, places_R: np.ndarray) -> RowRun:
        """The rows that stand at these places in the order, under these numbers."""
        table_R4 = np.empty((len(places_R), 4), dtype=np.uint64)
        table_R4[:, INDEX] = numbers_R
        table_R4[:, LINE] = self.lines[places_R]
        table_R4[:, START] = self.starts[places_R]
        table_R4[:, NUM_BYTES] = self.sizes[places_R]
        return RowRun(table_R4=table_R4, checksums=self.checksums[places_R].tobytes())


def keys_array(keys: bytes | bytearray) -> np.ndarray:
    """Concatenated keys as a sortable array."""
    return np.frombuffer(keys, dtype=f"S{KEY_BYTES}")


@dataclass(frozen=True)
class RowFile(RowSource):
    """Reads rows through an open descriptor, which worker processes inherit; the file may have no name any more."""

    descriptor: int
    file_name: str
    is_unpacked: bool = False
    """It was compressed: the rows' places are in what was unpacked of it, not in the file of that name."""

    def pieces(self, row: RawRow) -> Iterator[bytes]:
        """The row's bytes in pieces. Raises JobError, at the last of them, when they are not what they were."""
        position, end = row.start, row.start + row.num_bytes
        checksum = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        while position < end:
            with late_file_errors(f"input {self.file_name}"):
                piece = os.pread(self.descriptor, min(PIECE_BYTES, end - position), position)
            checksum.update(piece)
            position += len(piece) or end
            if position >= end and checksum.digest() != row.checksum:
                raise _changed(self.file_name, f"line {row.line} is not what it was")
            yield piece


@dataclass(frozen=True)
class CarriedRows(RowSource):
    """Rows that have their bytes with them. `file_name`: what the input is called where it lies."""

    file_name: str

    def pieces(self, row: RawRow) -> Iterator[bytes]:
        data = self.read(row)
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def read(self, row: RawRow) -> bytes:
        assert row.data is not None, f"line {row.line} came without its bytes"
        if hashlib.blake2b(row.data, digest_size=CHECKSUM_BYTES).digest() != row.checksum:
            raise _changed(self.file_name, f"line {row.line} is not what it was")
        return row.data


@dataclass(frozen=True)
class SharedFile(RowSource):
    """An input that a replica sees under the same path. It is opened for each row.

    A file that was put in its place, or changed, is known by the checksums of its rows.
    """

    path: str

    def pieces(self, row: RawRow) -> Iterator[bytes]:
        with late_file_errors(f"input {self.path}"):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield from RowFile(descriptor, self.path).pieces(row)
        finally:
            os.close(descriptor)


@dataclass
class _Line:
    """A line while it is read: where its row begins, and the facts that are known so far."""

    number: int
    start: int
    size: int = 0
    is_row: bool = False
    has_end: bool = False

    def __post_init__(self) -> None:
        self.name = NameReader()
        self.checksum = hashlib.blake2b(digest_size=CHECKSUM_BYTES)

    def add(self, piece: bytes) -> None:
        self.size += len(piece)
        self.is_row = self.is_row or bool(piece.strip())
        self.has_end = piece.endswith(b"\n")
        self.name.feed(piece)
        self.checksum.update(piece)

    def record(self, key: bytes, checksum: bytes) -> bytes:
        """The row's record in an InputIdentity. The last row may get its line end later and is the same row."""
        if not self.has_end:
            whole = self.checksum.copy()
            whole.update(b"\n")
            checksum = whole.digest()
        return key[:NAME_BYTES] + checksum


class InputFile:
    """Rows from a file. Standard input is first copied to a nameless file in `spool_folder`, and a compressed file is
    first unpacked into one; that raises JobError before less than 1 GiB is left free there."""

    def __init__(self, source: str, spool_folder: Path | None = None):
        """`spool_folder`: None is the system's folder for temporary files, for commands that only read."""
        self.name = source
        opened = _open(source, spool_folder)
        self._file = _unpacked(opened, source, spool_folder)
        self._is_unpacked = self._file is not opened
        found = os.fstat(self._file.fileno())
        self._size, self._mtime_ns = found.st_size, found.st_mtime_ns
        self._scan: InputScan | None = None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def source(self) -> RowFile:
        """Reads this file's rows, here and in processes that inherit `source.descriptor`."""
        return RowFile(self._file.fileno(), self.name, self._is_unpacked)

    def scan(self, earlier: InputIdentity | None = None) -> InputScan:
        """Read everything once. Raises ConfigError when a custom_id occurs twice."""
        keys, checksums, records, table = bytearray(), bytearray(), bytearray(), array("Q")
        digest, line = hashlib.blake2b(digest_size=16), _Line(1, 0)
        position, continues_earlier = 0, earlier is None or earlier.num_bytes == 0
        for piece, ends in self._pieces():
            if earlier is not None and ends and not continues_earlier:
                continues_earlier = _is_end_of(earlier, digest, position, piece)
            digest.update(piece)
            if position == 0 and piece.startswith(codecs.BOM_UTF8):
                position, line.start = len(codecs.BOM_UTF8), len(codecs.BOM_UTF8)
                piece = piece[position:]
            position += len(piece)
            line.add(piece)
            if ends and line.is_row:
                keys += (key := row_key(line.name.name(), line.number))
                checksums += (checksum := line.checksum.digest())
                records += line.record(key, checksum)
                table.extend((line.number, line.start, line.size))
            line = _Line(line.number + 1, position) if ends else line
        identity = InputIdentity(position, digest.hexdigest(), bytes(records))
        self._scan = _scan_of(keys, checksums, table, identity, continues_earlier)
        self._refuse_duplicates(self._scan)
        return self._scan

    def scan_for(self, output: str, earlier: InputIdentity | None) -> InputScan:
        """The same for a job that has begun. `earlier`: its input, as its manifest has it; None: it has none. Raises
        ConfigError for another input."""
        rows = self.scan(earlier)
        if not rows.continues_earlier:
            raise ConfigError(f"input {self.name}: it is not the input that {output} was begun with; name that one, or "
                              "leave it out")
        return rows

    def rows(self, wanted: np.ndarray | None = None) -> Iterator[RawRow]:
        """The rows in order; only those whose place in the order is True in `wanted`."""
        scan = self._scan if self._scan is not None else self.scan()
        places = np.arange(scan.num_rows) if wanted is None else np.flatnonzero(wanted)
        for first in range(0, len(places), _ROWS_AT_ONCE):
            some = places[first : first + _ROWS_AT_ONCE]
            yield from scan.run(np.arange(first, first + len(some)), some).rows()

    def refuse_changes(self) -> None:
        """Raise JobError unless the file still begins with what `scan` saw. Reads it only if it was written to."""
        found = os.fstat(self._file.fileno())
        if found.st_size < self._size:
            raise _changed(self.name, f"it had {self._size} bytes and has {found.st_size}")
        if found.st_mtime_ns == self._mtime_ns or self._scan is None:
            return
        digest = hashlib.blake2b(digest_size=16)
        for piece, _ in self._pieces():
            digest.update(piece)
        if digest.hexdigest() != self._scan.identity.blake2b:
            raise _changed(self.name, "rows that are answered read otherwise now")

    def _pieces(self) -> Iterator[tuple[bytes, bool]]:
        """Bytes, and whether a line ends with them. What arrives after the file was opened is left for the next job.

        Passes share the file's position: one at a time.
        """
        with late_file_errors(f"input {self.name}"), open(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            left = self._size
            while left > 0 and (piece := file.readline(min(left, PIECE_BYTES))):
                left -= len(piece)
                yield piece, piece.endswith(b"\n") or left == 0
        if left > 0:
            raise _changed(self.name, f"it had {self._size} bytes and has {self._size - left}")

    def _refuse_duplicates(self, scan: InputScan) -> None:
        order = np.argsort(scan.keys, kind="stable")
        ordered = scan.keys[order]
        repeats = np.flatnonzero(ordered[1:] == ordered[:-1])
        if not len(repeats):
            return
        wanted = np.zeros(scan.num_rows, dtype=bool)
        shown = repeats[:_MAX_DUPLICATES_SHOWN]
        wanted[order[shown + 1]] = True
        first_lines = {int(scan.lines[order[i + 1]]): int(scan.lines[order[i]]) for i in shown}
        named = [
            f"{self.source.name(row)!r} (lines {first_lines[row.line]} and {row.line})" for row in self.rows(wanted)
        ]
        more = f" and {len(repeats) - len(named)} more" if len(repeats) > len(named) else ""
        raise ConfigError(
            f"{self.name}: {len(repeats)} rows repeat a custom_id, which must be unique because answers are matched "
            f"by it: {', '.join(named)}{more}")


def _changed(file_name: str, how: str) -> JobError:
    return JobError(
        f"input {file_name}: was changed while the job ran: {how}. Answers in the output belong to the rows as they "
        "were at its start; restore the file and run the same command again (only adding rows at its end is allowed)")


def _scan_of(keys: bytearray, checksums: bytearray, table: array[int], identity: InputIdentity,
             continues_earlier: bool) -> InputScan:
    lines, starts, sizes = np.array(table, dtype=np.uint64).reshape(-1, 3).T.copy()
    sums = np.frombuffer(checksums, dtype=f"S{CHECKSUM_BYTES}")
    return InputScan(keys_array(keys), lines, starts, sizes, sums, identity, continues_earlier)


def _is_end_of(earlier: InputIdentity, digest: hashlib.blake2b, position: int, piece: bytes) -> bool:
    """Whether the earlier input ended with this end of a line."""
    # It may have ended without the line end that has followed since.
    for part in {piece, piece.removesuffix(b"\n")}:
        if position + len(part) == earlier.num_bytes:
            seen = digest.copy()
            seen.update(part)
            if seen.hexdigest() == earlier.blake2b:
                return True
    return False


def _open(source: str, spool_folder: Path | None) -> BinaryIO:
    if source == STANDARD_STREAM:
        if sys.stdin is None:
            raise ConfigError("input -: standard input is closed; open it, or name a JSONL file of requests")
        return _spool(sys.stdin.buffer, source, spool_folder)
    try:
        file = open(source, "rb")  # noqa: SIM115 - returned open
    except OSError as error:
        raise ConfigError(f"input {source}: {error.strerror}; a JSONL file of requests is needed") from error
    if Path(source).is_file():
        return file
    with file:
        return _spool(file, source, spool_folder)


def _unpacked(file: BinaryIO, name: str, spool_folder: Path | None) -> BinaryIO:
    """`file` as it is, or what it holds: rows are read anywhere in it, which a compressed file does not allow."""
    packing = packing_of(os.pread(file.fileno(), NUM_HEAD_BYTES, 0))
    if packing is None:
        return file
    with file, _copy(name, spool_folder) as copy:
        file.seek(0)
        unpack(packing, file, copy, name)
    return copy.file


def _spool(stream: BinaryIO, name: str, spool_folder: Path | None) -> BinaryIO:
    """Rows are read twice, so what cannot be rewound is copied first."""
    with _copy(name, spool_folder) as copy:
        shutil.copyfileobj(stream, copy.file, io.DEFAULT_BUFFER_SIZE * 16)
    return copy.file


class _Copy:
    """Writes to a nameless file, which ends with this process, and leaves 1 GiB free on its disk."""

    def __init__(self, file: BinaryIO, title: str, remedy: str):
        self.file = file
        self._title, self._remedy = title, remedy
        self._size = 0

    def write(self, piece: bytes) -> None:
        disk = os.fstatvfs(self.file.fileno())
        if disk.f_blocks and disk.f_bavail * disk.f_frsize - len(piece) < _LEAST_FREE_BYTES:
            raise JobError(f"{self._title}: has {self._size} bytes so far, and with more of them less than 1 GiB would "
                           f"be left free there; {self._remedy}")
        self._size += len(piece)
        self.file.write(piece)


@contextlib.contextmanager
def _copy(name: str, folder: Path | None) -> Iterator[_Copy]:
    """Its file is whole, and stays open, when this is left without an error."""
    place, remedy = str(folder), "make room"
    if folder is None:
        place, remedy = "the folder for temporary files", "make room, or name another folder in the variable TMPDIR"
    title = f"input {name}, its copy in {place}"
    with clear_file_errors(title), contextlib.ExitStack() as undo:
        file = undo.enter_context(tempfile.TemporaryFile(dir=folder))
        yield _Copy(file, title, remedy)  # type: ignore[arg-type]
        file.flush()
        undo.pop_all()
