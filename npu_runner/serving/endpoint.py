"""Prepares tasks ahead of an engine and has their answers written: rows of a job, prompts of `LLM`.

A task is a row of the input (RawRow) or a caller's prompt (PromptTask). Workers prepare it, or this process where that
is quicker. Knows nothing of files, nor of what is in a task. Imports no torch.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol

from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.tasks import PromptTask, TextTask
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PageFacts, PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.given_up import DocumentFailures
from npu_runner.serving.replica import FinishedRow
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool

# Tasks of this process that are looked at together. To encode 256 texts takes a few milliseconds on one core.
_MOST_AHEAD = 256


class Task(Protocol):
    """A request before it is prepared. Picklable where a worker is to prepare it."""

    @property
    def number(self) -> int:
        """Its index among the requests of the fleet."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def is_worth_a_worker(self) -> bool:
        """Preparing it takes longer than sending it to a worker and back."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A request as the engine takes it, or the error that keeps it from there.

    `number`: its task's. `name`: its request_id; None for a row without a usable one. `line`: of a row in its file.
    `form`: how its answer is written. `num_bytes`: size of the prompt where a worker made it. The task itself is not
    kept: it may hold images.
    """

    number: int
    name: str | None
    line: int = 0
    prompt: PromptInputs | tuple[PromptInputs, ...] = ()
    params: SamplingParams | PoolingParams | None = None
    form: Any = None
    error: RequestError | None = None
    num_bytes: int = 0
    may_be_copied: bool = False
    """An equal request has the same answer."""

    @property
    def pages(self) -> list[PageFacts]:
        """The pages of documents that it shows, in their order."""
        return [page for prompt in self._prompts for page in prompt.pages]

    @property
    def num_tokens(self) -> int:
        """The tokens of its prompts."""
        return sum(len(prompt.token_ids) for prompt in self._prompts)

    @property
    def _prompts(self) -> tuple[PromptInputs, ...]:
        return self.prompt if isinstance(self.prompt, tuple) else (self.prompt,)

    @property
    def num_sequences(self) -> int:
        """The engine makes this number of sequences of it."""
        if isinstance(self.prompt, tuple):
            return len(self.prompt) * len(getattr(self.params, "label_token_ids", None) or (0,))
        return 0 if self.params is None else self.params.n


def prepare_prompt(processor: ChatProcessor, task: PromptTask) -> Prepared:
    """Prepare a prompt of `LLM`."""
    try:
        made = task.prepare(processor)
    except RequestError as error:
        return failed_prompt(task, error)
    return Prepared(number=task.number, name=f"request-{task.number}", prompt=made, params=task.params)


def encode_ahead(processor: ChatProcessor, tasks: Iterable[Any]) -> None:
    """Encode the short raw texts among the next prompts of `LLM` together; `prepare_prompt` finds their tokens."""
    processor.encode_ahead([task.prompt for task in tasks if isinstance(task, TextTask) and task.is_short_text])


def failed_prompt(task: Task, error: RequestError) -> Prepared:
    return Prepared(number=task.number, name=f"request-{task.number}", error=error)


class Endpoint:
    """Takes tasks, gives prepared requests and writes answers. Its caller bounds what it holds.

    `prepare`: picklable; makes Prepared of a task, in a worker or here. `write` makes the bytes of an answer, or of an
    error; None: it has submitted another task of the same number instead. `failed` makes Prepared of a task that no
    worker could prepare. `pages_of`: that of DocumentFailures. `inherited`: descriptors that workers have. `look_ahead`
    is called with the tasks that this process prepares next, before the first of them.
    """

    def __init__(self, prepare: Callable[[Any], Prepared], write: Callable[[Prepared, Any], FinishedRow | None],
                 limits: PoolLimits, inherited: Sequence[int] = (), *, failed: Callable[[Any, RequestError], Prepared],
                 pages_of: Callable[[Any], Iterable[tuple[str, int]]] = lambda task: (),
                 look_ahead: Callable[[Iterable[Any]], None] = lambda tasks: None):
        self.documents: DocumentFailures[Any] = DocumentFailures(pages_of)
        self.pool: WorkerPool[Any] = WorkerPool(prepare, limits, inherited, seen=self._record,
                                                refusal=self.documents.refusal)
        """Closed by the maker of the endpoint."""
        self._prepare = prepare
        self.finish = write
        self._failed = failed
        self._here: deque[Task] = deque()
        """Tasks that this process prepares."""
        self._look_ahead, self._num_ahead = look_ahead, 0
        self._in_pool: dict[int, Task] = {}
        self.wants_grammars = threading.Event()
        """A worker has prepared a request with a grammar. Of use while the model loads."""

    def _record(self, task: Any, result: Any) -> None:
        """Called in the pool's thread."""
        if isinstance(result, WorkerFailure):
            self.documents.record(task, result)
        elif isinstance(result, Prepared) and result.error is None:
            self.documents.record(task, None)
        if isinstance(result, Prepared) and getattr(result.params, "structured_outputs", None) is not None:
            self.wants_grammars.set()

    def submit(self, tasks: Iterable[Task]) -> None:
        for task in tasks:
            if task.is_worth_a_worker and self.pool.num_workers:
                self._in_pool[task.number] = task
                self.pool.submit(task, task.num_bytes)
            else:
                self._here.append(task)

    def recall(self, num_tasks: int, *, include_started: bool = False) -> list[int]:
        """Drop at most `num_tasks` tasks that no worker has started, the last ones first; with `include_started` also
        those of workers. Returns their numbers."""
        found = [self._here.pop().number for _ in range(min(num_tasks, len(self._here)))]
        self._num_ahead = min(self._num_ahead, len(self._here))
        recalled = [task.number for task in self.pool.recall(num_tasks - len(found))]
        for number in recalled:
            del self._in_pool[number]
        found += recalled
        while include_started and len(found) < num_tasks and self._in_pool:
            found.append(self._in_pool.popitem()[0])
        return found

    def next(self, timeout_seconds: float) -> Prepared | None:
        """The next prepared request; None where there is none within the time."""
        if self._here:
            if self._num_ahead <= 0:
                self._num_ahead = min(len(self._here), _MOST_AHEAD)
                self._look_ahead(islice(self._here, self._num_ahead))
            self._num_ahead -= 1
            return self._prepare(self._here.popleft())
        while (finished := self.pool.get(timeout_seconds)) is not None:
            task, result = finished.task, finished.result
            known = self._in_pool.get(task.number)
            if known is None or known is not task:  # it was recalled while a worker had it
                continue
            del self._in_pool[task.number]
            if isinstance(result, WorkerFailure):
                return self._failed(task, result)
            return replace(result, num_bytes=finished.num_bytes)
        return None
