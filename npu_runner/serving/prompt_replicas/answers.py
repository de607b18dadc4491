"""LLM's side of its replicas: requests are read ahead and shared out, answers are given as they come.

A thread of its own drives the fleet, so that an interrupt of the caller tears nothing: it ends the call, and replicas
are told to forget what they had of it. Knows nothing of conversations or prompts.
"""

from __future__ import annotations

import functools
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_runner.config import RunnerConfig
from npu_runner.errors import EngineDeadError, ReplicaDeadError, RequestError
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.serving.prompt_feed import MAX_AHEAD_BYTES, Request
from npu_runner.serving.prompt_replicas.server import PromptServer
from npu_runner.serving.prompt_replicas.wire import pack_answer, pack_request, unpack_answer
from npu_runner.serving.replicas.base import INDEX, Replica, ReplicaFacts, RowRun
from npu_runner.serving.replicas.fleet import Fleet, FleetHooks, GivenUp
from npu_runner.serving.replicas.options import AUTO, ReplicaOptions
from npu_runner.serving.replicas.placement import Placement, place
from npu_runner.serving.replicas.process import ProcessReplica
from npu_runner.serving.replicas.replica_state import MakeReplica, added
from npu_runner.serving.replicas.row_queue import RowQueue
from npu_runner.serving.workers.options import PreprocessingOptions
from npu_runner.serving.workers.prompts import PromptTask
from npu_runner.strategies.opened import open_checkpoint

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.2
# Of a request that was alone in its replica: one that was killed may have been killed by somebody else.
_MOST_DEATHS_UNBLAMED = 2


@dataclass(frozen=True)
class _Answer:
    """`data`: packed."""

    number: int
    data: bytes


class _Unanswered:
    """Requests of a call that were handed in; their count and their bytes are bounded."""

    def __init__(self, max_requests: int):
        self._max_requests = max_requests
        self._sizes: dict[int, int] = {}
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def may_grow(self) -> bool:
        return len(self._sizes) < self._max_requests and self._num_bytes < MAX_AHEAD_BYTES

    def add(self, number: int, num_bytes: int) -> None:
        self._sizes[number] = num_bytes
        self._num_bytes += num_bytes

    def remove(self, number: int) -> bool:
        """False: it is none of them."""
        self._num_bytes -= self._sizes.get(number, 0)
        return self._sizes.pop(number, None) is not None


class PromptReplicas:
    """Replicas that answer prompts, in processes of this host. Used by one thread.

    Raises ConfigError where devices do not suffice or a setting is wrong, ReplicaDeadError where none can be loaded.
    """

    def __init__(self, config: RunnerConfig, options: PreprocessingOptions, several: ReplicaOptions):
        checkpoint = open_checkpoint(config)
        # The folder that was looked at, whatever a hub id stands for a moment later.
        self.config = checkpoint.config.replace(model=str(checkpoint.path), revision=None)
        self.processor, self.generation_defaults = checkpoint.processor, checkpoint.generation_defaults
        self.num_read = 0
        """Requests so far, of all calls: the number of the next one."""
        self._max_restarts = several.max_replica_restarts
        self._packed: dict[int, bytes] = {}
        """Requests that are not answered: put here by the caller, taken out by the fleet's thread."""
        self._limit = self._first = 0
        """Requests before `_limit` may be handed out; those before `_first` are nobody's any more."""
        self._answers: queue.SimpleQueue[_Answer | BaseException] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[ReplicaFacts | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._is_closing = threading.Event()
        self._deaths_alone: Counter[int] = Counter()
        self._fleet = self._made_fleet(_recruit(self.config, options, several))
        self._thread = threading.Thread(target=self._drive, name="replicas", daemon=True)
        self._thread.start()
        try:
            found = self._loaded.get()
            if isinstance(found, BaseException):
                raise found
        except BaseException:
            self.close()
            raise
        self._max_ahead = found.max_rows * len(self._fleet.states)

    def answers(self, requests: Iterator[Request], read_seconds: float) -> Iterator[
            tuple[int, RequestOutput | RequestError]]:
        """(index in `requests`, answer) of each, as they finish. `requests` is read in the caller's thread, as far
        ahead as the replicas have use for; `read_seconds`: how long before somebody looks for answers.

        What an earlier call has left is dropped. Raises what reading raises, and what ends all replicas.
        """
        self.forget()
        first, unanswered, is_read = self.num_read, _Unanswered(self._max_ahead), False
        while unanswered or not is_read:
            deadline = time.monotonic() + read_seconds
            while not is_read and unanswered.may_grow and time.monotonic() < deadline:
                request = next(requests, None)
                if request is None:
                    is_read = True
                    break
                self._hand_in(request, unanswered)
            must_wait = bool(unanswered) and (is_read or not unanswered.may_grow)
            for answer in self._fetch(_IDLE_SECONDS if must_wait else 0.0):
                if unanswered.remove(answer.number):
                    yield answer.number - first, unpack_answer(answer.data, self.processor)

    def forget(self) -> None:
        """Whatever is under way is nobody's any more."""
        self._first = self.num_read
        self._fleet.wake()

    def stats(self) -> EngineStats:
        """Sums over all replicas, as they told last."""
        return added([state.stats() for state in self._fleet.states]).engine

    def close(self) -> None:
        """End all processes; returns when they are gone. May be called twice."""
        self._is_closing.set()
        self._fleet.wake()
        self._thread.join()
        if self._failure is None:
            self._failure = EngineDeadError("the replicas were closed")

    # -- the caller's thread ---------------------------------------------------------------------------------------

    def _hand_in(self, request: Request, unanswered: _Unanswered) -> None:
        data = pack_request(Request(request.params, self._sendable(request.prompt)))
        unanswered.add(self.num_read, len(data))
        self._packed[self.num_read] = data
        self.num_read += 1
        self._limit = self.num_read
        self._fleet.wake()

    def _sendable(self, prompt: PromptTask | PromptInputs | RequestError) -> PromptTask | PromptInputs | RequestError:
        """What no other process would know is prepared here. Errors go there and come back, as answers do."""
        if not isinstance(prompt, PromptTask):
            return prompt
        try:
            if not prompt.is_plain:
                return prompt.prepare(self.processor)
            return prompt.sendable(self.config.prompts.max_source_pixels)
        except RequestError as error:
            return error

    def _fetch(self, timeout_seconds: float) -> Iterator[_Answer]:
        """All that are there; waits for one at most so long."""
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                found = self._answers.get(timeout=timeout_seconds) if timeout_seconds else self._answers.get_nowait()
            except queue.Empty:
                return
            if isinstance(found, BaseException):
                self._failure = found
                raise found
            yield found
            timeout_seconds = 0.0

    # -- the fleet's thread ----------------------------------------------------------------------------------------

    def _made_fleet(self, replicas: Sequence[MakeReplica]) -> Fleet:
        self._rows = RowQueue(sys.maxsize)
        self._rows.allow(0)
        hooks = FleetHooks(make_run=self._run_of, say=logger.warning, isolate=_remember_nothing,
                           record_death=self._record_death)
        return Fleet(replicas, self._rows, hooks, max_restarts=self._max_restarts)

    def _drive(self) -> None:
        # Whatever happens here the caller waits for it.
        try:
            with self._fleet as fleet:
                fleet.start()
                while not (fleet.is_loaded or self._is_closing.is_set()):
                    fleet.poll(_IDLE_SECONDS)
                if not self._is_closing.is_set():
                    fleet.begin(None)
                    self._loaded.put(fleet.facts)
                while not self._is_closing.is_set():
                    self._turn(fleet)
        except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again in the caller's
            self._loaded.put(error)
            self._answers.put(error)

    def _turn(self, fleet: Fleet) -> None:
        first = self._first
        if first > self._rows.first:
            fleet.forget(first)
            for number in list(self._packed):
                if number < first:
                    del self._packed[number]
        self._rows.allow(self._limit)
        finished, given_up = fleet.poll(_IDLE_SECONDS)
        for row in finished:
            self._give(row.number, row.data)
        for lost in given_up:
            error = RequestError(lost.message, lost.code)
            self._give(lost.index, pack_answer(RequestOutput.failed(f"request-{lost.index}", error)))

    def _give(self, number: int, data: bytes) -> None:
        if self._packed.pop(number, None) is not None:
            self._answers.put(_Answer(number, data))

    def _run_of(self, numbers: Sequence[int]) -> RowRun:
        data = [self._packed[number] for number in numbers]
        table_R4 = np.zeros((len(numbers), 4), dtype=np.uint64)
        table_R4[:, INDEX] = numbers
        table_R4[:, -1] = [len(item) for item in data]
        return RowRun(table_R4=table_R4, checksums=b"", data=b"".join(data))

    def _record_death(self, number: int, error: ReplicaDeadError) -> GivenUp | None:
        self._deaths_alone[number] += 1
        is_enough = error.blame is not None or self._deaths_alone[number] >= _MOST_DEATHS_UNBLAMED
        message = f"alone in its replica, this request ends it: {str(error).partition(chr(10))[0]}"
        return GivenUp(index=number, code=error.blame or "engine_died", message=message) if is_enough else None


def _remember_nothing(numbers: Sequence[int]) -> None:
    """The queue has them run alone; there is no later run that would want to know."""


def _recruit(config: RunnerConfig, options: PreprocessingOptions, several: ReplicaOptions) -> list[MakeReplica]:
    asked = several.data_parallel_size
    placements = place(config.platform, None if asked == AUTO else int(asked), config.parallel.tensor_parallel_size)
    return [functools.partial(_made_process, config, options, f"replica {number}", placement)
            for number, placement in enumerate(placements)]


def _made_process(config: RunnerConfig, options: PreprocessingOptions, name: str, placement: Placement) -> Replica:
    options = replace(options, preprocessing_workers=options.num_workers(placement.num_cores))
    make = functools.partial(PromptServer, config.replace(platform=placement.platform), options, name)
    return ProcessReplica(name, make, placement, num_rows_ahead=PromptServer.num_rows_ahead)
