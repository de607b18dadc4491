"""Gives an engine what is prepared and runs its steps, turn by turn; says what was begun and what is finished.

What prepares rows, and what a finished one looks like, is its subclasses' matter. Knows nothing of files.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from npu_runner.engine.waiting import WaitingRoom
from npu_runner.errors import EngineDeadError, ReplicaDeadError
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.replicas.base import FinishedRow


class Engine(Protocol):
    """What serving needs of LLMEngine."""

    @property
    def max_num_seqs(self) -> int: ...
    def add_request(self, request_id: str, prompt: PromptInputs | Sequence[PromptInputs],
                    params: SamplingParams | PoolingParams) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class Flight:
    """A row that the engine has. `number`: its index; `num_sequences`: completions that were asked for."""

    number: int
    num_sequences: int


AnyFlight = TypeVar("AnyFlight", bound=Flight)


class EngineLoop(ABC, Generic[AnyFlight]):
    """`begun` and `finished` grow; whoever reads them empties them. Everything it holds is bounded."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._in_flight: dict[str, AnyFlight] = {}
        self._given_back: set[str] = set()
        self._room = WaitingRoom(engine.max_num_seqs)
        self._must_step = False
        self.begun: list[int] = []
        """Rows that the engine was given; what they do to it comes in the next turn."""
        self.finished: list[FinishedRow] = []
        self.wait_seconds = 0.0

    def turn(self, idle_seconds: float) -> None:
        """Give rows to the engine or, where there are none, run one step; with nothing to do wait for a row.

        Raises what engine and preprocessing raise; ReplicaDeadError, with the rows of its last step, for an engine that
        died.
        """
        if not self._must_step:
            self._admit()
        # Who looks on hears of rows before they are under way: they may be the end of this process.
        self._must_step = bool(self.begun)
        if self._must_step:
            return
        if self._engine.has_unfinished_requests():
            self._step()
        elif not self.finished:
            self._wait(idle_seconds)

    def give_back(self, num_rows: int, *, begun: bool = False) -> list[int]:
        """Forget so many rows, at most, that wait for the engine or in it, and return their indices.

        With `begun` those that it works on, too.
        """
        dropped = self._give_back_prepared(num_rows)
        for name, flight in list(self._may_leave(begun)):
            if len(dropped) >= num_rows:
                break
            self._engine.abort_request(name)
            self._given_back.add(name)
            del self._in_flight[name]
            dropped.append(flight.number)
        return dropped

    def _may_leave(self, begun: bool) -> Iterator[tuple[str, AnyFlight]]:
        """The last ones first. First come, first served: those that wait are those admitted last."""
        num_waiting = self._engine.stats().num_waiting
        for name, flight in reversed(self._in_flight.items()):
            num_waiting -= flight.num_sequences
            if num_waiting < 0 and not begun:
                return
            yield name, flight

    # -- what subclasses know --------------------------------------------------------------------------------------

    @abstractmethod
    def _next(self, timeout_seconds: float) -> Any:
        """Something that is prepared, or None."""

    @abstractmethod
    def _take(self, prepared: Any) -> int:
        """Hand it to the engine, or write the error that keeps it from there. Returns how many more wait now."""

    @abstractmethod
    def _finish(self, flight: AnyFlight, output: RequestOutput) -> None:
        """Make a finished row of it."""

    @abstractmethod
    def _give_back_prepared(self, num_rows: int) -> list[int]:
        """Forget so many rows, at most, that the engine has not got, and return their indices."""

    # -- one turn --------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineDeadError as error:
            rows = [self._in_flight[name].number for name in error.request_ids if name in self._in_flight]
            raise ReplicaDeadError(
                str(error), request_ids=error.request_ids, blame=error.blame, rows=tuple(rows) or None
            ) from error
        for output in outputs:
            name = output.request_id
            # Some completions of a request that was given back may have been finished by then.
            is_aborted = any(completion.finish_reason == "abort" for completion in output.completions)
            if is_aborted and name in self._given_back:
                self._given_back.remove(name)
            else:
                self._finish(self._in_flight.pop(name), output)

    def _admit(self) -> None:
        num_waiting = self._engine.stats().num_waiting
        while self._room.has_room(num_waiting):
            prepared = self._next(0.0)
            if prepared is None:
                break
            num_waiting += self._take(prepared)

    def _enter(self, name: str, flight: AnyFlight, num_bytes: int) -> None:
        """The engine has taken it."""
        self._in_flight[name] = flight
        self._room.enter(num_bytes)
        self.begun.append(flight.number)

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        prepared = self._next(seconds)
        self.wait_seconds += time.monotonic() - started
        if prepared is not None:
            self._take(prepared)
