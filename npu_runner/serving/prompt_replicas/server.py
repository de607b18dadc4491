"""A replica of LLM: requests come as rows, answers go back as bytes. Knows nothing of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

import npu_runner
from npu_runner.config import RunnerConfig
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.engine.waiting import max_waiting_requests
from npu_runner.errors import RequestError
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.prompt_feed import PromptFeed, ReadyRequest, Request
from npu_runner.serving.prompt_replicas.wire import pack_answer, unpack_request
from npu_runner.serving.replicas.base import FinishedRow, RawRow, ReplicaFacts, RowRun
from npu_runner.serving.replicas.engine_loop import EngineLoop, Flight
from npu_runner.serving.replicas.inline import InlineReplica
from npu_runner.serving.workers.options import PreprocessingOptions
from npu_runner.serving.workers.pool import NOT_YET
from npu_runner.serving.workers.prompts import PromptWorkers
from npu_runner.strategies.opened import open_checkpoint


class PromptServer(InlineReplica):
    """Answers requests as an LLM of one replica would: the number of a row is the number of its request."""

    num_rows_ahead = 0

    def __init__(self, config: RunnerConfig, options: PreprocessingOptions, name: str):
        super().__init__(name)
        self._config = config
        self._options = options
        self._rows: deque[RawRow] = deque()

    def start(self, wake: Callable[[], None]) -> None:
        """The first `poll` loads the model; there are no requests before that is done."""

    def _load(self) -> ReplicaFacts:
        engine = self._engine = self._open.enter_context(LLMEngine(open_checkpoint(self._config)))
        max_waiting = max_waiting_requests(engine.max_num_seqs)
        self._workers = PromptWorkers(engine.processor, self._options, max_ready=max_waiting)
        self._open.callback(self._workers.close)
        return ReplicaFacts(
            version=npu_runner.__version__, settings=engine.describe(), ledger=engine.ledger,
            max_rows=engine.max_num_seqs + 2 * max_waiting + self._workers.num_workers,
        )  # fmt: skip

    def begin(self, terms: Any) -> None:
        self._loop = PromptLoop(self._engine, self._workers, self._rows)

    def submit(self, run: RowRun) -> None:
        self._rows.extend(run.rows())

    def recall(self, num_rows: int, *, begun: bool = False) -> None:
        found = [self._rows.pop().number for _ in range(min(num_rows, len(self._rows)))]
        if self._loop is not None and len(found) < num_rows:
            found += self._loop.give_back(num_rows - len(found), begun=begun)
        self._give_back(found)

    def _wait_to_begin(self) -> None:
        """No worker is started before the first request."""

    def _num_workers_replaced(self) -> int:
        return self._workers.num_replaced


class PromptLoop(EngineLoop[Flight]):
    """Serves the requests in `rows`, which somebody else fills."""

    def __init__(self, engine: LLMEngine, workers: PromptWorkers, rows: deque[RawRow]):
        super().__init__(engine)
        self._rows = rows
        self._feed = PromptFeed(
            self._requests(), workers, engine.processor,
            max_ahead=max_waiting_requests(engine.max_num_seqs) + workers.num_workers,
            max_source_pixels=engine.config.prompts.max_source_pixels, read_seconds=inf,
        )  # fmt: skip
        self._num_read = 0
        self._numbers: dict[int, int] = {}
        """Rows that the feed has read and not given, by the count of those it had read before."""
        self._dropped: set[int] = set()
        """Those of them that were given back."""

    def _requests(self) -> Iterator[Request]:
        while True:
            if not self._rows:
                yield NOT_YET
                continue
            row = self._rows.popleft()
            assert row.data is not None, "requests travel with their bytes"
            self._numbers[self._num_read] = row.number
            self._num_read += 1
            yield unpack_request(row.data)

    def _next(self, timeout_seconds: float) -> tuple[int, ReadyRequest] | None:
        while (ready := self._feed.get(timeout_seconds)) is not None:
            number = self._numbers.pop(ready.index)
            if ready.index not in self._dropped:
                return number, ready
            self._dropped.remove(ready.index)
        return None

    def _take(self, prepared: tuple[int, ReadyRequest]) -> int:
        number, ready = prepared
        name = f"request-{number}"
        try:
            if isinstance(ready.prompt, RequestError):
                raise ready.prompt
            self._engine.add_request(name, ready.prompt, ready.params)
        except RequestError as error:
            self.finished.append(FinishedRow(number, None, pack_answer(error)))
            return 0
        self._enter(name, Flight(number, ready.params.n), ready.num_bytes)
        return ready.params.n

    def _finish(self, flight: Flight, output: RequestOutput) -> None:
        self.finished.append(FinishedRow(flight.number, None, pack_answer(output)))

    def _give_back_prepared(self, num_rows: int) -> list[int]:
        """What workers have of them is theirs until it is done, and is dropped then."""
        indices = [index for index in reversed(self._numbers) if index not in self._dropped][:num_rows]
        self._dropped.update(indices)
        return [self._numbers[index] for index in indices]
