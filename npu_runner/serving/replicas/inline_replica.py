"""A replica in its caller's thread, with the one loop around an engine: admit, step, finish. Knows no row's data.

Every other replica is one of these in a process of its own, on this host or on another one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, NamedTuple

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

# Sequences may wait in the engine while they are fewer than this ...
_FEW_WAITING = 64
# ... or than this share of max_num_seqs, an eighth of which must be able to join before a prefill interrupts others ...
_WAITING_SHARE = 4
# ... or while they are short: a prefill step never lacks prompts where the waiting ones fill this number of steps.
_WAITING_STEPS = 2
MOST_WAITING = 4096
_MAX_WAITING_BYTES = 1 << 29
# The tokens of prompts that are added before the next step is handed over, where enough others wait.
_MOST_ADDED_TOKENS = 1 << 15
# To unmap this number of bytes takes a tenth of a millisecond at least.
_LARGE_BYTES = 1 << 20
_MOST_READY = 1024
_REPORT_SECONDS = 0.25


class RowsAhead(NamedTuple):
    """The most rows ahead of a replica's steps: `ready` ones are prepared, `waiting` ones wait in its engine."""

    ready: int
    waiting: int


def few_waiting(max_num_seqs: int) -> int:
    """Sequences that may wait in the engine whatever their lengths."""
    return max(_FEW_WAITING, max_num_seqs // _WAITING_SHARE)


def rows_ahead(max_num_seqs: int, *, are_large: bool = False) -> RowsAhead:
    """`are_large`: the rows come with the bytes of their images."""
    few = few_waiting(max_num_seqs)
    return RowsAhead(few, few) if are_large else RowsAhead(max(_MOST_READY, few), MOST_WAITING)


class _Waiting:
    """The sizes of the sequences that wait in the engine: it serves them in order, so they are the last that were
    added. Preempted ones, which wait again, count no more."""

    def __init__(self) -> None:
        self._sizes: deque[tuple[int, int]] = deque()
        self.num_tokens = self.num_bytes = 0

    def add(self, num_tokens: int, num_bytes: int) -> None:
        self._sizes.append((num_tokens, num_bytes))
        self.num_tokens += num_tokens
        self.num_bytes += num_bytes

    def keep_last(self, num_sequences: int) -> None:
        """No more than `num_sequences` still wait."""
        while len(self._sizes) > num_sequences:
            num_tokens, num_bytes = self._sizes.popleft()
            self.num_tokens -= num_tokens
            self.num_bytes -= num_bytes


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
        self._dropping = self._open.enter_context(ThreadPoolExecutor(1, "dropping"))
        self._few_waiting = few_waiting(self._engine.max_num_seqs)
        self._most_tokens = _WAITING_STEPS * self._engine.max_num_batched_tokens
        self._waiting = _Waiting()

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
                self._admit()
                if self._engine.has_unfinished_requests():
                    for output in self._engine.step():
                        self._finish(output)
                    # The driver is notified of rows before they are under way: they may end this process.
                    self._started = self._numbers_of(self._engine.pop_started())
                elif not self._finished:
                    self._wait(0.0 if self._events else timeout_seconds)
            except EngineDeadError as error:
                self._failure = ReplicaDeadError(str(error), request_ids=error.request_ids, blame=error.blame,
                                                 rows=tuple(self._numbers_of(error.request_ids)) or None)
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
        """Add prepared requests to the engine, as far as it has room. Where enough wait, steps under way would end
        while many are added."""
        num_waiting, room = self._engine.num_waiting, _MOST_ADDED_TOKENS
        while self._has_room(num_waiting) and (prepared := self.endpoint.next(0.0)) is not None:
            num_waiting += self._add(prepared)
            room -= prepared.num_tokens
            if room < 0 and num_waiting >= self._few_waiting:
                break

    def _has_room(self, num_waiting: int) -> bool:
        waiting = self._waiting
        waiting.keep_last(num_waiting)
        is_short = num_waiting < MOST_WAITING and waiting.num_tokens < self._most_tokens
        return (num_waiting < self._few_waiting or is_short) and waiting.num_bytes < _MAX_WAITING_BYTES

    def _add(self, prepared: Prepared) -> int:
        """Add it to the engine, or write its error. Returns the number of its sequences."""
        name, error = prepared.name, prepared.error
        sizes: Sequence[int] = ()
        if error is None:
            try:
                sizes = self._engine.add_request(name, prepared.prompt, prepared.params)
            except RequestError as refused:
                error = refused
        if error is not None:
            self._conclude(prepared, error)
            return 0
        assert name is not None, "only a request that cannot be served has no name"
        self._in_flight[name] = prepared
        for index, num_tokens in enumerate(sizes):
            self._waiting.add(num_tokens, 0 if index else prepared.num_bytes)
        return len(sizes)

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        prepared = self.endpoint.next(seconds)
        self._wait_seconds += time.monotonic() - started
        if prepared is not None:
            self._add(prepared)

    def _finish(self, output: RequestOutput) -> None:
        name = output.request_id
        # Some completions of a returned request may have finished before.
        if name in self._returned and any(completion.finish_reason == "abort" for completion in output.completions):
            self._returned.remove(name)
        else:
            self._conclude(self._in_flight[name], output)
            self._drop(name)

    def _drop(self, name: str) -> None:
        """Let go of a request. Large memory of a worker is unmapped by a thread, while this one hands over steps."""
        if self._in_flight[name].num_bytes < _LARGE_BYTES:
            del self._in_flight[name]
        else:
            self._dropping.submit(_let_go, self._in_flight.pop(name))

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

    def _numbers_of(self, request_ids: Sequence[str]) -> list[int]:
        """The numbers of the requests that the engine has."""
        return [self._in_flight[name].number for name in request_ids if name in self._in_flight]

    def _add_events(self) -> None:
        if self._started:
            self._events.append(Started(self._started))
        if self._finished:
            self._events.append(Finished(self._finished))
        if self._finished or time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + _REPORT_SECONDS
            self._events.append(Progressed(self.stats()))
        self._started, self._finished = [], []


def _let_go(_: object) -> None:
    """The thread that runs this has the last reference."""
