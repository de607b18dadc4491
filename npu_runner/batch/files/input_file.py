"""The file of requests: read twice, once to know its rows by name and once to serve them. Rows are never all in memory,
and of a large row only a piece at a time.

A row that changed since the first pass ends the job, so that no answer stands under another question's name. Rows that
arrive at the end meanwhile, and a file put in its place, are left for the next job. Knows nothing of what a row asks
for.
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
import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors
from npu_runner.batch.files.input_identity import NAME_BYTES, InputIdentity
from npu_runner.batch.files.row_book import InputScan, RowFile, equal_rows, input_changed, keys_array
from npu_runner.batch.rows.equal import MAX_ROW_BYTES, equal_digest
from npu_runner.batch.rows.shape import CHECKSUM_BYTES, PIECE_BYTES, NameReader, row_key
from npu_runner.errors import ConfigError, JobError
from npu_runner.serving.replica import RawRow

STANDARD_STREAM = "-"
_MAX_DUPLICATES_SHOWN = 5
_ROWS_AT_ONCE = 1024
_LEAST_FREE_BYTES = 1 << 30
_HEAD_BYTES = 6
_PACKED_BYTES = 4096  # zstd may unpack a piece to 30,000 times its size


@dataclass
class _Line:
    """A line while it is read: where its row begins, and the facts that are known so far."""

    number: int
    start: int
    pieces: list[bytes] | None = None
    """All of them, as long as it may equal another line. None: no such line is searched for, or it is too large."""
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
        if self.pieces is not None:
            self.pieces = [*self.pieces, piece] if self.size <= MAX_ROW_BYTES else None
        self.checksum.update(piece)

    def record(self, key: bytes, checksum: bytes) -> bytes:
        """The row's record in an InputIdentity. The last row may get its line end later and is the same row."""
        if not self.has_end:
            whole = self.checksum.copy()
            whole.update(b"\n")
            checksum = whole.digest()
        return key[:NAME_BYTES] + checksum

    def equal_digest(self, name: str | None, key: bytes) -> bytes:
        """The key, which no other row has, of a row that equals none."""
        return key if self.pieces is None or name is None else equal_digest(b"".join(self.pieces)) or key


class InputFile:
    """Rows from a file. Standard input is first copied to a nameless file in `spool_folder`, and a compressed file is
    first unpacked into one; that raises JobError before less than 1 GiB is left free there."""

    def __init__(self, source: str, spool_folder: Path | None = None):
        """`spool_folder`: None is the system's folder for temporary files, for commands that only read."""
        self.name = source
        self._file, self._is_unpacked = _open(source, spool_folder)
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

    def scan(self, earlier: InputIdentity | None = None, *, with_equal: bool = False) -> InputScan:
        """Read everything once, `with_equal` also which rows are equal. Raises ConfigError when a custom_id occurs
        twice."""
        keys, checksums, records, table = bytearray(), bytearray(), bytearray(), array("Q")
        equal, pieces = bytearray(), list[bytes]() if with_equal else None
        digest, line = hashlib.blake2b(digest_size=16), _Line(1, 0, pieces)
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
                keys += (key := row_key(name := line.name.name(), line.number))
                equal += line.equal_digest(name, key) if with_equal else b""
                checksums += (checksum := line.checksum.digest())
                records += line.record(key, checksum)
                table.extend((line.number, line.start, line.size))
            line = _Line(line.number + 1, position, pieces) if ends else line
        lines, starts, sizes = np.array(table, dtype=np.uint64).reshape(-1, 3).T.copy()
        self._scan = InputScan(
            keys_array(keys), lines, starts, sizes, np.frombuffer(checksums, dtype=f"S{CHECKSUM_BYTES}"),
            InputIdentity(position, digest.hexdigest(), bytes(records)), continues_earlier,
            *(equal_rows(keys_array(equal)) if with_equal else ()))
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
            raise input_changed(self.name, f"it had {self._size} bytes and has {found.st_size}")
        if found.st_mtime_ns == self._mtime_ns or self._scan is None:
            return
        digest = hashlib.blake2b(digest_size=16)
        for piece, _ in self._pieces():
            digest.update(piece)
        if digest.hexdigest() != self._scan.identity.blake2b:
            raise input_changed(self.name, "rows that are answered read otherwise now")

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
            raise input_changed(self.name, f"it had {self._size} bytes and has {self._size - left}")

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


def _open(source: str, spool_folder: Path | None) -> tuple[BinaryIO, bool]:
    """The file, and whether it was unpacked. Rows are read twice, anywhere in it, so a stream is copied first."""
    if source == STANDARD_STREAM:
        if sys.stdin is None:
            raise ConfigError("input -: standard input is closed; open it, or name a JSONL file of requests")
        file: BinaryIO = sys.stdin.buffer
    else:
        try:
            file = open(source, "rb")  # noqa: SIM115 - returned open
        except OSError as error:
            raise ConfigError(f"input {source}: {error.strerror}; a JSONL file of requests is needed") from error
    if source == STANDARD_STREAM or not Path(source).is_file():
        with _copy(source, spool_folder) as copy, contextlib.ExitStack() as copied:
            if source != STANDARD_STREAM:
                copied.enter_context(file)
            shutil.copyfileobj(file, copy.file, io.DEFAULT_BUFFER_SIZE * 16)
        file = copy.file
    head = os.pread(file.fileno(), _HEAD_BYTES, 0)
    packing = next((packing for packing in _PACKINGS if head.startswith(packing.first_bytes)), None)
    if packing is None:
        return file, False
    with file, _copy(source, spool_folder) as copy:
        file.seek(0)
        _unpack(packing, file, copy, source)
    return copy.file, True


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


# -- compressed inputs, known by their first bytes ---------------------------------------------------------------------


class _Packing(NamedTuple):
    """A format of compressed files. `command` writes the content to standard output. `library` makes an object with
    `decompress`, `eof` and `unused_data` for one member of a file, and names the error that it raises for broken data;
    None: only the command unpacks it."""

    name: str
    first_bytes: bytes
    command: str
    library: Callable[[], tuple[Callable[[], Any], type[Exception]]] | None = None


def _gzip() -> tuple[Callable[[], Any], type[Exception]]:
    return lambda: zlib.decompressobj(wbits=31), zlib.error


def _zstd() -> tuple[Callable[[], Any], type[Exception]]:
    """Python's own from 3.14 on, before that the package of the extra `zstd`."""
    try:
        from compression.zstd import ZstdDecompressor, ZstdError
    except ModuleNotFoundError:
        import zstandard

        return (lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()), zstandard.ZstdError
    return ZstdDecompressor, ZstdError


# No line of JSON begins with any of these.
_PACKINGS = (
    _Packing("gzip", b"\x1f\x8b\x08", "gunzip -c", _gzip),
    _Packing("zstd", b"\x28\xb5\x2f\xfd", "unzstd -c", _zstd),
    _Packing("xz", b"\xfd7zXZ\x00", "xz -dc"),
    _Packing("zip", b"PK\x03\x04", "unzip -p"),
)


def _unpack(packing: _Packing, source: BinaryIO, target: _Copy, name: str) -> None:
    """Raises ConfigError where the data are broken or cut short, and for a format that is not unpacked here."""
    remedy = f"unpack it: {packing.command} {'FILE' if name == '-' else name} > rows.jsonl"
    title = f"input {name}: it is {packing.name}, and"
    if packing.library is None:
        raise ConfigError(f"{title} compressed inputs may be gzip or zstd; {remedy}")
    try:
        new_member, broken = packing.library()
    except ModuleNotFoundError as error:
        raise ConfigError(f"{title} {error.name} is not installed; pip install {error.name}, or {remedy}") from error
    # Members of a file follow one another; zeros behind the last one are padding.
    member, is_begun, num_read = new_member(), False, 0
    while packed := source.read(_PACKED_BYTES):
        num_read += len(packed)
        packed = packed if is_begun else packed.lstrip(b"\0")
        while packed:
            try:
                target.write(member.decompress(packed))
            except broken as error:
                raise ConfigError(f"{title} its data are broken, within its first {num_read} bytes ({error}); write it "
                                  "again") from error
            is_begun, packed = True, b""
            if member.eof:
                packed = member.unused_data.lstrip(b"\0")
                member, is_begun = new_member(), False
    if is_begun:
        raise ConfigError(f"{title} it ends too early, after {num_read} bytes; write it again")
