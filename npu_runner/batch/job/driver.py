"""Drives the replicas of a job: their finished rows go to the output and are counted, their deaths into the state.

A row that cannot be found in the output has no answer, however far it came: it is counted once it is there. Nothing
here reads a row or makes an answer, but for the rows that are given up. Knows nothing of how rows are served.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.batch.files.destination import Writers
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.openai_response import RowError, error_row
from npu_runner.errors import EngineDeadError, ReplicaDeadError
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.blame import GivenUp
from npu_runner.serving.replica import FinishedRow, ReplicaStats
from npu_runner.serving.replicas.fleet import Fleet, FleetHooks
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.replica_state import MakeReplica, added

_IDLE_SECONDS = 0.2


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


class Driver:
    """Serves a job's rows until there are none or `should_stop` says so; rows go to `delivery` as they finish."""

    def __init__(self, fleet: Fleet, book: RowBook, delivery: Delivery, *, tally: Counts, progress: Progress,
                 should_stop: Callable[[], bool], suspects: Suspects):
        self._fleet = fleet
        self._book = book
        self._delivery = delivery
        self._tally = tally
        self._progress = progress
        self._should_stop = should_stop
        self._suspects = suspects

    def run(self, look: Callable[[], None] = lambda: None) -> None:
        """Raises what replicas and `delivery` raise. Rows still under way when it stops are dropped. `look` is called
        whenever rows were counted."""
        while not self._should_stop() and not self._fleet.is_over:
            try:
                finished, given_up = self._fleet.poll(_IDLE_SECONDS)
            except EngineDeadError as error:
                self._suspects.record_death(error)
                raise
            for row in finished:
                self._delivery.put(row)
            for lost in given_up:
                self._delivery.put(_given_up(self._book, lost))
            self._delivery.count()
            self._progress.update(self._tally, self.engine_stats)
            look()

    def stats(self) -> ReplicaStats:
        return added([state.stats() for state in self._fleet.states])

    def engine_stats(self) -> EngineStats:
        return self.stats().engine


def hooks_for(book: RowBook, suspects: Suspects, progress: Progress, check: Callable[[Mapping[str, Any]], None], *,
              loading: Callable[[str], None] = lambda phase: None, rows_carry_data: bool = False,
              scale_up: Callable[[int], Sequence[MakeReplica]] | None = None) -> FleetHooks:
    """What a fleet asks of a job. `check`, `loading`: FleetHooks'. `rows_carry_data`: rows go to replicas with their
    bytes."""
    return FleetHooks(
        make_run=book.run_with_data if rows_carry_data else book.run,
        say=progress.say,
        check=check,
        loading=loading,
        isolate=functools.partial(_isolate, suspects, book),
        record_death=functools.partial(_record_death, suspects, book),
        scale_up=scale_up)


def known_suspects(queue: RowQueue, book: RowBook, suspects: Suspects) -> list[GivenUp]:
    """Have rows run alone that earlier runs suspect. Returns those that are given up at once."""
    given_up = []
    for name, index in book.find(list(suspects.rows)).items():
        found = suspects.given_up(name)
        if found is None:
            queue.isolate([index])
        else:
            given_up.append(GivenUp(index=index, code=str(found.code), message=found.message))
    return given_up


def _isolate(suspects: Suspects, book: RowBook, rows: Sequence[int]) -> None:
    suspects.isolate(name for name in map(book.name, rows) if name is not None)


def _record_death(suspects: Suspects, book: RowBook, row: int, error: ReplicaDeadError) -> GivenUp | None:
    name = book.name(row)
    assert name is not None, f"row {row} has no custom_id, and no engine takes such a row"
    suspects.record_death(EngineDeadError(str(error), request_ids=(name,), blame=error.blame))
    found = suspects.given_up(name)
    return None if found is None else GivenUp(index=row, code=str(found.code), message=found.message)


def _given_up(book: RowBook, row: GivenUp) -> FinishedRow:
    """The error row of a row that nobody gets any more."""
    error = RowError(code=row.code, message=row.message, status_code=500)
    data = error_row(error, custom_id=book.name(row.index), line=book.row(row.index).line)
    return FinishedRow(row.index, Counts.from_failure(row.code), data)
