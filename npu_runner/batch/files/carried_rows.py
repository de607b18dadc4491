"""Rows for replicas that do not have the driver's descriptor of the input: carried with them, or read by path.

Knows nothing of what is in a row.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.files.input_file import RowFile
from npu_runner.batch.rows.input_row import CHECKSUM_BYTES, InputRow
from npu_runner.batch.rows.shape import PIECE_BYTES, NameReader
from npu_runner.errors import JobError


@dataclass(frozen=True)
class CarriedRow(InputRow):
    """A row that has its bytes with it."""

    data: bytes = b""


@dataclass(frozen=True)
class CarriedRows:
    """A RowSource of CarriedRows. `file_name`: what the input is called where it lies."""

    file_name: str

    def pieces(self, row: InputRow) -> Iterator[bytes]:
        data = self.read(row)
        for start in range(0, len(data), PIECE_BYTES):
            yield data[start : start + PIECE_BYTES]

    def read(self, row: InputRow) -> bytes:
        assert isinstance(row, CarriedRow), f"line {row.line} came without its bytes"
        if hashlib.blake2b(row.data, digest_size=CHECKSUM_BYTES).digest() != row.checksum:
            raise JobError(f"input {self.file_name}: line {row.line} is not what it was when the job began; restore "
                           "the file and run the same command again")
        return row.data

    def name(self, row: InputRow) -> str | None:
        reader = NameReader()
        for piece in self.pieces(row):
            reader.feed(piece)
        return reader.name()


@dataclass(frozen=True)
class SharedFile:
    """A RowSource of an input that a replica sees under the same path. It is opened for each row.

    A file that was put in its place, or changed, is known by the checksums of its rows.
    """

    path: str

    def pieces(self, row: InputRow) -> Iterator[bytes]:
        with late_file_errors(f"input {self.path}"):
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield from RowFile(descriptor, self.path).pieces(row)
        finally:
            os.close(descriptor)

    def read(self, row: InputRow) -> bytes:
        return b"".join(self.pieces(row))

    def name(self, row: InputRow) -> str | None:
        reader = NameReader()
        for piece in self.pieces(row):
            reader.feed(piece)
        return reader.name()
