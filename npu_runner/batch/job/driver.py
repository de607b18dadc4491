"""Drives the replicas of a job: their finished rows go to the output and are counted, their deaths into the state.

One rank finds the row that makes steps fail by itself and goes on. Several cannot: a rank that fails leaves the others
in a collective, and the job ends. The state tells the next run which rows to run alone, and the one after that which
to give up. Nothing here reads a row or makes an answer, but for those rows. Knows nothing of how rows are served.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from npu_runner.batch.files.answer_writer import Delivery
from npu_runner.batch.files.manifest import Suspicion
from npu_runner.batch.files.row_book import RowBook
from npu_runner.batch.job.copies import EqualRows
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.openai_response import error_row
from npu_runner.errors import EngineDeadError, ReplicaDeadError, ServerError
from npu_runner.serving.blame import GivenUp, code_given_up, why_given_up
from npu_runner.serving.replica import FinishedRow, Loading, Opened, ReplicaStats, RowRun
from npu_runner.serving.replicas.fleet import Fleet, Owner
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.replica_state import added

_IDLE_SECONDS = 0.2
_COPIES_AT_ONCE = 256


class Driver(Owner):
    """Serves a job's rows. `suspects`: from earlier runs; with `retry_errors` those that were given up are tried again,
    alone. `save_suspects` puts them into the state whenever a row joins them. `say` gets lines for the user. `check` is
    called with the settings that each replica knows before its weights load, `check_renderer` as Owner's, `loading`
    with the phase of one of them until all are ready. `rows_carry_data`: replicas get rows with their bytes.
    `equal`: rows that wait for an equal one."""

    def __init__(self, book: RowBook, suspects: Mapping[str, Suspicion], *, retry_errors: bool = False,
                 save_suspects: Callable[[dict[str, Suspicion]], None] = lambda rows: None,
                 say: Callable[[str], None] = lambda line: None,
                 check: Callable[[Mapping[str, Any]], None] = lambda settings: None,
                 check_renderer: Callable[[str, Mapping[str, str]], None] = lambda name, renderer: None,
                 loading: Callable[[str], None] = lambda phase: None, rows_carry_data: bool = False,
                 equal: EqualRows | None = None):
        self._book = book
        self.suspects = {name: Suspicion() if retry_errors and found.code is not None else found
                         for name, found in suspects.items()}
        """Rows under suspicion, by custom_id."""
        self._save_suspects = save_suspects
        self._say = say
        self._check = check
        self._check_renderer = check_renderer
        self._loading = loading
        self._rows_carry_data = rows_carry_data
        self._equal = EqualRows(book) if equal is None else equal

    def run(self, fleet: Fleet, delivery: Delivery, should_stop: Callable[[], bool],
            report: Callable[[], None] = lambda: None) -> None:
        """Answer rows until there are none or `should_stop` says so; they go to `delivery` as they finish. Rows still
        under way when it stops are dropped. `report` is called whenever rows were counted. Raises what replicas and
        `delivery` raise."""
        while not should_stop() and not fleet.is_over:
            try:
                finished, given_up = fleet.poll(0.0 if self._equal.has_ready else _IDLE_SECONDS)
            except EngineDeadError as error:
                self._record_death(error)
                raise
            for row in (*finished, *(_given_up(self._book, lost) for lost in given_up)):
                delivery.put(row)
                self._equal.record(row)
            copies = dict(self._equal.copies(_COPIES_AT_ONCE))
            fleet.release(index for index, copy in copies.items() if copy is None)
            for copy in filter(None, copies.values()):
                delivery.put(copy)
                fleet.count_done(1)
            delivery.count()
            report()

    def known_suspects(self, queue: RowQueue) -> list[GivenUp]:
        """Have rows run alone that earlier runs suspect, and others wait for an equal row. Returns those that are given
        up at once."""
        given_up = []
        for name, index in self._book.find(list(self.suspects)).items():
            found = self._verdict(name, index)
            self._equal.leave_out(index)
            if found is None:
                queue.isolate([index])
            else:
                given_up.append(found)
        queue.hold(self._equal.waiting())
        return given_up

    def make_run(self, indices: Sequence[int]) -> RowRun:
        return self._book.run_with_data(indices) if self._rows_carry_data else self._book.run(indices)

    def notify(self, news: Opened | Loading | str) -> None:
        if isinstance(news, Opened):
            self._check(news.settings)
        elif isinstance(news, Loading):
            self._loading(news.phase)
        else:
            self._say(news)

    def check_renderer(self, name: str, renderer: Mapping[str, str]) -> None:
        self._check_renderer(name, renderer)

    def isolate(self, indices: Sequence[int]) -> None:
        self._isolate(name for name in map(self._book.name, indices) if name is not None)

    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        name = self._book.name(index)
        assert name is not None, f"row {index} has no custom_id, and no engine takes such a row"
        self._record_death(EngineDeadError(str(error), request_ids=(name,), blame=error.blame))
        return self._verdict(name, index)

    def _record_death(self, error: EngineDeadError) -> None:
        if len(error.request_ids) == 1:
            (name,) = error.request_ids
            num_deaths = self.suspects.get(name, Suspicion()).num_deaths + 1
            code = code_given_up(error, num_deaths)
            self.suspects[name] = Suspicion(num_deaths=num_deaths, code=code,
                                            message=why_given_up(error) if code else "")
        self._isolate(error.request_ids)

    def _isolate(self, names: Iterable[str]) -> None:
        """Record that these rows have to run alone, in this run or the next."""
        for name in names:
            self.suspects.setdefault(name, Suspicion())
        if self.suspects:
            self._save_suspects(dict(self.suspects))

    def _verdict(self, name: str, index: int) -> GivenUp | None:
        found = self.suspects.get(name, Suspicion())
        return None if found.code is None else GivenUp(index=index, code=found.code, message=found.message)


def stats_of(fleet: Fleet) -> ReplicaStats:
    """The figures of all replicas together."""
    return added([state.stats() for state in fleet.states])


def _given_up(book: RowBook, row: GivenUp) -> FinishedRow:
    data = error_row(ServerError(row.message, row.code), custom_id=book.name(row.index), line=book.row(row.index).line)
    return FinishedRow(row.index, Counts.from_failure(row.code), data)
