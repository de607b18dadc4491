"""Moves rows from preprocessing through the engine to finished bytes. Knows nothing of files, resuming or the model.

Everything it holds is bounded: the engine's queue here, finished prompts in the pool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from npu_runner.batch.job.tally import Outcome, answered
from npu_runner.batch.rows.endpoint import AnswerForm, Prompts, RequestParams
from npu_runner.batch.rows.input_row import InputRow
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row, why_unanswered
from npu_runner.batch.rows.preprocessing import PreparedRow, RejectedRow
from npu_runner.engine.waiting import WaitingRoom
from npu_runner.errors import EngineDeadError, ReplicaDeadError, RequestError
from npu_runner.outputs import EngineStats, RequestOutput
from npu_runner.replicas.base import FinishedRow
from npu_runner.workers.pool import Finished, WorkerFailure, WorkerPool


class Engine(Protocol):
    """What serving needs of LLMEngine."""

    @property
    def max_num_seqs(self) -> int: ...
    def add_request(self, request_id: str, prompt: Prompts, params: RequestParams) -> None: ...
    def abort_request(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class _InFlight:
    row: InputRow
    form: AnswerForm
    expected: str | None
    num_sequences: int


class ServingLoop:
    """Serves a pool's rows, turn by turn. `name_of`: the custom_id of a row that no worker could prepare.

    `begun` and `finished` grow; whoever reads them empties them.
    """

    def __init__(
        self,
        engine: Engine,
        pool: WorkerPool[InputRow],
        *,
        name_of: Callable[[InputRow], str | None],
        stamp: JobStamp,
    ):
        self._engine = engine
        self._pool = pool
        self._name_of = name_of
        self._stamp = stamp
        self._in_flight: dict[str, _InFlight] = {}
        self._given_back: set[str] = set()
        self._room = WaitingRoom(engine.max_num_seqs)
        self._must_step = False
        self.begun: list[int] = []
        """Rows that the engine was given; what they do to it comes in the next turn."""
        self.finished: list[FinishedRow] = []
        self.wait_seconds = 0.0

    def turn(self, idle_seconds: float) -> None:
        """Give rows to the engine or, where there are none, run one step; with nothing to do wait for a row.

        Raises what engine and pool raise; ReplicaDeadError, with the rows of its last step, for an engine that died.
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

    def give_back(self, num_rows: int) -> list[int]:
        """Forget so many rows, at most, that wait for the engine or in it, and return their indices."""
        dropped: list[int] = []
        while len(dropped) < num_rows and (finished := self._pool.get()) is not None:
            if isinstance(finished.result, PreparedRow):
                dropped.append(finished.task.sequence)
            else:
                self._take(finished)
        num_waiting = self._engine.stats().num_waiting
        # First come, first served: those that wait are those admitted last.
        for name, flight in reversed(list(self._in_flight.items())):
            num_waiting -= flight.num_sequences
            if num_waiting < 0 or len(dropped) >= num_rows:
                break
            self._engine.abort_request(name)
            self._given_back.add(name)
            del self._in_flight[name]
            dropped.append(flight.row.sequence)
        return dropped

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineDeadError as error:
            rows = [self._in_flight[name].row.sequence for name in error.request_ids if name in self._in_flight]
            raise ReplicaDeadError(
                str(error), request_ids=error.request_ids, blame=error.blame, rows=tuple(rows) or None
            ) from error
        for output in outputs:
            self._finish(output)

    def _admit(self) -> None:
        num_waiting = self._engine.stats().num_waiting
        while self._room.has_room(num_waiting):
            finished = self._pool.get()
            if finished is None:
                break
            num_waiting += self._take(finished)

    def _wait(self, seconds: float) -> None:
        started = time.monotonic()
        finished = self._pool.get(seconds)
        self.wait_seconds += time.monotonic() - started
        if finished is not None:
            self._take(finished)

    def _take(self, finished: Finished[InputRow]) -> bool:
        """Hand a row to the engine (True), or write the error that keeps it from there (False)."""
        row, result = finished.task, finished.result
        if isinstance(result, WorkerFailure):
            self._fail(row, self._name_of(row), RowError(code=result.code, message=result.message, status_code=500))
            return False
        if isinstance(result, RejectedRow):
            self._fail(row, result.custom_id, result.error)
            return False
        assert isinstance(result, PreparedRow), f"preprocessing returned {type(result).__name__}"
        return self._queue(finished)

    def _queue(self, finished: Finished[InputRow]) -> bool:
        row, result = finished.task, finished.result
        try:
            self._engine.add_request(result.custom_id, result.prompt, result.params)
        except RequestError as error:
            refusal = RowError(code=error.code, message=error.message, param=error.param)
            self._fail(row, result.custom_id, refusal)
            return False
        self._in_flight[result.custom_id] = _InFlight(row, result.form, result.expected, result.num_sequences)
        self._room.enter(finished.num_bytes)
        self.begun.append(row.sequence)
        return True

    def _finish(self, output: RequestOutput) -> None:
        name = output.request_id
        if name in self._given_back and output.finish_reason == "abort":
            self._given_back.remove(name)
            return
        flight = self._in_flight.pop(name)
        error = why_unanswered(output)
        if error is not None:
            self._fail(flight.row, name, error)
            return
        data = answer_row(output, custom_id=name, form=flight.form, stamp=self._stamp)
        self.finished.append(FinishedRow(flight.row.sequence, answered(output, flight.expected), data))

    def _fail(self, row: InputRow, custom_id: str | None, error: RowError) -> None:
        data = error_row(error, custom_id=custom_id, line=row.line)
        self.finished.append(FinishedRow(row.sequence, Outcome(failure_code=error.code), data))
