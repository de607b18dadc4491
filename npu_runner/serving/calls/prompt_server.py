"""A replica of `LLM`: prompts are prepared in workers or here, and answered with RequestOutputs.

It works in the caller's thread, or in a process of its own. Answers that leave the process are packed. Their log
probabilities refer to a function of the tokenizer (megabytes), so a placeholder travels in its place. Knows no caller.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import npu_runner
from npu_runner.config import RunnerConfig
from npu_runner.engine.detokenizer import token_text
from npu_runner.engine.executors.executor import Progress, silent
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.sending import num_bytes
from npu_runner.request.outputs import RequestOutput
from npu_runner.request.pooling_params import PoolingParams
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.engine_loop import Endpoint, Flight, Prepared, max_waiting_requests
from npu_runner.serving.options import PreprocessingOptions, num_cpus
from npu_runner.serving.replica import FinishedRow, ReplicaFacts
from npu_runner.serving.replicas.inline_replica import InlineReplica
from npu_runner.serving.workers.pool import PoolLimits, WorkerFailure, WorkerPool
from npu_runner.serving.workers.prompt_tasks import NumberedTask, Preparation, PromptTask
from npu_runner.strategies import open_checkpoint

Answer = RequestOutput | RequestError
_TOKEN_TEXT = "token_text"


@dataclass(frozen=True)
class Request:
    """A caller's request: a prompt to be prepared, a prepared one, or the error that it caused."""

    params: SamplingParams | PoolingParams
    prompt: PromptTask | PromptInputs | RequestError

    def pack(self) -> bytes:
        """For another process."""
        return pickle.dumps(self, protocol=5)


class PromptEndpoint(Endpoint):
    """`submit` takes (number, Request or its bytes). A FinishedRow's data is the answer, as `pack` makes it.

    A prompt whose preparation takes less than the way to a worker and back is prepared in `next`.
    """

    def __init__(self, processor: ChatProcessor, limits: PoolLimits, *, max_source_pixels: int,
                 pack: Callable[[Answer], Any]):
        self._processor = processor
        self._max_source_pixels = max_source_pixels
        self._pack = pack
        self.pool: WorkerPool[NumberedTask] = WorkerPool(Preparation(processor), limits)
        self._here: deque[tuple[int, PromptTask | PromptInputs | RequestError]] = deque()
        self._held: dict[int, tuple[int, SamplingParams | PoolingParams]] = {}
        """(number, params) of what the engine has not got, by the order in which it came."""
        self._num_submitted = 0

    def begin(self, terms: Any) -> None:
        """Answers have nothing in common."""

    def submit(self, run: Sequence[tuple[int, Request | bytes]]) -> None:
        for number, data in run:
            request: Request = pickle.loads(data) if isinstance(data, bytes) else data
            self._num_submitted += 1
            self._held[self._num_submitted] = number, request.params
            self._hand_out(self._num_submitted, request.prompt)

    def _hand_out(self, place: int, prompt: PromptTask | PromptInputs | RequestError) -> None:
        if isinstance(prompt, PromptTask) and prompt.is_worth_a_worker and self.pool.num_workers:
            try:
                task = prompt.sendable(self._max_source_pixels)
                self.pool.submit(NumberedTask(place, task), task.num_chars + num_bytes(task.images))
                return
            except RequestError as error:
                prompt = error
        self._here.append((place, prompt))

    def recall(self, num_requests: int) -> list[int]:
        """What a worker has begun of them is dropped once it is done; the others never reach one."""
        places = list(reversed(self._held))[:num_requests]
        numbers = [self._held.pop(place)[0] for place in places]
        here = {place for place, _ in self._here}
        # Workers begin the first ones first: what they have not begun of as many as these are the last of these.
        self.pool.recall(sum(place not in here for place in places))
        return numbers

    def next(self, timeout_seconds: float) -> Prepared | None:
        while self._here:
            place, prompt = self._here.popleft()
            if place in self._held:
                return self._prepared(place, self._prepare(prompt), 0)
        while (finished := self.pool.get(timeout_seconds)) is not None:
            place, result = finished.task.number, finished.result
            if place in self._held:
                if isinstance(result, WorkerFailure):
                    result = RequestError(result.message, result.code)
                return self._prepared(place, result, finished.num_bytes)
        return None

    def _prepare(self, prompt: PromptTask | PromptInputs | RequestError) -> PromptInputs | RequestError:
        if not isinstance(prompt, PromptTask):
            return prompt
        try:
            return prompt.prepare(self._processor)
        except RequestError as error:
            return error

    def _prepared(self, place: int, prompt: PromptInputs | RequestError, num_bytes: int) -> Prepared:
        number, params = self._held.pop(place)
        flight = Flight(number, params.n)
        if isinstance(prompt, RequestError):
            return Prepared(flight, failure=self.refuse(flight, "", prompt))
        return Prepared(flight, f"request-{number}", prompt, params, num_bytes)

    def answer(self, flight: Flight, output: RequestOutput) -> FinishedRow:
        return FinishedRow(flight.number, None, self._pack(output))

    def refuse(self, flight: Flight, name: str, error: RequestError) -> FinishedRow:
        return FinishedRow(flight.number, None, self._pack(error))


def pack_answer(answer: Answer) -> bytes:
    """For another process."""
    packed = io.BytesIO()
    _Packer(packed, protocol=5).dump(answer)
    return packed.getvalue()


def unpack_answer(data: bytes, processor: ChatProcessor) -> Answer:
    """`processor`: its tokenizer gives the texts of tokens in log probabilities."""
    answer: Answer = _Unpacker(data, processor).load()
    return answer


class _Packer(pickle.Pickler):
    def persistent_id(self, value: Any) -> str | None:
        is_text = isinstance(value, functools.partial) and value.func is token_text
        return _TOKEN_TEXT if is_text else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, data: bytes, processor: ChatProcessor):
        super().__init__(io.BytesIO(data))
        self._processor = processor

    def persistent_load(self, name: Any) -> Any:
        assert name == _TOKEN_TEXT, f"an answer holds {name!r}"
        return functools.partial(token_text, self._processor.tokenizer)


class PromptServer(InlineReplica):
    """The number of a row is the number of its request. `load`: gives the engine, and calls what it is given with what
    that does meanwhile; `pack`: see PromptEndpoint."""

    num_rows_ahead = 0

    def __init__(self, load: Callable[[Progress], LLMEngine], options: PreprocessingOptions, name: str, *,
                 pack: Callable[[Answer], Any] = pack_answer, can_restart: bool = False):
        super().__init__(name)
        self.can_restart = can_restart
        self._load_engine = load
        self._options = options
        self._pack = pack
        self.pool: WorkerPool[Any] | None = None
        """What prepares prompts; None: the model is not loaded yet."""

    def _load(self) -> ReplicaFacts:
        engine = self._engine = self._open.enter_context(self._load_engine(self._report))
        max_waiting = max_waiting_requests(engine.max_num_seqs)
        limits = PoolLimits(
            num_workers=self._options.num_workers(num_cpus()), task_timeout_seconds=self._options.preprocessing_timeout,
            worker_memory_bytes=self._options.worker_memory_bytes, max_ready=max_waiting)
        endpoint = PromptEndpoint(engine.processor, limits, max_source_pixels=engine.config.prompts.max_source_pixels,
                                  pack=self._pack)
        self.endpoint, self.pool = endpoint, endpoint.pool
        self._open.callback(endpoint.pool.close)
        return ReplicaFacts(
            version=npu_runner.__version__, settings=engine.describe(), ledger=engine.ledger,
            max_rows=engine.max_num_seqs + 2 * max_waiting + limits.num_workers)


def load_engine(config: RunnerConfig, progress: Progress = silent) -> LLMEngine:
    """For a process of its own."""
    return LLMEngine(open_checkpoint(config), progress=progress)
