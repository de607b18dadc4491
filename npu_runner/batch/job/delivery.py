"""Hands finished rows to the writer and counts those that reached the output. Knows nothing of the engine.

A row that nobody can find in the output has no answer, however far it came: so the tally is fed from here.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import IO

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Writers
from npu_runner.batch.files.durable import late_file_errors
from npu_runner.batch.rows.counts import Counts
from npu_runner.serving.replica import FinishedRow

MAX_ROWS_OUT_OF_ORDER = 4096
_MAX_BYTES_IN_MEMORY = 64 << 20
# Files are written to their end and never in the middle: one goes when none of its rows waits any more.
_MAX_BYTES_OF_FILE = 256 << 20


class _Lane:
    """One file's writer, and what it was given and nobody has found there yet."""

    def __init__(self, writer: AnswerWriter):
        self.writer = writer
        self.uncounted: deque[Counts] = deque()
        self._num_counted = 0

    def kept(self) -> Iterator[Counts]:
        """What has reached the file since the last call."""
        for _ in range(self.writer.num_kept - self._num_counted):
            self._num_counted += 1
            yield self.uncounted.popleft()


class Delivery:
    """Owns the writers while entered; rows go out as they come. After leaving, the tally is what the output holds."""

    def __init__(self, writers: Writers, tally: Counts):
        self._writers = writers
        self._tally = tally
        self._answers = _Lane(writers.answers)
        self._errors = self._answers if writers.errors is None else _Lane(writers.errors)

    def put(self, row: FinishedRow) -> None:
        """Queue a row for its file. Raises JobError when an earlier one could not be written."""
        lane = self._errors if row.outcome.failures_by_code else self._answers
        lane.uncounted.append(row.outcome)
        lane.writer.put(row.data)

    def count(self) -> None:
        """Add to the tally what reached the output since the last call. Raises what the next `put` would raise."""
        self._count()
        for lane in (self._answers, self._errors):
            lane.writer.raise_failure()

    def _count(self) -> None:
        for lane in (self._answers, self._errors):
            for counts in lane.kept():
                self._tally.add(counts)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._writers.close()
        finally:
            self._count()


class OrderedDelivery(Delivery):
    """Rows go out in the order of the input: for streams, which nobody can put in order afterwards.

    What comes early waits, so `allow` bounds how many rows may be begun: `window` behind the first that is missing.
    Rows still waiting at the end are lost, and not counted.
    """

    def __init__(self, writers: Writers, tally: Counts, allow: Callable[[int], None], *, window: int):
        super().__init__(writers, tally)
        self._allow = allow
        self._window = window
        self._next = 0
        self._early = EarlyRows()
        allow(window)

    def put(self, row: FinishedRow) -> None:
        self._early.add(row)
        while (due := self._early.pop(self._next)) is not None:
            super().put(due)
            self._next += 1
        self._allow(self._next + self._window)

    def __exit__(self, *_: object) -> None:
        self._early.close()
        super().__exit__()


def window_of(num_replicas: int) -> int:
    """Rows that may be begun behind the first one that a stream in order still lacks."""
    return MAX_ROWS_OUT_OF_ORDER * num_replicas


def delivery_for(writers: Writers, tally: Counts, allow: Callable[[int], None], *, is_ordered: bool,
                 window: int) -> Delivery:
    """`window`: as `window_of` has it."""
    # A file is put in order when all of its rows are there; only a stream has to keep to it.
    if is_ordered and writers.answers.is_stream:
        return OrderedDelivery(writers, tally, allow, window=window)
    return Delivery(writers, tally)


class _Spool:
    def __init__(self) -> None:
        self.file: IO[bytes] = tempfile.TemporaryFile(prefix="npu_runner-")  # noqa: SIM115 - closed when it is empty
        self.end = 0
        self.num_waiting = 0


class EarlyRows:
    """Finished rows that wait for those before them, by index.

    What is larger than `max_bytes_in_memory` together waits in nameless files.
    """

    def __init__(self, max_bytes_in_memory: int = _MAX_BYTES_IN_MEMORY, max_bytes_of_file: int = _MAX_BYTES_OF_FILE):
        self._in_memory: dict[int, FinishedRow] = {}
        self._on_disk: dict[int, tuple[_Spool, int, int, FinishedRow]] = {}
        self._max_bytes, self._max_bytes_of_file = max_bytes_in_memory, max_bytes_of_file
        self._num_bytes = 0
        self._spools: list[_Spool] = []

    def add(self, row: FinishedRow) -> None:
        """Raises JobError when the disk is full."""
        if self._num_bytes + len(row.data) <= self._max_bytes:
            self._in_memory[row.number] = row
            self._num_bytes += len(row.data)
            return
        with late_file_errors(f"rows that wait for their turn in {tempfile.gettempdir()}", was_tried=False):
            spool = self._spool()
            spool.file.write(row.data)
            spool.file.flush()
            self._on_disk[row.number] = spool, spool.end, len(row.data), row._replace(data=b"")
            spool.end += len(row.data)
            spool.num_waiting += 1

    def pop(self, index: int) -> FinishedRow | None:
        """The row, which waits no more; None where it does not wait."""
        if index in self._in_memory:
            row = self._in_memory.pop(index)
            self._num_bytes -= len(row.data)
            return row
        if index not in self._on_disk:
            return None
        spool, start, num_bytes, row = self._on_disk.pop(index)
        data = os.pread(spool.file.fileno(), num_bytes, start)
        spool.num_waiting -= 1
        if not spool.num_waiting:
            self._spools.remove(spool)
            spool.file.close()
        return row._replace(data=data)

    def close(self) -> None:
        """Whatever still waits is lost."""
        for spool in self._spools:
            spool.file.close()

    def _spool(self) -> _Spool:
        if not self._spools or self._spools[-1].end >= self._max_bytes_of_file:
            self._spools.append(_Spool())
        return self._spools[-1]
