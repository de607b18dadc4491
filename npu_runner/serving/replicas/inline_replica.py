"""A replica in its caller's thread: makes events of what the loop around an engine does. Knows no row's contents.

Every other replica is one of these in a process of its own, on this host or on another one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from npu_runner.errors import EngineDeadError, NpuRunnerError, ReplicaDeadError
from npu_runner.serving.engine_loop import Endpoint, EngineLoop
from npu_runner.serving.replica import (
    Begun,
    Event,
    Finished,
    Loading,
    Progressed,
    Ready,
    Replica,
    ReplicaFacts,
    ReplicaStats,
    Returned,
)

_REPORT_SECONDS = 0.25


class InlineReplica(Replica):
    """Works in `poll`: the first one loads the model. What subclasses enter into `_open` ends with it."""

    can_restart = False
    is_inline = True
    endpoint: Endpoint
    """Prepares the rows and writes their answers. Made by `start` or `_load`."""

    def __init__(self, name: str):
        self.name = name
        self._open = ExitStack()
        self._events: list[Event] = []
        self._engine: Any = None
        self._loop: EngineLoop | None = None
        self._failure: NpuRunnerError | None = None
        self._report_at = 0.0
        self._tell: Callable[[Event], None]

    @abstractmethod
    def _load(self) -> ReplicaFacts:
        """Have `_engine` loaded, and say what it is."""

    def start(self, wake: Callable[[], None], tell: Callable[[Event], None]) -> None:
        self._tell = tell

    def begin(self, terms: Any) -> None:
        self.endpoint.begin(terms)
        self._loop = EngineLoop(self._engine, self.endpoint)

    def submit(self, run: Any) -> None:
        self.endpoint.submit(run)

    def recall(self, num_rows: int, *, begun: bool = False) -> None:
        found = self.endpoint.recall(num_rows)
        if self._loop is not None and len(found) < num_rows:
            found += self._loop.recall(num_rows - len(found), begun=begun)
        # What is under way is told without them.
        self._events += [Returned(found), Progressed(self.stats())]

    def poll(self, timeout_seconds: float) -> list[Event]:
        if self._failure is not None:
            pass  # raised below, once all is told
        elif self._engine is None:
            self._events.append(Ready(self._load()))
        elif self._loop is None:
            self.endpoint.pool.raise_failure()
        else:
            loop = self._loop
            try:
                loop.turn(0.0 if self._events else timeout_seconds)
            except EngineDeadError as error:
                self._failure = ReplicaDeadError(str(error), request_ids=error.request_ids, blame=error.blame,
                                                 rows=loop.numbers_of(error.request_ids) or None)
                self._failure.__cause__ = error
            except NpuRunnerError as error:
                self._failure = error
            self._tell_of(loop)
        events, self._events = self._events, []
        if self._failure is not None and not events:
            raise self._failure
        return events

    def close(self) -> None:
        self._open.close()

    def stats(self) -> ReplicaStats:
        """The figures of this moment."""
        if self._engine is None:
            return ReplicaStats()
        return ReplicaStats(
            engine=replace(self._engine.stats()), wait_seconds=0.0 if self._loop is None else self._loop.wait_seconds,
            num_workers_replaced=self.endpoint.pool.num_replaced)

    def _report(self, phase: str) -> None:
        """The progress of an engine."""
        self._tell(Loading(phase))

    def _tell_of(self, loop: EngineLoop) -> None:
        if loop.begun:
            self._events.append(Begun(loop.begun))
        if loop.finished:
            self._events.append(Finished(loop.finished))
        if loop.finished or time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + _REPORT_SECONDS
            self._events.append(Progressed(self.stats()))
        loop.begun, loop.finished = [], []
