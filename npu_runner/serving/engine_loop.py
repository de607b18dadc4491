"""The one loop around an engine: admit what an endpoint has prepared, step, hand what is finished to the endpoint.

An `Endpoint` prepares requests and writes their answers: rows of a job (batch/job/row_server.py), prompts of `LLM`
and Ray Data (calls/prompt_server.py). The loop works in its caller's thread. Knows nothing of files.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from npu_runner.errors import RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.replica import FinishedRow
from npu_runner.serving.workers.pool import WorkerPool

if TYPE_CHECKING:  # torch comes with it, and is loaded by whoever makes one
    from npu_runner.engine.llm_engine import LLMEngine

# Enough that a prefill step never lacks prompts, few enough that their pixels fit ...
_LEAST_WAITING_REQUESTS = 64
# ... and this share of max_num_seqs, since an eighth of it must be able to join before a prefill interrupts others.
_WAITING_SHARE = 4
MAX_WAITING_BYTES = 1 << 29


@dataclass(frozen=True)
class Flight:
    """A request on its way through the engine. `number`: its index; `num_sequences`: its completions; `row`: what else
    its endpoint needs to write its answer."""

    number: int
    num_sequences: int = 1
    row: Any = None


@dataclass(frozen=True)
class Prepared:
    """What the engine takes. `name`: the request_id; `num_bytes`: what the prompt takes where workers made it, else 0;
    `failure`: the answer of one that the engine never gets."""

    flight: Flight
    name: str = ""
    prompt: Any = None
    params: Any = None
    num_bytes: int = 0
    failure: FinishedRow | None = None


class Endpoint(ABC):
    """Prepares requests ahead of an engine, and writes what comes of them. What it holds is bounded by its caller."""

    pool: WorkerPool[Any]
    """The workers that prepare them; closed by whoever has made the endpoint."""

    @abstractmethod
    def begin(self, terms: Any) -> None:
        """From here on answers are written. `terms`: what all of them have in common."""

    @abstractmethod
    def submit(self, run: Any) -> None:
        """Requests to prepare, as the driver's `make_run` has made them."""

    @abstractmethod
    def recall(self, num_requests: int) -> list[int]:
        """Abort as many requests, at most, that are not being prepared yet; returns their indices, the last first."""

    @abstractmethod
    def next(self, timeout_seconds: float) -> Prepared | None:
        """What is prepared next; None when nothing is within the time."""

    @abstractmethod
    def answer(self, flight: Flight, output: RequestOutput) -> FinishedRow:
        """What the engine has made of it."""

    @abstractmethod
    def refuse(self, flight: Flight, name: str, error: RequestError) -> FinishedRow:
        """The engine would not take it."""


def max_waiting_requests(max_num_seqs: int) -> int:
    """Most requests that wait in the engine, and most that wait, prepared, for it."""
    return max(_LEAST_WAITING_REQUESTS, max_num_seqs // _WAITING_SHARE)


class EngineLoop:
    """`begun` and `finished` grow; their reader empties them. Everything it holds is bounded."""

    def __init__(self, engine: LLMEngine, endpoint: Endpoint):
        self._engine = engine
        self._endpoint = endpoint
        self._in_flight: dict[str, Flight] = {}
        self._given_back: set[str] = set()
        self._max_waiting = max_waiting_requests(engine.max_num_seqs)
        self._sizes: deque[int] = deque(maxlen=self._max_waiting)
        """Bytes of those that the engine was given last. First come, first served: those that wait are among them."""
        self._must_step = False
        self.begun: list[int] = []
        """Rows that the engine was given; what they do to it comes in the next turn."""
        self.finished: list[FinishedRow] = []
        self.wait_seconds = 0.0

    def turn(self, idle_seconds: float) -> None:
        """Give rows to the engine or, where there are none, run one step; with nothing to do wait for a row.

        Raises what engine and preprocessing raise.
        """
        if not self._must_step:
            self._admit()
        # Who looks on hears of rows before they are under way: they may be the end of this process.
        self._must_step = bool(self.begun)
        if self._must_step:
            return
        if self._engine.has_unfinished_requests():
            for output in self._engine.step():
                self._finish(output)
        elif not self.finished:
            self._wait(idle_seconds)

    def numbers_of(self, request_ids: Sequence[str]) -> tuple[int, ...]:
        """The indices of those that are under way."""
        return tuple(self._in_flight[name].number for name in request_ids if name in self._in_flight)

    def recall(self, num_rows: int, *, begun: bool = False) -> list[int]:
        """Abort so many rows, at most, that are prepared or wait in the engine, and return their indices.

        With `begun` those that it works on, too.
        """
        dropped: list[int] = []
        while len(dropped) < num_rows and (prepared := self._endpoint.next(0.0)) is not None:
            if prepared.failure is None:
                dropped.append(prepared.flight.number)
            else:
                self.finished.append(prepared.failure)
        num_waiting = self._engine.num_waiting
        for name, flight in reversed(list(self._in_flight.items())):
            num_waiting -= flight.num_sequences
            if len(dropped) >= num_rows or (num_waiting < 0 and not begun):
                break
            self._engine.abort_request(name)
            self._given_back.add(name)
            del self._in_flight[name]
            dropped.append(flight.number)
        return dropped

    # -- one turn --------------------------------------------------------------------------------------------------

    def _finish(self, output: RequestOutput) -> None:
        name = output.request_id
        # Some completions of a request that was given back may have been finished by then.
        is_aborted = any(completion.finish_reason == "abort" for completion in output.completions)
        if is_aborted and name in self._given_back:
            self._given_back.remove(name)
        else:
            self.finished.append(self._endpoint.answer(self._in_flight.pop(name), output))

    def _admit(self) -> None:
        num_waiting = self._engine.num_waiting
        while self._has_room(num_waiting) and (prepared := self._endpoint.next(0.0)) is not None:
            num_waiting += self._take(prepared)

    def _has_room(self, num_waiting: int) -> bool:
        if num_waiting >= self._max_waiting:
            return False
        return not num_waiting or sum(list(self._sizes)[-num_waiting:]) < MAX_WAITING_BYTES

    def _take(self, prepared: Prepared) -> int:
        """Hand it to the engine, or have the error written that keeps it from there. Returns how many more wait."""
        flight, failure = prepared.flight, prepared.failure
        if failure is None:
            try:
                self._engine.add_request(prepared.name, prepared.prompt, prepared.params)
            except RequestError as error:
                failure = self._endpoint.refuse(flight, prepared.name, error)
        if failure is not None:
            self.finished.append(failure)
            return 0
        self._in_flight[prepared.name] = flight
        self._sizes.append(prepared.num_bytes)
        self.begun.append(flight.number)
        return flight.num_sequences

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        prepared = self._endpoint.next(seconds)
        self.wait_seconds += time.monotonic() - started
        if prepared is not None:
            self._take(prepared)
