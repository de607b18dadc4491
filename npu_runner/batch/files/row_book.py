"""The rows of an input where they lie: one pass over the file finds them, workers and replicas read them.

In columns, so that a million rows cost no million objects. Knows nothing of what is in a row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.rows.shape import CHECKSUM_BYTES, KEY_BYTES, PIECE_BYTES, RowSource, row_key
from npu_runner.errors import JobError
from npu_runner.serving.replica import INDEX, LINE, NUM_BYTES, START, RawRow, RowRun

_DIGESTS_AT_ONCE = 1 << 16


def _no_places() -> np.ndarray:
    return np.zeros(0, dtype=np.int64)


# E rows that equal another one
@dataclass(frozen=True)
class InputScan:
    """The result of one pass over the input. `keys`: 16 bytes per row, in order; `lines`: the line of each row, from 1.

    `starts` and `sizes`: each row's bytes in the file, its line end included; `checksums`: their checksums.
    """

    keys: np.ndarray
    lines: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    checksums: np.ndarray
    identity: InputIdentity
    continues_earlier: bool
    """It begins with the whole of the earlier input, byte for byte."""
    equal_E: np.ndarray = field(default_factory=_no_places)
    groups_E: np.ndarray = field(default_factory=_no_places)
    """Places of rows that have an equal, and the first row of each one's group: group by group, in order."""

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    # R rows of a run
    def run(self, numbers_R: np.ndarray, places_R: np.ndarray) -> RowRun:
        """The rows at these places in the order, under these numbers."""
        table_R4 = np.empty((len(places_R), 4), dtype=np.uint64)
        table_R4[:, INDEX] = numbers_R
        table_R4[:, LINE] = self.lines[places_R]
        table_R4[:, START] = self.starts[places_R]
        table_R4[:, NUM_BYTES] = self.sizes[places_R]
        return RowRun(table_R4=table_R4, checksums=self.checksums[places_R].tobytes())


def keys_array(keys: bytes | bytearray) -> np.ndarray:
    """Concatenated keys as a sortable array."""
    return np.frombuffer(keys, dtype=f"S{KEY_BYTES}")


def equal_rows(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """InputScan's `equal_E` and `groups_E`. `digests`: the same ones for equal rows."""
    order = np.argsort(digests, kind="stable")
    continues = np.zeros(len(order) + 1, dtype=bool)
    # In parts: the sorted digests of all rows would be another 16 bytes per row.
    for start in range(1, len(order), _DIGESTS_AT_ONCE):
        some = digests[order[start - 1 : start + _DIGESTS_AT_ONCE]]
        continues[start : start + len(some) - 1] = some[1:] == some[:-1]
    (places,) = np.nonzero(continues[:-1] | continues[1:])
    firsts = ~continues[places]
    equal_E = order[places]
    return equal_E, equal_E[firsts][np.cumsum(firsts) - 1]


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
                raise input_changed(self.file_name, f"line {row.line} is not what it was")
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
            raise input_changed(self.file_name, f"line {row.line} is not what it was")
        return row.data


@dataclass(frozen=True)
class SharedFile(RowSource):
    """An input that a replica sees under the same path. It is opened for each row.

    A file that was put in its place, or changed, is known by the checksums of its rows.
    """

    path: str
    num_bytes: int = 0
    """Its size on the driver's host."""

    def pieces(self, row: RawRow) -> Iterator[bytes]:
        with late_file_errors(f"input {self.path}"):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield from RowFile(descriptor, self.path).pieces(row)
        finally:
            os.close(descriptor)


def input_changed(file_name: str, how: str) -> JobError:
    return JobError(
        f"input {file_name}: was changed while the job ran: {how}. Answers in the output belong to the rows as they "
        "were at its start; restore the file and run the same command again (only adding rows at its end is allowed)")


class RowBook:
    """Rows of `scan` at `wanted` places, numbered from 0 in the order of the input."""

    def __init__(self, scan: InputScan, wanted: np.ndarray, source: RowFile):
        self._scan = scan
        self._places = np.flatnonzero(wanted)
        self._source = source

    @property
    def num_rows(self) -> int:
        return len(self._places)

    def run(self, indices: Sequence[int]) -> RowRun:
        """These rows, for a replica that reads them in the file."""
        indices_R = np.asarray(indices, dtype=np.int64)
        return self._scan.run(indices_R, self._places[indices_R])

    def run_with_data(self, indices: Sequence[int]) -> RowRun:
        """These rows with their bytes, for a replica that does not see the file."""
        run = self.run(indices)
        with late_file_errors(f"input {self._source.file_name}"):
            data = b"".join(
                os.pread(self._source.descriptor, num_bytes, start)
                for start, num_bytes in run.table_R4[:, [START, NUM_BYTES]].tolist())
        return RowRun(table_R4=run.table_R4, checksums=run.checksums, data=data)

    def row(self, index: int) -> RawRow:
        (row,) = self.run([index]).rows()
        return row

    def place(self, index: int) -> int:
        """The row's place in the order of the input."""
        return int(self._places[index])

    def has(self, places_R: np.ndarray) -> np.ndarray:
        """Whether it has the rows at these places."""
        return np.isin(places_R, self._places)

    def indices(self, places_R: np.ndarray) -> np.ndarray:
        """The indices of the rows at these places, which the book has."""
        return np.searchsorted(self._places, places_R)

    def data_at(self, place: int) -> bytes:
        """The bytes of the row at this place, whether the book has it or not. Raises JobError if they were changed."""
        (row,) = self._scan.run(np.zeros(1, dtype=np.int64), np.array([place])).rows()
        return self._source.read(row)

    def name(self, index: int) -> str | None:
        """The row's custom_id; None: it is known by its line. Raises JobError when the row was changed."""
        return self._source.name(self.row(index))

    def find(self, custom_ids: Sequence[str]) -> dict[str, int]:
        """The index of each of these that is among the rows."""
        found: dict[str, int] = {}
        for name in custom_ids:
            (places,) = np.nonzero(self._scan.keys == np.bytes_(row_key(name, 0)))
            index = int(np.searchsorted(self._places, places[0])) if len(places) else self.num_rows
            if index < self.num_rows and self._places[index] == places[0]:
                found[name] = index
        return found
