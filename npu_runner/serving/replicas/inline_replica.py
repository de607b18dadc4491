"""A replica in its caller's thread, with the one loop around an engine: admit, step, finish. Knows no row's data.

Every other replica is one of these in a process of its own, on this host or on another one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from npu_runner.errors import EngineDeadError, NpuRunnerError, ReplicaDeadError, RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.endpoint import Endpoint, Prepared
from npu_runner.serving.replica import (
    Event,
    Finished,
    FinishedRow,
    Loading,
    PageOutcome,
    Progressed,
    Ready,
    Replica,
    ReplicaFacts,
    ReplicaStats,
    Returned,
    Started,
)

# Enough that a prefill step never lacks prompts, few enough that their pixels fit ...
_LEAST_WAITING_REQUESTS = 64
# ... and this share of max_num_seqs, since an eighth of it must be able to join before a prefill interrupts others.
_WAITING_SHARE = 4
_MAX_WAITING_BYTES = 1 << 29
_REPORT_SECONDS = 0.25


def max_waiting_requests(max_num_seqs: int) -> int:
    """Most requests that wait in the engine, and most that wait, prepared, for it."""
    return max(_LEAST_WAITING_REQUESTS, max_num_seqs // _WAITING_SHARE)


class InlineReplica(Replica):
    """Works in `poll`: the first call loads the model, later ones run one step each. Contexts that subclasses put into
    `_open` end with it. All its queues are bounded."""

    can_restart = False
    is_inline = True
    endpoint: Endpoint
    """Made by `start` or `_load`."""

    def __init__(self, name: str):
        self.name = name
        self._open = ExitStack()
        self._engine: Any = None
        self._is_serving = False
        self._failure: NpuRunnerError | None = None
        self._notify: Callable[[Event], None]
        self._in_flight: dict[str, Prepared] = {}
        """The requests of the engine, by name."""
        self._returned: set[str] = set()
        self._sizes: deque[int] = deque()
        """Bytes of the last requests added to the engine. It serves them in order, so the waiting ones are the last."""
        self._must_step = False
        self._wait_seconds = 0.0
        self._events: list[Event] = []
        self._started: list[int] = []
        self._finished: list[FinishedRow] = []
        self._report_at = 0.0

    @abstractmethod
    def _load(self) -> ReplicaFacts:
        """Load `_engine`, and return its facts."""

    def start(self, wake: Callable[[], None], notify: Callable[[Event], None]) -> None:
        self._notify = notify

    def serve(self, stamp: Any) -> None:
        self._is_serving = True
        self._max_waiting = max_waiting_requests(self._engine.max_num_seqs)
        self._sizes = deque(maxlen=self._max_waiting)

    def submit(self, run: Any) -> None:
        self.endpoint.submit(run)

    def recall(self, num_rows: int, *, include_started: bool = False) -> None:
        found = self._recall(num_rows, include_started=include_started)
        # The figures do not contain them.
        self._events += [Returned(found), Progressed(self.stats())]

    def _recall(self, num_rows: int, *, include_started: bool) -> list[int]:
        """Drop at most `num_rows` rows. Returns their numbers."""
        found = self.endpoint.recall(num_rows, include_started=include_started)
        if self._is_serving and len(found) < num_rows:
            found += self._recall_prepared(num_rows - len(found), include_started=include_started)
        return found

    def hear(self, outcome: PageOutcome) -> None:
        self.endpoint.documents.hear(outcome)

    def poll(self, timeout_seconds: float) -> list[Event]:
        if self._failure is not None:
            pass  # raised below, after all events
        elif self._engine is None:
            self._events.append(Ready(self._load()))
        elif not self._is_serving:
            self.endpoint.pool.raise_failure()
        else:
            try:
                if not self._must_step:
                    self._admit()
                # The driver is notified of rows before they are under way: they may end this process.
                self._must_step = bool(self._started)
                if not self._must_step and self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        self._finish(output)
                elif not (self._must_step or self._finished):
                    self._wait(0.0 if self._events else timeout_seconds)
            except EngineDeadError as error:
                self._failure = ReplicaDeadError(str(error), request_ids=error.request_ids, blame=error.blame,
                                                 rows=self._numbers_of(error.request_ids))
                self._failure.__cause__ = error
            except NpuRunnerError as error:
                self._failure = error
            self._add_events()
        events, self._events = [*self.endpoint.documents.news(), *self._events], []
        if self._failure is not None and not events:
            raise self._failure
        return events

    def close(self) -> None:
        self._open.close()

    def stats(self) -> ReplicaStats:
        if self._engine is None:
            return ReplicaStats()
        return ReplicaStats(
            engine=replace(self._engine.stats()), wait_seconds=self._wait_seconds,
            num_workers_replaced=self.endpoint.pool.num_replaced)

    def _report(self, phase: str) -> None:
        self._notify(Loading(phase))

    # -- one turn --------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Add prepared requests to the engine, as far as it has room."""
        num_waiting = self._engine.num_waiting
        while self._has_room(num_waiting) and (prepared := self.endpoint.next(0.0)) is not None:
            num_waiting += self._add(prepared)

    def _has_room(self, num_waiting: int) -> bool:
        if num_waiting >= self._max_waiting:
            return False
        return not num_waiting or sum(list(self._sizes)[-num_waiting:]) < _MAX_WAITING_BYTES

    def _add(self, prepared: Prepared) -> int:
        """Add it to the engine, or write its error. Returns the number of its sequences."""
        name, error = prepared.name, prepared.error
        if error is None:
            try:
                self._engine.add_request(name, prepared.prompt, prepared.params)
            except RequestError as refused:
                error = refused
        if error is not None:
            self._conclude(prepared, error)
            return 0
        assert name is not None, "only a request that cannot be served has no name"
        self._in_flight[name] = prepared
        self._sizes.append(prepared.num_bytes)
        self._started.append(prepared.number)
        return prepared.num_sequences

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        prepared = self.endpoint.next(seconds)
        self._wait_seconds += time.monotonic() - started
        if prepared is not None:
            self._add(prepared)

    def _finish(self, output: RequestOutput) -> None:
        name = output.request_id
        # Some completions of a returned request may have finished before.
        is_aborted = any(completion.finish_reason == "abort" for completion in output.completions)
        if is_aborted and name in self._returned:
            self._returned.remove(name)
        else:
            self._conclude(self._in_flight.pop(name), output)

    def _conclude(self, prepared: Prepared, result: RequestOutput | RequestError) -> None:
        if (row := self.endpoint.finish(prepared, result)) is not None:
            self._finished.append(row)

    def _recall_prepared(self, num_rows: int, *, include_started: bool) -> list[int]:
        """Abort at most `num_rows` rows that are prepared or wait in the engine, with `include_started` also running
        ones. Returns their numbers."""
        dropped: list[int] = []
        while len(dropped) < num_rows and (prepared := self.endpoint.next(0.0)) is not None:
            if prepared.error is None:
                dropped.append(prepared.number)
            else:
                self._conclude(prepared, prepared.error)
        num_waiting = self._engine.num_waiting
        for name, prepared in reversed(list(self._in_flight.items())):
            num_waiting -= prepared.num_sequences
            if len(dropped) >= num_rows or (num_waiting < 0 and not include_started):
                break
            self._engine.abort_request(name)
            self._returned.add(name)
            del self._in_flight[name]
            dropped.append(prepared.number)
        return dropped

    def _numbers_of(self, request_ids: tuple[str, ...]) -> tuple[int, ...] | None:
        """The numbers of the requests that are under way; None if there are none."""
        found = tuple(self._in_flight[name].number for name in request_ids if name in self._in_flight)
        return found or None

    def _add_events(self) -> None:
        if self._started:
            self._events.append(Started(self._started))
        if self._finished:
            self._events.append(Finished(self._finished))
        if self._finished or time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + _REPORT_SECONDS
            self._events.append(Progressed(self.stats()))
        self._started, self._finished = [], []
