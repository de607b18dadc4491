"""The rows of an output file: found in one pass, and counted. Of several lines with one name one counts.

Knows nothing of what an answer says, beyond its name, whether it has failed and whether it is whole.
"""

from __future__ import annotations

import contextlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from npu_runner.batch.files.input_file import keys_array
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.batch.rows.flaws import flaws_of
from npu_runner.batch.rows.openai_response import FAULTS, error_of, key_of_answer

_UNNAMED = "unknown"


@dataclass(frozen=True)
class OutputScan:
    """The rows of an output file that count, each name once, in order."""

    # R rows
    keys: np.ndarray
    starts: np.ndarray
    """Where each row begins, in bytes."""
    flaws: np.ndarray
    """The Flaw of each row, as a byte."""
    codes: np.ndarray
    """The code of each failed row, as an object; None for an answer."""
    num_broken_lines: int
    """Lines that are no result row, or of a name of which another line counts. A crash tears at most the last line; a
    power cut may leave more."""
    num_bytes: int

    @property
    def num_rows(self) -> int:
        return len(self.keys)

    @property
    def failed(self) -> np.ndarray:
        return has_any(self.flaws, Flaw.ERRORS)

    @property
    def num_failed(self) -> int:
        return int(self.failed.sum())

    def counts(self) -> Counts:
        num_failed = self.num_failed
        return Counts(
            num_answered=self.num_rows - num_failed, num_not_whole=int((self.flaws != 0).sum()) - num_failed,
            num_cut_off=int(has_any(self.flaws, Flaw.CUT_OFF).sum()),
            num_repetition=int(has_any(self.flaws, Flaw.REPETITION).sum()),
            num_unparsed=int(has_any(self.flaws, Flaw.UNPARSED).sum()),
            failures_by_code=dict(Counter(self.codes[self.failed].tolist())))

    def only(self, places: np.ndarray, starts: np.ndarray | None = None, num_bytes: int = 0) -> OutputScan:
        """The rows at these places, whole; with `starts`, where they stand in a new version of the file."""
        return replace(
            self, keys=self.keys[places], starts=self.starts[places] if starts is None else starts,
            flaws=self.flaws[places], codes=self.codes[places],
            num_broken_lines=0 if starts is not None else self.num_broken_lines + self.num_rows - len(places),
            num_bytes=self.num_bytes if starts is None else num_bytes)


def has_any(flaws: np.ndarray, wanted: Flaw) -> np.ndarray:
    """Whether each row has one of these flaws."""
    found: np.ndarray = (flaws & np.uint8(wanted)) != 0
    return found


def places_that_count(keys: np.ndarray, failed: np.ndarray) -> np.ndarray:
    """The places of the rows that count, in order: of several with one key an answered one, else the first."""
    order = np.lexsort((np.arange(len(keys)), failed, keys))
    ordered = keys[order]
    is_first = np.ones(len(keys), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return np.sort(order[is_first])


def rows_of(scans: Sequence[OutputScan]) -> OutputScan:
    """The rows of an output, and of its error file behind it, where it has one; their `starts` are those in their file.

    A name that stands in both counts once, as `places_that_count` has it: a job was killed while it moved the row.
    """
    whole = [*scans, _NO_ROWS]
    rows = OutputScan(
        np.concatenate([scan.keys for scan in whole]), np.concatenate([scan.starts for scan in whole]),
        np.concatenate([scan.flaws for scan in whole]), np.concatenate([scan.codes for scan in whole]),
        num_broken_lines=0, num_bytes=0)
    return rows if len(scans) == 1 else rows.only(places_that_count(rows.keys, rows.failed))


def counts_of(scans: Sequence[OutputScan]) -> Counts:
    """The counts of `rows_of`."""
    return rows_of(scans).counts()


_NO_ROWS = OutputScan(
    keys_array(b""), np.zeros(0, np.uint64), np.zeros(0, np.uint8), np.zeros(0, object), num_broken_lines=0,
    num_bytes=0)


def scan_output(path: Path, end: int | None = None) -> OutputScan:
    """Read an output file once, up to `end` bytes or whole. A file that does not exist has no rows."""
    keys, starts, flaws = bytearray(), array("Q"), bytearray()
    codes: list[str | None] = []
    position = num_broken = 0
    for line in _lines_of(path):
        if end is not None and position + len(line) > end:
            break
        row = _row_of(line)
        if row is None:
            num_broken += 1
        else:
            keys += row.key
            starts.append(position)
            flaws.append(row.flaws)
            codes.append(row.code)
        position += len(line)
    found = OutputScan(
        keys_array(keys), np.frombuffer(starts, dtype=np.uint64) if starts else np.zeros(0, np.uint64),
        np.frombuffer(flaws, dtype=np.uint8), np.array(codes, dtype=object), num_broken, position)
    return found.only(places_that_count(found.keys, found.failed))


def rows_in_order(scan: OutputScan, keys: np.ndarray) -> np.ndarray:
    """For every key the number of its row in the output; -1 where there is none."""
    return places_of(keys, scan.keys)


def places_of(keys: np.ndarray, among: np.ndarray) -> np.ndarray:
    """For every key its place among others, each of which is there once; -1 where it is not."""
    if not len(among):
        return np.full(len(keys), -1, dtype=np.int64)
    by_key = np.argsort(among, kind="stable")
    places = np.searchsorted(among, keys, sorter=by_key)
    found = by_key[np.minimum(places, len(among) - 1)]
    return np.where(among[found] == keys, found, -1)


def read_row(file: BinaryIO, start: int) -> dict[str, Any]:
    """The result row that begins there."""
    file.seek(start)
    row: dict[str, Any] = json.loads(file.readline())
    return row


class _Row(NamedTuple):
    key: bytes
    flaws: Flaw
    code: str | None
    """The code of its error; None: the row is an answer."""


def _row_of(line: bytes) -> _Row | None:
    """None where the line is not a whole result row."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        flaws = Flaw.ERRORS if row["error"] is not None else flaws_of(row)
        return _Row(key_of_answer(row), flaws, _code_of(row) if Flaw.ERRORS in flaws else None)
    except FAULTS:
        return None


def _code_of(row: dict[str, Any]) -> str:
    code = error_of(row).get("code")
    return sys.intern(code) if isinstance(code, str) else _UNNAMED  # a million failed rows have few codes


def _lines_of(path: Path) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        yield from file
