"""Hands finished rows to the writer and counts those that reached the output. Knows nothing of the engine.

A row that nobody can find in the output has no answer, however far it came: so the tally is fed from here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from types import TracebackType

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.input_file import InputRow
from npu_runner.batch.job.tally import Outcome, Tally

MAX_ROWS_OUT_OF_ORDER = 4096


class Delivery:
    """Owns the writer while entered; rows go out as they come. After leaving, the tally is what the output holds."""

    def __init__(self, writer: AnswerWriter, tally: Tally):
        self._writer = writer
        self._tally = tally
        self._uncounted: deque[Outcome] = deque()
        self._num_counted = 0

    def put(self, row: InputRow, data: bytes, outcome: Outcome) -> None:
        """Queue a row for the output. Raises JobError when an earlier one could not be written."""
        self._uncounted.append(outcome)
        self._writer.put(data)

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

    What comes early waits in memory, so `allow` bounds how many rows may be begun. Rows still waiting at the end are
    lost, and not counted.
    """

    def __init__(self, writer: AnswerWriter, tally: Tally, allow: Callable[[float], None]):
        super().__init__(writer, tally)
        self._allow = allow
        self._next = 0
        self._early: dict[int, tuple[InputRow, bytes, Outcome]] = {}

    def put(self, row: InputRow, data: bytes, outcome: Outcome) -> None:
        self._early[row.sequence] = row, data, outcome
        while self._next in self._early:
            super().put(*self._early.pop(self._next))
            self._next += 1
        self._allow(self._next + MAX_ROWS_OUT_OF_ORDER)
