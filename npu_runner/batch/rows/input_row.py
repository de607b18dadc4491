"""Where the rows of a job are read, and the names by which rows are known. Knows nothing of what is in a row.

A row that waits is a RawRow: where it lies, not its megabytes. Whoever prepares it reads it, and drops it.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Iterator
from typing import Protocol

from npu_runner.batch.rows.shape import NameReader
from npu_runner.serving.replica import RawRow

KEY_BYTES = 16
CHECKSUM_BYTES = 8


class RowSource(Protocol):
    """Where rows can be read, in any process of the job. Raises JobError when they are not what they were."""

    @abstractmethod
    def pieces(self, row: RawRow) -> Iterator[bytes]:
        """The row's bytes, in order, in pieces of bounded size."""

    def read(self, row: RawRow) -> bytes:
        """All of them."""
        return b"".join(self.pieces(row))

    def name(self, row: RawRow) -> str | None:
        """The row's custom_id; None: it is known by its line."""
        reader = NameReader()
        for piece in self.pieces(row):
            reader.feed(piece)
        return reader.name()


def row_key(custom_id: str | None, line: int) -> bytes:
    """Names a row in 16 bytes: by its custom_id or, without a usable one, by its line."""
    name = f"line {line}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode("utf-8"), digest_size=KEY_BYTES).digest()
