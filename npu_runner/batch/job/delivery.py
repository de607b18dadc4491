"""Hands finished rows to the writer and counts those that reached the output. Knows nothing of the engine.

A row that cannot be found in the output has no answer, however far it came: so the tally is fed from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Writers
from npu_runner.batch.rows.counts import Counts
from npu_runner.serving.replica import FinishedRow


class _Lane:
    """One file's writer, and the outcomes of the rows that were not found in the file yet."""

    def __init__(self, writer: AnswerWriter):
        self.writer = writer
        self.uncounted: deque[Counts] = deque()
        self._num_counted = 0

    def kept(self) -> Iterator[Counts]:
        """The counts of rows that have reached the file since the last call."""
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
