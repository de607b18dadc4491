"""Hands finished rows to the writer and counts those that reached the output. Knows nothing of the engine.

A row that nobody can find in the output has no answer, however far it came: so the tally is fed from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Writers
from npu_runner.batch.files.early_rows import EarlyRows
from npu_runner.batch.job.tally import Outcome, Tally
from npu_runner.serving.replica import FinishedRow

MAX_ROWS_OUT_OF_ORDER = 4096


class _Lane:
    """One file's writer, and what it was given and nobody has found there yet."""

    def __init__(self, writer: AnswerWriter):
        self.writer = writer
        self.uncounted: deque[Outcome] = deque()
        self._num_counted = 0

    def kept(self) -> Iterator[Outcome]:
        """What has reached the file since the last call."""
        for _ in range(self.writer.num_kept - self._num_counted):
            self._num_counted += 1
            yield self.uncounted.popleft()


class Delivery:
    """Owns the writers while entered; rows go out as they come. After leaving, the tally is what the output holds."""

    def __init__(self, writers: Writers, tally: Tally):
        self._writers = writers
        self._tally = tally
        self._answers = _Lane(writers.answers)
        self._errors = self._answers if writers.errors is None else _Lane(writers.errors)

    def put(self, row: FinishedRow) -> None:
        """Queue a row for its file. Raises JobError when an earlier one could not be written."""
        lane = self._answers if row.outcome.failure_code is None else self._errors
        lane.uncounted.append(row.outcome)
        lane.writer.put(row.data)

    def count(self) -> None:
        """Add to the tally what reached the output since the last call. Raises what the next `put` would raise."""
        self._count()
        for lane in (self._answers, self._errors):
            lane.writer.raise_failure()

    def _count(self) -> None:
        for lane in (self._answers, self._errors):
            for outcome in lane.kept():
                self._tally.add(outcome)

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writers.close()
        finally:
            self._count()


class OrderedDelivery(Delivery):
    """Rows go out in the order of the input: for streams, which nobody can put in order afterwards.

    What comes early waits, so `allow` bounds how many rows may be begun: `window` behind the first that is missing.
    Rows still waiting at the end are lost, and not counted.
    """

    def __init__(self, writers: Writers, tally: Tally, allow: Callable[[int], None], *, window: int):
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._early.close()
        super().__exit__(kind, error, trace)
