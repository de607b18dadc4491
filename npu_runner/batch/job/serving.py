"""Moves rows from preprocessing through the engine to finished bytes. Knows nothing of files, resuming or the model.

Everything it holds is bounded: the engine's queue here, finished prompts in the pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from npu_runner.batch.job.summary import Outcome, answered
from npu_runner.batch.rows.endpoint import AnswerForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row, why_unanswered
from npu_runner.batch.rows.preprocessing import PreparedRow, RejectedRow
from npu_runner.errors import RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.replicas.base import FinishedRow, RawRow
from npu_runner.serving.replicas.engine_loop import Engine, EngineLoop, Flight
from npu_runner.serving.workers.pool import Finished, WorkerFailure, WorkerPool


@dataclass(frozen=True)
class _InFlight(Flight):
    row: RawRow
    form: AnswerForm
    expected: str | None


class ServingLoop(EngineLoop[_InFlight]):
    """Serves a pool's rows, turn by turn. `name_of`: the custom_id of a row that no worker could prepare."""

    def __init__(
        self,
        engine: Engine,
        pool: WorkerPool[RawRow],
        *,
        name_of: Callable[[RawRow], str | None],
        stamp: JobStamp,
    ):
        super().__init__(engine)
        self._pool = pool
        self._name_of = name_of
        self._stamp = stamp

    def _next(self, timeout_seconds: float) -> Finished[RawRow] | None:
        return self._pool.get(timeout_seconds)

    def _give_back_prepared(self, num_rows: int) -> list[int]:
        dropped: list[int] = []
        while len(dropped) < num_rows and (finished := self._pool.get()) is not None:
            if isinstance(finished.result, PreparedRow):
                dropped.append(finished.task.number)
            else:
                self._take(finished)
        return dropped

    def _take(self, prepared: Finished[RawRow]) -> int:
        row, result = prepared.task, prepared.result
        if isinstance(result, WorkerFailure):
            self._fail(row, self._name_of(row), RowError(code=result.code, message=result.message, status_code=500))
            return 0
        if isinstance(result, RejectedRow):
            self._fail(row, result.custom_id, result.error)
            return 0
        assert isinstance(result, PreparedRow), f"preprocessing returned {type(result).__name__}"
        return int(self._queue(prepared))

    def _queue(self, finished: Finished[RawRow]) -> bool:
        row, result = finished.task, finished.result
        try:
            self._engine.add_request(result.custom_id, result.prompt, result.params)
        except RequestError as error:
            refusal = RowError(code=error.code, message=error.message, param=error.param)
            self._fail(row, result.custom_id, refusal)
            return False
        flight = _InFlight(row.number, result.num_sequences, row, result.form, result.expected)
        self._enter(result.custom_id, flight, finished.num_bytes)
        return True

    def _finish(self, flight: _InFlight, output: RequestOutput) -> None:
        name = output.request_id
        error = why_unanswered(output)
        if error is not None:
            self._fail(flight.row, name, error)
            return
        data = answer_row(output, custom_id=name, form=flight.form, stamp=self._stamp)
        self.finished.append(FinishedRow(flight.row.number, answered(output, flight.expected), data))

    def _fail(self, row: RawRow, custom_id: str | None, error: RowError) -> None:
        data = error_row(error, custom_id=custom_id, line=row.line)
        self.finished.append(FinishedRow(row.number, Outcome(failure_code=error.code), data))
