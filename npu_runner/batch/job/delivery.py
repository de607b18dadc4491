"""Hands finished rows to the writer and counts those that reached the output. Knows nothing of the engine.

A row that nobody can find in the output has no answer, however far it came: so the tally is fed from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.early_rows import EarlyRows
from npu_runner.batch.job.tally import Outcome, Tally
from npu_runner.replicas.base import FinishedRow

MAX_ROWS_OUT_OF_ORDER = 4096


class Delivery:
    """Owns the writer while entered; rows go out as they come. After leaving, the tally is what the output holds."""

    def __init__(self, writer: AnswerWriter, tally: Tally):
        self._writer = writer
        self._tally = tally
        self._uncounted: deque[Outcome] = deque()
        self._num_counted = 0

    def put(self, row: FinishedRow) -> None:
        """Queue a row for the output. Raises JobError when an earlier one could not be written."""
        self._uncounted.append(row.outcome)
        self._writer.put(row.data)

    def count(self) -> None:
        """Add to the tally what reached the output since the last call. Raises what the next `put` would raise."""
        self._count()
        self._writer.raise_failure()

    def _count(self) -> None:
        for _ in range(self._writer.num_kept - self._num_counted):
            self._tally.add(self._uncounted.popleft())
            self._num_counted += 1

    def __enter__(self) -> Delivery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.close()
        finally:
            self._count()


class OrderedDelivery(Delivery):
    """Rows go out in the order of the input: for streams, which nobody can put in order afterwards.

    What comes early waits, so `allow` bounds how many rows may be begun: `window` behind the first that is missing.
    Rows still waiting at the end are lost, and not counted.
    """

    def __init__(self, writer: AnswerWriter, tally: Tally, allow: Callable[[int], None], *, window: int):
        super().__init__(writer, tally)
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
