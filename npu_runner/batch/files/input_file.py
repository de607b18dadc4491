"""The file of requests: read twice, once to know its rows by name and once to serve them. Rows are never all in memory.

What the first reading saw the others must find: a row that changed in between ends the job, so that no answer stands
under another question's name. Rows that arrive at the end meanwhile, and a file put in its place, are left for the next
job. Knows nothing of what a row asks for.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sys
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.rows.openai_format import custom_id_of, read_json
from npu_runner.errors import ConfigError, JobError, RequestError

STANDARD_STREAM = "-"
KEY_BYTES = 16
# A longer line fails its row instead of filling the memory: no prompt needs it, a file without line ends would.
MAX_ROW_BYTES = 256 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_MAX_DUPLICATES_SHOWN = 5

# "continued": a further piece of a line that is too long.
_Kind = Literal["whole", "too long", "continued"]


@dataclass(frozen=True)
class InputRow:
    """A line of the input. `sequence`: its number among the rows to serve, from 0; `line`: in the file, from 1."""

    sequence: int
    line: int
    data: bytes
    is_too_long: bool = False


@dataclass(frozen=True)
class InputIdentity:
    """Tells one input from another, and a grown one from a changed one."""

    num_bytes: int
    blake2b: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class InputScan:
    """What one pass over the input found. `keys`: 16 bytes per row, in order; `lines`: where each row stands."""

    keys: np.ndarray
    lines: np.ndarray
    identity: InputIdentity
    continues_earlier: bool
    """It begins with the whole of the earlier input."""

    @property
    def num_rows(self) -> int:
        return len(self.keys)


def row_key(custom_id: str | None, line: int) -> bytes:
    """Names a row in 16 bytes: by its custom_id or, without a usable one, by its line."""
    name = f"line {line}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode("utf-8"), digest_size=KEY_BYTES).digest()


def keys_array(keys: bytes | bytearray) -> np.ndarray:
    """Concatenated keys as a sortable array."""
    return np.frombuffer(keys, dtype=f"S{KEY_BYTES}")


class InputFile:
    """Rows from a file, or from standard input, which is first copied to a nameless file in `spool_folder`."""

    def __init__(self, source: str, spool_folder: Path):
        self.name = source
        self._file = _open(source, spool_folder)
        found = os.fstat(self._file.fileno())
        self._size, self._mtime_ns = found.st_size, found.st_mtime_ns
        self._identity: InputIdentity | None = None
        self._checksums: np.ndarray | None = None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> InputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def scan(self, earlier: InputIdentity | None = None) -> InputScan:
        """Read everything once. Raises ConfigError when a custom_id occurs twice."""
        keys, lines, checksums = bytearray(), array("Q"), array("Q")
        self._identity = self._checksums = None
        digest, position, continues_earlier = (
            hashlib.blake2b(digest_size=16),
            0,
            earlier is None or earlier.num_bytes == 0,
        )
        for line_number, line, kind in self._lines():
            if earlier is not None and position < earlier.num_bytes:
                # The earlier file may have ended without the line end that has followed since.
                for part in {line, line.removesuffix(b"\n")}:
                    if position + len(part) == earlier.num_bytes:
                        seen = digest.copy()
                        seen.update(part)
                        continues_earlier = continues_earlier or seen.hexdigest() == earlier.blake2b
            digest.update(line)
            position += len(line)
            if _is_row(line, kind):
                keys += row_key(_custom_id(line) if kind == "whole" else None, line_number)
                lines.append(line_number)
                checksums.append(_checksum(line))
        scan = InputScan(
            keys_array(keys),
            np.frombuffer(lines, dtype=np.uint64) if lines else np.zeros(0, np.uint64),
            InputIdentity(position, digest.hexdigest()),
            continues_earlier,
        )
        self._identity = scan.identity
        self._checksums = np.frombuffer(checksums, dtype=np.uint64) if checksums else np.zeros(0, np.uint64)
        self._refuse_duplicates(scan)
        return scan

    def rows(self, wanted: np.ndarray | None = None) -> Iterator[InputRow]:
        """The rows in order; only those whose place in the order is True in `wanted`.

        Raises JobError at a row that is not the one that `scan` saw there.
        """
        index = sequence = 0
        for line_number, line, kind in self._lines():
            if not _is_row(line, kind):
                continue
            self._refuse_another_row(index, line_number, line if wanted is None or wanted[index] else None)
            if wanted is None or wanted[index]:
                is_too_long = kind != "whole"
                yield InputRow(sequence, line_number, b"" if is_too_long else line, is_too_long)
                sequence += 1
            index += 1
        if self._checksums is not None and index != len(self._checksums):
            raise self._changed(f"it had {len(self._checksums)} rows and has {index}")

    def refuse_changes(self) -> None:
        """Raise JobError unless the file still begins with what `scan` saw. Reads it only if somebody wrote to it."""
        found = os.fstat(self._file.fileno())
        if found.st_size < self._size:
            raise self._changed(f"it had {self._size} bytes and has {found.st_size}")
        if found.st_mtime_ns == self._mtime_ns or self._identity is None:
            return
        digest = hashlib.blake2b(digest_size=16)
        for _, line, _ in self._lines():
            digest.update(line)
        if digest.hexdigest() != self._identity.blake2b:
            raise self._changed("rows that are answered read otherwise now")

    def _refuse_another_row(self, index: int, line_number: int, line: bytes | None) -> None:
        """`line`: None for a row that nobody wants, of which only the place is looked at."""
        seen = self._checksums
        if seen is not None and (index >= len(seen) or (line is not None and _checksum(line) != seen[index])):
            raise self._changed(f"line {line_number} is not what it was")

    def _changed(self, how: str) -> JobError:
        return JobError(
            f"input {self.name}: was changed while the job ran: {how}. Answers in the output belong to the rows as "
            "they were at its start; restore the file and run the same command again (only adding rows at its end is "
            "allowed)"
        )

    def _lines(self) -> Iterator[tuple[int, bytes, _Kind]]:
        """Line number, bytes and kind. Rows that arrive in the file after it was opened are left for the next job.

        Passes share the file's position: one at a time.
        """
        with late_file_errors(f"input {self.name}"), open(os.dup(self._file.fileno()), "rb") as file:
            file.seek(0)
            left, number, in_long_line = self._size, 0, False
            while left > 0:
                line = file.readline(min(left, MAX_ROW_BYTES))
                if not line:
                    raise self._changed(f"it had {self._size} bytes and has {self._size - left}")
                left -= len(line)
                ends = line.endswith(b"\n") or left == 0
                kind: _Kind = "continued" if in_long_line else "whole" if ends else "too long"
                number += not in_long_line
                yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line, kind
                in_long_line = not ends

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
            f"{_custom_id(row.data)!r} (lines {first_lines[row.line]} and {row.line})" for row in self.rows(wanted)
        ]
        more = f" and {len(repeats) - len(named)} more" if len(repeats) > len(named) else ""
        raise ConfigError(
            f"{self.name}: {len(repeats)} rows repeat a custom_id, which must be unique because answers are matched "
            f"by it: {', '.join(named)}{more}"
        )


def _checksum(line: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little")


def _is_row(line: bytes, kind: _Kind) -> bool:
    return kind == "too long" or (kind == "whole" and bool(line.strip()))


def _custom_id(line: bytes) -> str | None:
    try:
        return custom_id_of(read_json(line))
    except RequestError:
        return None


def _open(source: str, spool_folder: Path) -> BinaryIO:
    if source == STANDARD_STREAM:
        return _spool(sys.stdin.buffer, spool_folder)
    try:
        file = open(source, "rb")  # noqa: SIM115 - returned open
    except OSError as error:
        raise ConfigError(f"input {source}: {error.strerror}; a JSONL file of requests is needed") from error
    if Path(source).is_file():
        return file
    with file:
        return _spool(file, spool_folder)


def _spool(stream: BinaryIO, folder: Path) -> BinaryIO:
    """Rows are read twice, so what cannot be rewound is copied first; the copy has no name and ends with us."""
    copy = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - returned open
    shutil.copyfileobj(stream, copy, io.DEFAULT_BUFFER_SIZE * 16)
    copy.flush()
    return copy  # type: ignore[return-value]
