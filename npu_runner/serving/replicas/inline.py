"""A replica in its caller's thread: makes events of what a loop over an engine does. Knows nothing of what a row is.

Every other replica is one of these in a process of its own, on this host or on another one.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from npu_runner.errors import NpuRunnerError
from npu_runner.serving.replicas.base import (
    Begun,
    Event,
    Finished,
    Progressed,
    Ready,
    Replica,
    ReplicaFacts,
    ReplicaStats,
    Returned,
)
from npu_runner.serving.replicas.engine_loop import EngineLoop

_REPORT_SECONDS = 0.25


class InlineReplica(Replica):
    """Works in `poll`: the first one loads the model. What subclasses enter into `_open` ends with it."""

    can_restart = False

    def __init__(self, name: str):
        self.name = name
        self._open = ExitStack()
        self._events: list[Event] = []
        self._engine: Any = None
        self._loop: EngineLoop[Any] | None = None
        self._failure: NpuRunnerError | None = None
        self._report_at = 0.0

    @abstractmethod
    def _load(self) -> ReplicaFacts:
        """Have `_engine` loaded, and say what it is."""

    @abstractmethod
    def _wait_to_begin(self) -> None:
        """Called while the engine is loaded and `begin` has not come. Raises what rows cannot be prepared for."""

    @abstractmethod
    def _num_workers_replaced(self) -> int:
        """Preprocessing workers that died so far."""

    def poll(self, timeout_seconds: float) -> list[Event]:
        if self._failure is None:
            self._work(timeout_seconds)
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
            engine=replace(self._engine.stats()),
            wait_seconds=0.0 if self._loop is None else self._loop.wait_seconds,
            num_workers_replaced=self._num_workers_replaced(),
        )

    def _give_back(self, indices: list[int]) -> None:
        """Rows that were asked back are the driver's again, and what is under way is told without them."""
        self._events += [Returned(indices), Progressed(self.stats())]

    def _work(self, timeout_seconds: float) -> None:
        if self._engine is None:
            self._events.append(Ready(self._load()))
        elif self._loop is None:
            self._wait_to_begin()
        else:
            self._serve(self._loop, 0.0 if self._events else timeout_seconds)

    def _serve(self, loop: EngineLoop[Any], timeout_seconds: float) -> None:
        try:
            loop.turn(timeout_seconds)
        except NpuRunnerError as error:
            self._failure = error  # raised by the next `poll`: what was done before it is done
        if loop.begun:
            self._events.append(Begun(loop.begun))
        if loop.finished:
            self._events.append(Finished(loop.finished))
        if loop.finished or time.monotonic() >= self._report_at:
            self._report_at = time.monotonic() + _REPORT_SECONDS
            self._events.append(Progressed(self.stats()))
        loop.begun, loop.finished = [], []
