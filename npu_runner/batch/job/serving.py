"""Moves rows from preprocessing through the engine to the output. Knows nothing of files, resuming or the model.

Everything it holds is bounded: the engine's queue here, finished prompts in the pool.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from npu_runner.batch.files.suspects import Suspects
from npu_runner.batch.job.delivery import Delivery
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.job.tally import Outcome, Tally, answered
from npu_runner.batch.rows.endpoint import AnswerForm
from npu_runner.batch.rows.input_row import InputRow
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row, why_unanswered
from npu_runner.batch.rows.preprocessing import PreparedRow, RejectedRow
from npu_runner.errors import EngineDeadError, RequestError
from npu_runner.multimodal.inputs import PromptInputs
from npu_runner.outputs import EngineStats, RequestOutput
from npu_runner.sampling_params import SamplingParams
from npu_runner.workers.pool import Finished, WorkerFailure, WorkerPool

# Enough that a prefill step never lacks prompts, few enough that their pixels fit ...
_LEAST_WAITING_REQUESTS = 64
# ... and this share of max_num_seqs, since an eighth of it must be able to join before a prefill interrupts others.
_WAITING_SHARE = 4
MAX_WAITING_BYTES = 1 << 29
_IDLE_SECONDS = 0.2


def max_waiting_requests(max_num_seqs: int) -> int:
    """Most requests that wait in the engine, and most that wait for it in the pool."""
    return max(_LEAST_WAITING_REQUESTS, max_num_seqs // _WAITING_SHARE)


class Engine(Protocol):
    """What serving needs of LLMEngine."""

    @property
    def max_num_seqs(self) -> int: ...
    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def has_unfinished_requests(self) -> bool: ...
    def stats(self) -> EngineStats: ...


@dataclass(frozen=True)
class _InFlight:
    row: InputRow
    form: AnswerForm
    expected: str | None


class ServingLoop:
    """Serves a pool's rows until there are none or `should_stop` says so; rows go to `delivery` as they finish.

    `name_of`: the custom_id of a row that no worker could prepare.
    """

    def __init__(
        self,
        engine: Engine,
        pool: WorkerPool[InputRow],
        delivery: Delivery,
        *,
        name_of: Callable[[InputRow], str | None],
        stamp: JobStamp,
        tally: Tally,
        progress: Progress,
        should_stop: Callable[[], bool],
        suspects: Suspects | None = None,
    ):
        self._engine = engine
        self._pool = pool
        self._name_of = name_of
        self._stamp = stamp
        self._tally = tally
        self._progress = progress
        self._should_stop = should_stop
        self._in_flight: dict[str, _InFlight] = {}
        self._delivery = delivery
        self._max_waiting = max_waiting_requests(engine.max_num_seqs)
        self._sizes: deque[int] = deque(maxlen=self._max_waiting)
        self._suspects = suspects or Suspects(None)
        self._to_run_alone: deque[Finished[InputRow]] = deque()
        self._is_one_alone = False

    def run(self) -> None:
        """Raises what the engine, the pool or `delivery` raise. Rows still under way when it stops are dropped."""
        while not self._should_stop():
            self._admit()
            if self._engine.has_unfinished_requests():
                self._step()
            elif self._pool.is_over and not self._to_run_alone:
                break
            else:
                self._wait()
            self._delivery.count()
            self._progress.update(self._tally, self._engine.stats)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except EngineDeadError as error:
            self._suspects.accuse(error)
            raise
        for output in outputs:
            self._finish(output)

    def _admit(self) -> None:
        self._is_one_alone &= bool(self._in_flight)
        num_waiting = self._engine.stats().num_waiting
        while self._may_admit(num_waiting):
            finished = self._pool.get()
            if finished is None:
                break
            num_waiting += self._take(finished)
        if self._to_run_alone and not self._in_flight:
            self._is_one_alone = self._queue(self._to_run_alone.popleft())

    def _may_admit(self, num_waiting: int) -> bool:
        if self._is_one_alone or self._to_run_alone:
            return False
        return num_waiting < self._max_waiting and self._bytes_of_last(num_waiting) < MAX_WAITING_BYTES

    def _bytes_of_last(self, count: int) -> int:
        """First come, first served: the requests that wait are those admitted last."""
        return sum(list(self._sizes)[-count:]) if count else 0

    def _wait(self) -> None:
        started = time.monotonic()
        finished = self._pool.get(_IDLE_SECONDS)
        self._tally.wait_seconds += time.monotonic() - started
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
        verdict = self._suspects.verdict(result.custom_id)
        if verdict is not None:
            error = RowError(code=str(verdict.code), message=verdict.message, status_code=500)
            self._fail(row, result.custom_id, error)
            return False
        if self._suspects.is_one(result.custom_id):
            self._to_run_alone.append(finished)
            return False
        return self._queue(finished)

    def _queue(self, finished: Finished[InputRow]) -> bool:
        row, result = finished.task, finished.result
        try:
            self._engine.add_request(result.custom_id, result.prompt, result.params)
        except RequestError as error:
            refusal = RowError(code=error.code, message=error.message, param=error.param)
            self._fail(row, result.custom_id, refusal)
            return False
        self._in_flight[result.custom_id] = _InFlight(row, result.form, result.expected)
        self._sizes.append(finished.num_bytes)
        return True

    def _finish(self, output: RequestOutput) -> None:
        flight = self._in_flight.pop(output.request_id)
        error = why_unanswered(output)
        if error is not None:
            self._fail(flight.row, output.request_id, error)
            return
        data = answer_row(output, custom_id=output.request_id, form=flight.form, stamp=self._stamp)
        self._delivery.put(flight.row, data, answered(output, flight.expected))

    def _fail(self, row: InputRow, custom_id: str | None, error: RowError) -> None:
        self._delivery.put(row, error_row(error, custom_id=custom_id, line=row.line), Outcome(failure_code=error.code))
