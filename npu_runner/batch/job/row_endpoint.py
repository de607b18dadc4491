"""A job's rows on their way to an engine: prepared in worker processes, answered as lines of the output.

Knows nothing of files, resuming or the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from npu_runner.batch.job.summary import Outcome, answered
from npu_runner.batch.rows.endpoint import AnswerForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row, why_unanswered
from npu_runner.batch.rows.preprocessing import PreparedRow, RejectedRow
from npu_runner.errors import RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.engine_loop import Endpoint, Flight, Prepared
from npu_runner.serving.replica import FinishedRow, RawRow, RowRun
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool


@dataclass(frozen=True)
class _Row:
    """What it takes to write a row's answer."""

    row: RawRow
    form: AnswerForm
    expected: str | None


class RowEndpoint(Endpoint):
    """`prepare`: a RowPreprocessor; `name_of`: the custom_id of a row that no worker could prepare; `inherited`:
    descriptors that workers have too."""

    def __init__(self, prepare: Callable[[RawRow], Any], limits: PoolLimits, inherited: tuple[int, ...], *,
                 name_of: Callable[[RawRow], str | None]):
        self.pool: WorkerPool[RawRow] = WorkerPool(prepare, limits, inherited, seen=self._look_at)
        self._name_of = name_of
        self._stamp: JobStamp | None = None
        self.wants_grammars = threading.Event()
        """A row that was prepared has a grammar. Of use while the model loads."""

    @property
    def num_replaced(self) -> int:
        return self.pool.num_replaced

    def _look_at(self, prepared: Any) -> None:
        """In the pool's thread."""
        if isinstance(prepared, PreparedRow) and getattr(prepared.params, "structured_outputs", None) is not None:
            self.wants_grammars.set()

    def begin(self, terms: JobStamp) -> None:
        self._stamp = terms

    def submit(self, run: RowRun) -> None:
        for row in run.rows():
            self.pool.submit(row)

    def take_back(self, num_requests: int) -> list[int]:
        return [row.number for row in self.pool.take_back(num_requests)]

    def next(self, timeout_seconds: float) -> Prepared | None:
        finished = self.pool.get(timeout_seconds)
        if finished is None:
            return None
        row, result = finished.task, finished.result
        if isinstance(result, WorkerFailure):
            error = RowError(code=result.code, message=result.message, status_code=500)
            return Prepared(Flight(row.number), failure=_failed(row, self._name_of(row), error))
        if isinstance(result, RejectedRow):
            return Prepared(Flight(row.number), failure=_failed(row, result.custom_id, result.error))
        assert isinstance(result, PreparedRow), f"preprocessing returned {type(result).__name__}"
        flight = Flight(row.number, result.num_sequences, _Row(row, result.form, result.expected))
        return Prepared(flight, result.custom_id, result.prompt, result.params, finished.num_bytes)

    def answer(self, flight: Flight, output: RequestOutput) -> FinishedRow:
        name, of = output.request_id, flight.row
        error = why_unanswered(output)
        if error is not None:
            return _failed(of.row, name, error)
        assert self._stamp is not None, "no row is answered before the job begins"
        data = answer_row(output, custom_id=name, form=of.form, stamp=self._stamp)
        return FinishedRow(flight.number, answered(output, of.expected), data)

    def refuse(self, flight: Flight, name: str, error: RequestError) -> FinishedRow:
        return _failed(flight.row.row, name, RowError(code=error.code, message=error.message, param=error.param))

    def raise_failure(self) -> None:
        self.pool.raise_failure()

    def close(self) -> None:
        self.pool.close()


def _failed(row: RawRow, custom_id: str | None, error: RowError) -> FinishedRow:
    data = error_row(error, custom_id=custom_id, line=row.line)
    return FinishedRow(row.number, Outcome(failure_code=error.code), data)
