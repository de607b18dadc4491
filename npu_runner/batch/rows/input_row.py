"""A row as a job's stages hand it on: where it stands and what it is called, never what is in it.

So nothing that waits holds a row's megabytes: whoever prepares it reads it, and drops it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

KEY_BYTES = 16
CHECKSUM_BYTES = 8


@dataclass(frozen=True)
class InputRow:
    """A line of the input. `sequence`: its number among the rows to serve, from 0; `line`: in the file, from 1.

    `start`, `num_bytes`: where it lies in the file. `checksum`: of its bytes, as the first reading found them.
    """

    sequence: int
    line: int
    start: int
    num_bytes: int
    checksum: bytes


class RowSource(Protocol):
    """Where rows can be read, in any process of the job. Raises JobError when they are not what they were."""

    def pieces(self, row: InputRow) -> Iterator[bytes]:
        """The row's bytes, in order, in pieces of bounded size."""

    def read(self, row: InputRow) -> bytes:
        """All of them."""

    def name(self, row: InputRow) -> str | None:
        """The row's custom_id; None: it is known by its line."""


def row_key(custom_id: str | None, line: int) -> bytes:
    """Names a row in 16 bytes: by its custom_id or, without a usable one, by its line."""
    name = f"line {line}" if custom_id is None else f"id {custom_id}"
    return hashlib.blake2b(name.encode("utf-8"), digest_size=KEY_BYTES).digest()
