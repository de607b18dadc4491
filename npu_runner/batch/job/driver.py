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
from npu_runner.batch.rows.openai_response import error_row
from npu_runner.errors import EngineDeadError, ReplicaDeadError, ServerError
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.blame import GivenUp
from npu_runner.serving.replica import FinishedRow, Loading, Opened, ReplicaStats, RowRun
from npu_runner.serving.replicas.fleet import Fleet, Owner
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.replica_state import added

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


class Driver(Owner):
    """Serves a job's rows. `check` is called with the settings that each replica knows before its weights load,
    `loading` with what one of them does until all are ready. `rows_carry_data`: replicas get rows with their bytes."""

    def __init__(self, book: RowBook, suspects: Suspects, progress: Progress, *,
                 check: Callable[[Mapping[str, Any]], None] = lambda settings: None,
                 loading: Callable[[str], None] = lambda phase: None, rows_carry_data: bool = False):
        self._book = book
        self._suspects = suspects
        self._progress = progress
        self._check = check
        self._loading = loading
        self._rows_carry_data = rows_carry_data

    def run(self, fleet: Fleet, delivery: Delivery, tally: Counts, should_stop: Callable[[], bool],
            look: Callable[[], None] = lambda: None) -> None:
        """Answer rows until there are none or `should_stop` says so; they go to `delivery` as they finish. Rows still
        under way when it stops are dropped. `look` is called whenever rows were counted. Raises what replicas and
        `delivery` raise."""
        while not should_stop() and not fleet.is_over:
            try:
                finished, given_up = fleet.poll(_IDLE_SECONDS)
            except EngineDeadError as error:
                self._suspects.record_death(error)
                raise
            for row in finished:
                delivery.put(row)
            for lost in given_up:
                delivery.put(_given_up(self._book, lost))
            delivery.count()
            self._progress.update(tally, functools.partial(engine_stats, fleet))
            look()

    def known_suspects(self, queue: RowQueue) -> list[GivenUp]:
        """Have rows run alone that earlier runs suspect. Returns those that are given up at once."""
        given_up = []
        for name, index in self._book.find(list(self._suspects.rows)).items():
            found = self._verdict(name, index)
            if found is None:
                queue.isolate([index])
            else:
                given_up.append(found)
        return given_up

    def make_run(self, indices: Sequence[int]) -> RowRun:
        return self._book.run_with_data(indices) if self._rows_carry_data else self._book.run(indices)

    def hear(self, news: Opened | Loading | str) -> None:
        if isinstance(news, Opened):
            self._check(news.settings)
        elif isinstance(news, Loading):
            self._loading(news.phase)
        else:
            self._progress.say(news)

    def isolate(self, indices: Sequence[int]) -> None:
        self._suspects.isolate(name for name in map(self._book.name, indices) if name is not None)

    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        name = self._book.name(index)
        assert name is not None, f"row {index} has no custom_id, and no engine takes such a row"
        self._suspects.record_death(EngineDeadError(str(error), request_ids=(name,), blame=error.blame))
        return self._verdict(name, index)

    def _verdict(self, name: str, index: int) -> GivenUp | None:
        found = self._suspects.given_up(name)
        return None if found is None else GivenUp(index=index, code=str(found.code), message=found.message)


def stats_of(fleet: Fleet) -> ReplicaStats:
    """The figures of all replicas together."""
    return added([state.stats() for state in fleet.states])


def engine_stats(fleet: Fleet) -> EngineStats:
    return stats_of(fleet).engine


def _given_up(book: RowBook, row: GivenUp) -> FinishedRow:
    """The error row of a row that nobody gets any more."""
    data = error_row(ServerError(row.message, row.code), custom_id=book.name(row.index), line=book.row(row.index).line)
    return FinishedRow(row.index, Counts.from_failure(row.code), data)
