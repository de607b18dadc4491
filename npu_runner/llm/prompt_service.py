"""Serves the requests of `LLM`: one engine in the caller's thread, or replicas in processes of this host.

Both assign requests through a Fleet, so blame for a death and retries are the same. Knows no conversations.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import pickle
import queue
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from npu_runner.config import RunnerConfig
from npu_runner.engine.executors.executor import CLOSED, Progress, silent
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import ConfigError, EngineDeadError, ReplicaDeadError, RequestError
from npu_runner.llm.prompt_server import Answer, PromptServer, load_engine, unpack_answer
from npu_runner.processes.log_level import show_log
from npu_runner.prompts.tasks import MadeTask, PromptTask
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.serving.blame import GivenUp, LoneDeaths
from npu_runner.serving.endpoint import prepare_prompt
from npu_runner.serving.loading_line import on_terminal
from npu_runner.serving.options import AUTO, PreprocessingOptions, ReplicaOptions
from npu_runner.serving.replica import Loading, Opened, ReplicaFacts
from npu_runner.serving.replicas.fleet import Fleet, Owner
from npu_runner.serving.replicas.load_balancer import RowQueue
from npu_runner.serving.replicas.placement import Placement, place
from npu_runner.serving.replicas.process_replica import ProcessReplica
from npu_runner.serving.replicas.replica_state import MakeReplica, added
from npu_runner.strategies import OpenedCheckpoint, open_checkpoint

logger = logging.getLogger(__name__)
_IDLE_SECONDS = 0.2
# Requests hold the caller's images: no further request is read while the waiting ones are larger together ...
MAX_AHEAD_BYTES = 1 << 29
# ... nor, beyond this number for each sequence of a step, while all unanswered ones are larger.
_FEW_AHEAD, _FEW_AHEAD_BYTES = 2, 64 << 20
_EXIT_SECONDS = 30.0


class PromptService(Owner):
    """Used by one thread at a time. Raises what loading an engine raises."""

    engine: LLMEngine | None = None
    """The engine of this process; None: each replica has one in a process of its own."""

    def __init__(self, checkpoint: OpenedCheckpoint, config: RunnerConfig):
        self.config = config
        self.processor, self.generation_defaults = checkpoint.processor, checkpoint.generation_defaults
        self.num_requests = 0
        """The number of the next request, over all calls."""
        self._requests: dict[int, Any] = {}
        """Unanswered requests, as replicas accept them."""
        self._max_ahead = 0
        self._failure: BaseException | None = None

    def answers(self, tasks: Iterator[PromptTask], read_seconds: float) -> Iterator[tuple[int, Answer]]:
        """(index in `tasks`, answer) of each, as they finish. `tasks`, numbered from `num_requests` on, are read here
        as far ahead as there is room; `read_seconds`: the longest time of reading before answers are fetched.

        Raises the errors of reading, and the error that ended all replicas.
        """
        self._raise_failure()
        first, unanswered, num_bytes, is_read = self.num_requests, dict[int, int](), 0, False
        while unanswered or not is_read:
            deadline = time.monotonic() + read_seconds
            while not is_read and self._has_room(len(unanswered), num_bytes) and time.monotonic() < deadline:
                task = next(tasks, None)
                if task is None:
                    is_read = True
                    break
                assert task.number == self.num_requests, "tasks are numbered from `num_requests` on"
                unanswered[task.number] = self._submit(task)
                num_bytes += unanswered[task.number]
            must_wait = bool(unanswered) and (is_read or not self._has_room(len(unanswered), num_bytes))
            for number, answer in self._fetch(_IDLE_SECONDS if must_wait else 0.0):
                if (size := unanswered.pop(number, None)) is not None:
                    num_bytes -= size
                    yield number - first, unpack_answer(answer, self.processor)

    @abstractmethod
    def reset(self) -> None:
        """Abort all requests. After an exception this comes before the next call."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Sums over all replicas, by their last reports."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and free the device. May be called twice."""

    @abstractmethod
    def _submit(self, task: PromptTask) -> int:
        """Queue a task, whose number is `num_requests`. Returns its bytes."""

    @abstractmethod
    def _has_room(self, num_unanswered: int, num_bytes: int) -> bool:
        """Whether one more may be read beside the unanswered requests of this call, which have `num_bytes`."""

    @abstractmethod
    def _fetch(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        """(number, answer, packed or not) of the requests that finished since the last call."""

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _make_fleet(self, replicas: Sequence[MakeReplica], max_restarts: float, progress: Progress = silent) -> Fleet:
        self._progress, self._deaths = progress, LoneDeaths()
        self._rows = RowQueue(sys.maxsize)
        self._rows.allow(0)
        self._rows.drop_before(self.num_requests)
        return Fleet(replicas, self._rows, self, max_restarts=max_restarts)

    def notify(self, news: Opened | Loading | str) -> None:
        if isinstance(news, str):
            logger.warning(news)
        elif isinstance(news, Loading):
            self._progress(news.phase)

    def isolate(self, indices: Sequence[int]) -> None:
        """The queue runs them alone; there is no later run to record them for."""

    def record_death(self, index: int, error: ReplicaDeadError) -> GivenUp | None:
        return self._deaths.record_death(index, error)

    def make_run(self, indices: Sequence[int]) -> list[Any]:
        return [self._requests[number] for number in indices]

    def _sendable(self, task: PromptTask) -> PromptTask:
        """The task for a worker. An image that cannot be sent becomes an error, returned as an answer."""
        try:
            return task.sendable(self.config.prompts.max_source_pixels)
        except RequestError as error:
            return MadeTask(number=task.number, params=task.params, made=error)

    def _poll(self, fleet: Fleet, timeout_seconds: float) -> list[tuple[int, Any]]:
        self._rows.allow(self.num_requests)
        finished, given_up = fleet.poll(timeout_seconds)
        answers: list[tuple[int, Any]] = [(row.number, row.data) for row in finished]
        for lost in given_up:
            error = RequestError(lost.message, lost.code)
            answers.append((lost.index, RequestOutput.failed(f"request-{lost.index}", error)))
        return [answer for answer in answers if self._requests.pop(answer[0], None) is not None]


class LocalService(PromptService):
    """One engine, which works in the caller's thread while answers are read.

    `max_restarts`: the number of loads after a death; the next death ends the service.
    """

    def __init__(self, config: RunnerConfig, options: PreprocessingOptions, max_restarts: float, progress: Progress):
        checkpoint = open_checkpoint(config)
        super().__init__(checkpoint, checkpoint.config)
        # An engine after a restart opens the same folder, also if a hub id means another one by then.
        self._same_folder = checkpoint.config.replace(model=str(checkpoint.path), revision=None)
        self._options = options
        self.max_restarts = max_restarts
        self.engine: LLMEngine = LLMEngine(checkpoint, progress=progress)
        # Any thread may close the engine during a step. Reading requests is no part of a step, and may take for ever.
        self._lock = threading.RLock()
        _local_services.add(self)
        self._start()

    @property
    def workers(self) -> list[int]:
        """Process ids of the preprocessing workers."""
        return [] if self._server.pool is None else self._server.pool.worker_pids()

    def reset(self) -> None:
        with self._lock:
            self._close_workers()
            self.engine.reset()
            self._start()

    def stats(self) -> EngineStats:
        return self.engine.stats()

    def close(self) -> None:
        with self._lock:
            self._failure = self._failure or EngineDeadError(CLOSED)
            try:
                self._close_workers()
            finally:
                self.engine.close()

    def stop_steps(self, timeout_seconds: float) -> None:
        """Wait for the step under way; no other thread starts a further one."""
        self._lock.acquire(timeout=timeout_seconds)

    def _close_workers(self) -> None:
        if self._server.pool is not None:
            self._server.pool.close()

    def _start(self) -> None:
        """Make a new fleet around the present engine, without the requests of the old one."""
        self._requests.clear()
        self._is_new = True
        self._fleet = self._make_fleet([self._make], self.max_restarts)
        self._max_ahead = self._fleet.load().max_rows
        self._fleet.serve(None)

    def _make(self) -> PromptServer:
        self._server = PromptServer(self._load, self._options, "this process", pack=lambda answer: answer,
                                    can_restart=self.max_restarts > 0)
        return self._server

    def _load(self, progress: Progress) -> LLMEngine:
        if not self._is_new:  # the one before has died, and is closed
            self.engine = load_engine(self._same_folder)
        self._is_new = False
        return self.engine

    def _submit(self, task: PromptTask) -> int:
        self._requests[task.number] = task
        self.num_requests = task.number + 1
        return task.num_bytes

    def make_run(self, indices: Sequence[int]) -> list[Any]:
        pool = self._server.pool
        has_workers = pool is not None and pool.num_workers > 0
        run = super().make_run(indices)
        if not self.max_restarts:  # no second run needs their images
            self._requests.update(dict.fromkeys(indices, True))
        return [self._sendable(task) if has_workers and task.is_worth_a_worker else task for task in run]

    def _has_room(self, num_unanswered: int, num_bytes: int) -> bool:
        pool = self._server.pool
        is_one_of_few = num_unanswered < _FEW_AHEAD * self.engine.max_num_seqs or num_bytes < _FEW_AHEAD_BYTES
        return (is_one_of_few and num_unanswered < self._max_ahead
                and (pool is None or pool.pending_bytes < MAX_AHEAD_BYTES))

    def _fetch(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        with self._lock:
            self._raise_failure()
            try:
                # A poll that admits requests runs no step.
                return self._poll(self._fleet, timeout_seconds) or self._poll(self._fleet, timeout_seconds)
            except ReplicaDeadError as error:
                raise EngineDeadError(str(error), request_ids=error.request_ids, blame=error.blame) from error


_local_services: weakref.WeakSet[LocalService] = weakref.WeakSet()


@atexit.register
def _stop_steps() -> None:
    """Python exits, and ends daemon threads. Inside torch that aborts the process."""
    for service in list(_local_services):
        service.stop_steps(_EXIT_SECONDS)


os.register_at_fork(after_in_child=_local_services.clear)  # a fork has no other threads


class ReplicaService(PromptService):
    """Replicas in processes of this host. A thread of its own drives the fleet, so an interrupt of the caller leaves no
    half-changed state: the call ends, and replicas discard its requests.

    Raises ConfigError for too few devices or a wrong setting, ReplicaDeadError if no replica can be loaded.
    """

    def __init__(self, config: RunnerConfig, options: PreprocessingOptions, several: ReplicaOptions,
                 progress: Progress):
        checkpoint = open_checkpoint(config)
        # The folder that was opened, also if a hub id means another one a moment later.
        super().__init__(checkpoint, checkpoint.config.replace(model=str(checkpoint.path), revision=None))
        self._first = 0
        """Requests before it are aborted."""
        self._answered: queue.SimpleQueue[list[tuple[int, Any]] | BaseException] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[ReplicaFacts | BaseException] = queue.SimpleQueue()
        self._is_closing = threading.Event()
        self._fleet = self._make_fleet(_plan_replicas(self.config, options, several), several.max_replica_restarts,
                                       progress)
        self._thread = threading.Thread(target=self._drive, name="replicas", daemon=True)
        try:
            self._thread.start()
            loaded = self._loaded.get()
            if isinstance(loaded, BaseException):
                raise loaded
            self._max_ahead = loaded.max_rows * len(self._fleet.states)
        except BaseException:
            self.close()
            raise

    def reset(self) -> None:
        self._first = self.num_requests
        self._fleet.wake()

    def stats(self) -> EngineStats:
        return added([state.stats() for state in self._fleet.states]).engine

    def close(self) -> None:
        self._is_closing.set()
        self._fleet.wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._failure = self._failure or EngineDeadError("the replicas were closed")

    # -- the caller's thread ---------------------------------------------------------------------------------------

    def _submit(self, task: PromptTask) -> int:
        """The task is packed here, so that the caller gets the errors of pickling. A prompt that other processes could
        not unpickle is prepared here, too."""
        if task.is_plain:
            task = self._sendable(task)
        else:
            prepared = prepare_prompt(self.processor, task)
            made: Any = prepared.prompt if prepared.error is None else prepared.error
            task = MadeTask(number=task.number, params=task.params, made=made)
        data = pickle.dumps(task, protocol=5)
        self._requests[task.number] = data
        self.num_requests = task.number + 1
        self._fleet.wake()
        return len(data)

    def _has_room(self, num_unanswered: int, num_bytes: int) -> bool:
        return num_unanswered < self._max_ahead and num_bytes < MAX_AHEAD_BYTES

    def _fetch(self, timeout_seconds: float) -> list[tuple[int, Any]]:
        self._raise_failure()
        try:
            answers = self._answered.get(timeout=timeout_seconds) if timeout_seconds else self._answered.get_nowait()
        except queue.Empty:
            return []
        if isinstance(answers, BaseException):
            self._failure = answers
            raise answers
        return answers

    # -- the fleet's thread ----------------------------------------------------------------------------------------

    def _drive(self) -> None:
        try:
            with self._fleet as fleet:
                fleet.start()
                while not (fleet.is_loaded or self._is_closing.is_set()):
                    fleet.poll(_IDLE_SECONDS)
                if not self._is_closing.is_set():
                    fleet.serve(None)
                    self._loaded.put(fleet.facts)
                while not self._is_closing.is_set():
                    self._abort_and_poll(fleet)
        except BaseException as error:  # noqa: BLE001 - the border of the thread: raised again in the caller's
            self._loaded.put(error)
            self._answered.put(error)

    def _abort_and_poll(self, fleet: Fleet) -> None:
        first = self._first
        if first > self._rows.first:
            fleet.abort_before(first)
            for number in list(self._requests):
                if number < first:
                    del self._requests[number]
        if answers := self._poll(fleet, _IDLE_SECONDS):
            self._answered.put(answers)


def make_service(config: RunnerConfig, options: PreprocessingOptions, several: ReplicaOptions,
                 max_restarts: float) -> PromptService:
    """`max_restarts`: for an engine of this process."""
    try:
        show_log()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    service: PromptService | None = None
    try:
        with on_terminal() as progress:
            progress("reading config and tokenizer")
            if several.data_parallel_size == 1:
                service = LocalService(config, options, max_restarts, progress)
            else:
                service = ReplicaService(config, options, several, progress)
        return service
    except BaseException:  # an interrupt while the line is erased: the caller never gets the service to close it
        if service is not None:
            service.close()
        raise


def _plan_replicas(config: RunnerConfig, options: PreprocessingOptions, several: ReplicaOptions) -> list[MakeReplica]:
    count = several.data_parallel_size
    placements = place(config.platform, None if count == AUTO else int(count), config.parallel.tensor_parallel_size)
    return [functools.partial(_make_process, config, options, f"replica {number}", placement)
            for number, placement in enumerate(placements)]


def _make_process(config: RunnerConfig, options: PreprocessingOptions, name: str,
                  placement: Placement) -> ProcessReplica:
    options = replace(options, preprocessing_workers=options.num_workers(placement.num_cores))
    load = functools.partial(load_engine, config.replace(platform=placement.platform))
    return ProcessReplica(name, functools.partial(PromptServer, load, options, name), placement,
                          num_rows_ahead=PromptServer.num_rows_ahead)
