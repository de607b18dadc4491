"""A bounded pool of worker processes: dead ones are replaced, their task is tried once more, stuck ones are killed.

One thread hands tasks out and collects results, so all of it overlaps with the caller's own work. Knows nothing of the
tasks, and nothing of the model.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from npu_runner.errors import JobError, ServerError
from npu_runner.processes.byte_queue import ByteBoundedQueue
from npu_runner.processes.channel import Channel, ChannelClosed
from npu_runner.processes.child import Child, describe_exit
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.serving.workers.forker import ForkedWorker, Forker
from npu_runner.serving.workers.worker import JOB_FAULT, OUT_OF_MEMORY, READY, RESULT

Task = TypeVar("Task")

MAX_ATTEMPTS = 2
# A worker that dies before it is ready has met no task: its environment is broken, and another will die as well.
_MAX_FAILED_STARTS = 3
_SHORTEST_START_SECONDS = 120.0
_PATIENCE_SECONDS = 0.05
_VARIABLES = {
    # One row per process is the parallelism here; threads on top of it only get in the model's way.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # glibc gives each thread that a decoder starts 64 MiB of address space to allocate from, and keeps it.
    "MALLOC_ARENA_MAX": "1",
}
# The system's calls have a limit (poll: 2**31 ms). A longer wait is repeated.
_LONGEST_WAIT_SECONDS = 86_400.0


class WorkerFailure(ServerError):
    """A task has no result, by no fault of its caller. `code`: preprocessing_crashed, preprocessing_timeout,
    preprocessing_out_of_memory or internal_error."""


@dataclass(frozen=True)
class PoolItem(Generic[Task]):
    """A task of the pool, at last with what the function returned for it, or a WorkerFailure. `num_bytes`: size of the
    result."""

    task: Task
    task_bytes: int
    attempt: int = 1
    result: Any = None
    num_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class PoolLimits:
    """The limits of the pool's work ahead of its caller."""

    num_workers: int
    task_timeout_seconds: float  # inf: no limit
    worker_memory_bytes: int | None = None
    """Address space that a worker may take beside what it has at its start; None: any."""
    max_ready: int = 64
    """Most results that wait to be fetched."""
    max_ready_bytes: int = 1 << 29
    """No new task starts while the waiting results are larger than this."""
    are_forked: bool = False
    """Workers are forked from one process that has loaded the function. If one takes much private memory, fewer than
    num_workers run from then on."""


@dataclass
class _Worker(Generic[Task]):
    child: Child | ForkedWorker
    channel: Channel
    is_ready: bool = False
    is_used: bool = False
    """It has answered a task before."""
    item: PoolItem[Task] | None = None
    """Its present task."""
    watch: Stopwatch | None = None
    """Time since its start, or since its task began; None: it is idle."""


class WorkerPool(Generic[Task]):
    """Applies `function` (picklable) to the tasks that are submitted; `get` fetches results in order of completion.

    Workers start with the first task. `inherited`: file descriptors that workers have too, under the same numbers.
    `seen` is called with each task and its result, before this can be fetched. `refusal` is called with each task
    before it starts, and gives the failure of one that must not start. Both are called in the pool's thread; all
    methods are the caller's thread's.
    """

    def __init__(self, function: Callable[[Task], Any], limits: PoolLimits, inherited: Sequence[int] = (), *,
                 seen: Callable[[Task, Any], None] = lambda task, result: None,
                 refusal: Callable[[Task], WorkerFailure | None] = lambda task: None):
        self._function = function
        self._seen = seen
        self._refusal = refusal
        self._inherited = tuple(inherited)
        self._limits = limits
        self._tasks: deque[PoolItem[Task]] = deque()
        """Tasks that no worker has started: filled by the caller, emptied by the pool's thread."""
        self._again: deque[PoolItem[Task]] = deque()
        self._for_new: deque[PoolItem[Task]] = deque()
        """Tasks that had too little memory in a used worker: each waits for a new one."""
        self._workers: list[_Worker[Task]] = []
        self._results = ByteBoundedQueue(limits.max_ready_bytes, limits.max_ready)
        self._failure: Exception | None = None
        self._num_failed_starts = 0
        self._forker: Forker | None = None
        self._num_wanted = limits.num_workers
        self._is_closing = threading.Event()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        for end in (self._wake_receiver, self._wake_sender):
            end.setblocking(False)
        self.pending_bytes = 0
        """Bytes of the submitted tasks whose results were not fetched."""
        self.num_replaced = 0
        """Workers that died or were killed for being stuck, and were replaced."""
        self._thread: threading.Thread | None = None

    @property
    def num_workers(self) -> int:
        return self._limits.num_workers

    def submit(self, task: Task, num_bytes: int = 0) -> None:
        """Returns at once: a worker gets it when one is free and there is room for its result. `num_bytes`: its size,
        for `pending_bytes`."""
        self.pending_bytes += num_bytes
        self._tasks.append(PoolItem(task, num_bytes))
        if self._thread is None:
            self._thread = threading.Thread(target=self._supervise, name="preprocessing-pool", daemon=True)
            self._thread.start()
        self._wake()

    def recall(self, num_tasks: int) -> list[Task]:
        """Drop up to `num_tasks` tasks that no worker has started, the last ones first."""
        found: list[Task] = []
        with contextlib.suppress(IndexError):
            while len(found) < num_tasks:
                item = self._tasks.pop()
                self.pending_bytes -= item.task_bytes
                found.append(item.task)
        return found

    def get(self, timeout: float = 0.0) -> PoolItem[Task] | None:
        """The next result; None when there is none within `timeout` seconds.

        Raises JobError when no worker can be kept alive, when the function raised it or when unpickling the function
        raised any error of ours.
        """
        finished: PoolItem[Task] | None = self._results.get(timeout)
        if finished is None:
            self.raise_failure()
            return None
        self.pending_bytes -= finished.task_bytes
        self._wake()
        return finished

    def raise_failure(self) -> None:
        """Raise what `get` would raise in the end, if it is known already."""
        if self._failure is not None:
            raise self._failure

    def worker_pids(self) -> list[int]:
        return [pid for worker in list(self._workers) if (pid := worker.child.pid)]

    def close(self) -> None:
        """Kill the workers, whatever they do, and return when they are gone. May be called again, when interrupted."""
        self._is_closing.set()
        self._wake()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self._wake_receiver.close()
        self._wake_sender.close()

    def __enter__(self) -> WorkerPool[Task]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # full of wake-up calls already, or all is done and one end closed
            self._wake_sender.send(b"w")

    # Everything below runs in the pool's own thread.

    def _supervise(self) -> None:
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self._wake_receiver, selectors.EVENT_READ)
                while not self._is_closing.is_set():
                    self._start_missing_workers(selector)
                    self._hand_out_tasks(selector)
                    self._serve_events(selector)
        except Exception as error:  # noqa: BLE001 - the border: raised again in the caller's thread by get()
            self._failure = error
            self._results.put(None, 0, waits=False)  # wakes a waiting caller
        finally:
            for worker in self._workers:
                worker.channel.close()  # all workers see the end before the first wait
            for worker in self._workers:
                _kill(worker)
            if self._forker is not None:
                self._forker.close()

    def _start_missing_workers(self, selector: selectors.BaseSelector) -> None:
        while len(self._workers) < self._num_wanted:
            worker = self._start_worker(selector)
            self._workers.append(worker)
            selector.register(worker.channel, selectors.EVENT_READ, worker)
            worker.watch = Stopwatch()
            try:
                if not self._limits.are_forked:
                    worker.channel.send(self._function)
            except ChannelClosed:
                self._replace(worker, selector)

    def _start_worker(self, selector: selectors.BaseSelector) -> _Worker[Task]:
        limits, (ours, theirs) = self._limits, socket.socketpair()
        memory_bytes = limits.worker_memory_bytes or 0
        child: Child | ForkedWorker
        with theirs:
            if limits.are_forked:
                child = self._running_forker(selector).fork(theirs)
            else:
                child = Child("npu worker", "npu_runner.serving.workers.worker", theirs.fileno(), memory_bytes,
                              descriptors=[theirs.fileno(), *self._inherited], variables=_VARIABLES)
        return _Worker(child, Channel(ours, limits.task_timeout_seconds))

    def _running_forker(self, selector: selectors.BaseSelector) -> Forker:
        if self._forker is None or not self._forker.is_running:
            if self._forker is not None:
                self._end_forker(self._forker, selector)
            self._forker = Forker(self._function, memory_bytes=self._limits.worker_memory_bytes or 0,
                                  inherited=self._inherited, variables=_VARIABLES,
                                  timeout_seconds=self._limits.task_timeout_seconds)
            selector.register(self._forker, selectors.EVENT_READ, self._forker)
        return self._forker

    def _end_forker(self, forker: Forker, selector: selectors.BaseSelector) -> None:
        with contextlib.suppress(KeyError):
            selector.unregister(forker)
        forker.close()

    def _hand_out_tasks(self, selector: selectors.BaseSelector) -> None:
        for worker in list(self._workers):
            if not worker.is_ready or worker.item is not None:
                continue
            while (item := self._next_task(worker)) is not None and (refusal := self._refusal(item.task)) is not None:
                self._deliver(item, refusal, 0)
            if item is None:
                continue
            worker.watch = Stopwatch()
            try:
                worker.channel.send(item.task)
                worker.item = item
            except ChannelClosed:  # it died before it saw the task, which is not the task's doing
                self._again.appendleft(item)
                self._replace(worker, selector)

    def _next_task(self, worker: _Worker[Task]) -> PoolItem[Task] | None:
        if self._for_new and not worker.is_used:
            return self._for_new.popleft()
        if self._again:
            return self._again.popleft()
        try:
            return None if self._results.is_full else self._tasks.popleft()
        except IndexError:
            return None

    def _serve_events(self, selector: selectors.BaseSelector) -> None:
        # Without a worker (the last one died when it was offered a task) the next round starts one at once.
        waits = [worker.watch.poll_seconds(self._limit_of(worker)) for worker in self._workers if worker.watch]
        timeout = min(waits, default=_LONGEST_WAIT_SECONDS) if self._workers else 0.0
        for key, _ in selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._wake_receiver.recv(4096)
            elif isinstance(key.data, Forker):
                key.data.read()
                if not key.data.is_running:  # its workers' channels close as well
                    selector.unregister(key.data)
            else:
                self._receive(key.data, selector)
        for worker in list(self._workers):
            if worker.watch is not None and worker.watch.exceeds(self._limit_of(worker)):
                self._give_up(worker, selector)

    def _limit_of(self, worker: _Worker[Task]) -> float:
        limit = self._limits.task_timeout_seconds
        return limit if worker.is_ready else max(_SHORTEST_START_SECONDS, limit)

    def _receive(self, worker: _Worker[Task], selector: selectors.BaseSelector) -> None:
        try:
            message, num_bytes = worker.channel.receive()
        except ChannelClosed:
            self._replace(worker, selector)
            return
        worker.watch = None
        if message == READY:
            worker.is_ready, self._num_failed_starts = True, 0
            return
        outcome, value = message
        if outcome == JOB_FAULT:
            raise JobError(value)
        item, worker.item = worker.item, None
        assert item is not None, "a worker answered without a task"
        if outcome == OUT_OF_MEMORY:
            # A used worker's memory is fragmented, and libraries keep some: only a new worker shows whether the task
            # itself is too large.
            self._remove(worker, selector)
            if worker.is_used:
                self._for_new.append(replace(item, attempt=MAX_ATTEMPTS))
            else:
                self._deliver(item, self._out_of_memory(), num_bytes)
            return
        if isinstance(worker.child, ForkedWorker) and not worker.is_used:
            affordable = worker.child.forker.num_affordable(self._limits.num_workers, worker.child)
            self._num_wanted = min(self._num_wanted, affordable)
        worker.is_used = True
        self._deliver(item, value if outcome == RESULT else WorkerFailure(value, "internal_error"), num_bytes)
        if len(self._workers) > self._num_wanted:
            self._remove(worker, selector)
            self.num_replaced -= 1

    def _out_of_memory(self) -> WorkerFailure:
        limit = self._limits.worker_memory_bytes
        allowed = "this host has" if limit is None else f"the {limit} bytes it may take (worker_memory_bytes)"
        message = f"preparing this row needs more memory than {allowed}; make the row or its images smaller"
        return WorkerFailure(message, "preprocessing_out_of_memory")

    def _replace(self, worker: _Worker[Task], selector: selectors.BaseSelector) -> None:
        """The worker died: try its task once more, in another one."""
        status = self._remove(worker, selector)
        if worker.item is None:
            return
        if worker.item.attempt < MAX_ATTEMPTS:
            self._again.append(replace(worker.item, attempt=worker.item.attempt + 1))
        else:
            how = f"preprocessing this row ended {MAX_ATTEMPTS} worker processes ({describe_exit(status)})"
            if status == -signal.SIGABRT and self._limits.worker_memory_bytes is not None:
                # Libraries that are not Python's abort where their memory ends.
                how += f", as more than {self._limits.worker_memory_bytes} bytes of memory do (worker_memory_bytes)"
            self._deliver(worker.item, WorkerFailure(how, "preprocessing_crashed"), 0)

    def _give_up(self, worker: _Worker[Task], selector: selectors.BaseSelector) -> None:
        """The worker is stuck: its task timed out and is not tried again."""
        self._remove(worker, selector)
        if worker.item is not None:
            limit = f"{self._limits.task_timeout_seconds:g} s"
            message = f"preprocessing this row took longer than {limit}; raise --preprocessing-timeout if it may"
            self._deliver(worker.item, WorkerFailure(message, "preprocessing_timeout"), 0)

    def _remove(self, worker: _Worker[Task], selector: selectors.BaseSelector) -> int:
        selector.unregister(worker.channel)
        self._workers.remove(worker)
        status = _kill(worker)
        self.num_replaced += 1
        child = worker.child
        # The death of a forker that is still loading is one failed start, not one of each worker.
        is_another = not isinstance(child, ForkedWorker) or child.forker.is_running or child.number == 1
        if not worker.is_ready and is_another:
            self._num_failed_starts += 1
            if self._num_failed_starts >= _MAX_FAILED_STARTS:
                tries = f"{self._num_failed_starts} times in a row, {describe_exit(status)}"
                raise JobError(f"preprocessing workers die before their first row ({tries}); their error is above")
        return status

    def _deliver(self, item: PoolItem[Task], result: Any, num_bytes: int) -> None:
        self._seen(item.task, result)
        self._results.put(replace(item, result=result, num_bytes=num_bytes), num_bytes, waits=False)


def _kill(worker: _Worker[Any]) -> int:
    """Kill and reap; returns the exit status, negative for a signal."""
    worker.channel.close()
    return worker.child.kill(_PATIENCE_SECONDS)
