"""Reads a call's requests a bounded way ahead of the engine and has their prompts prepared, in workers or here.

Knows nothing of the engine, nor of answers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from npu_runner.errors import RequestError
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.workers.prompts import Prepared, PromptProcessor, PromptTask, PromptWorkers

NOT_YET: Any = object()
"""What `requests` gives while it has none and may have one later."""
# Tasks that wait for a worker hold the caller's pictures: no further request is read while they are larger together.
MAX_AHEAD_BYTES = 1 << 29


@dataclass(frozen=True)
class Request:
    """What a caller asked for: a prompt that has to be prepared, one that is, or the error that it has shown to be."""

    params: SamplingParams | PoolingParams
    prompt: PromptTask | PromptInputs | RequestError


@dataclass(frozen=True)
class ReadyRequest:
    """`index`: the how manyth of its call, from 0. `num_bytes`: what its prompt takes where workers made it, else 0."""

    index: int
    params: SamplingParams | PoolingParams
    prompt: PromptInputs | RequestError
    num_bytes: int


class PromptFeed:
    """One call's requests, in the order in which they are ready. `requests` is read in the caller's thread, by `get`;
    it gives NOT_YET while it has none and may have more later.

    `max_ahead`: most requests that were read and not fetched. `read_seconds`: how long one `get` may go on reading.
    """

    def __init__(self, requests: Iterator[Request], workers: PromptWorkers, processor: PromptProcessor, *,
                 max_ahead: int, max_source_pixels: int, read_seconds: float):
        self._requests = requests
        self._workers = workers
        self._processor = processor
        self._max_ahead = max_ahead
        self._max_source_pixels = max_source_pixels
        self.read_seconds = read_seconds
        self._num_read = 0
        self._is_read = False
        self._params: dict[int, SamplingParams | PoolingParams] = {}
        """Of those that were read and not fetched."""
        self._here: deque[tuple[int, PromptTask | PromptInputs | RequestError]] = deque()

    @property
    def is_over(self) -> bool:
        """All requests are read and fetched."""
        return self._is_read and not self._params

    def get(self, timeout: float = 0.0) -> ReadyRequest | None:
        """The next one; None when none is ready within `timeout` seconds, or when all are fetched.

        Raises what reading the requests raises, and JobError when no worker can be kept alive.
        """
        self._read_ahead()
        if self._here:
            index, prompt = self._here.popleft()
            found = Prepared(index, self._prepared(prompt), 0)
        else:
            from_worker = self._workers.get(timeout)
            if from_worker is None:
                return None
            found = from_worker
        return ReadyRequest(found.number, self._params.pop(found.number), found.prompt, found.num_bytes)

    def _read_ahead(self) -> None:
        deadline = time.monotonic() + self.read_seconds
        while not self._is_read and self._may_read() and time.monotonic() < deadline:
            request = next(self._requests, None)
            if request is None:
                self._is_read = True
                return
            if request is NOT_YET:
                return
            self._params[self._num_read] = request.params
            self._hand_out(self._num_read, request.prompt)
            self._num_read += 1

    def _may_read(self) -> bool:
        return len(self._params) < self._max_ahead and self._workers.pending_bytes < MAX_AHEAD_BYTES

    def _hand_out(self, index: int, prompt: PromptTask | PromptInputs | RequestError) -> None:
        if not (isinstance(prompt, PromptTask) and prompt.is_worth_a_worker and self._workers.num_workers):
            self._here.append((index, prompt))
            return
        try:
            self._workers.put(index, prompt.sendable(self._max_source_pixels))
        except RequestError as error:
            self._here.append((index, error))

    def _prepared(self, prompt: PromptTask | PromptInputs | RequestError) -> PromptInputs | RequestError:
        if not isinstance(prompt, PromptTask):
            return prompt
        try:
            return prompt.prepare(self._processor)
        except RequestError as error:
            return error
