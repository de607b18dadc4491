"""A replica of `LLM`: prompts are prepared in workers or here, and answered with RequestOutputs.

It works in the caller's thread, or in a process of its own. Answers that leave the process are packed. Their log
probabilities refer to a function of the tokenizer (megabytes), so a placeholder travels in its place. Knows no caller.
"""

from __future__ import annotations

import functools
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, cast

import npu_runner
from npu_runner.config import RunnerConfig
from npu_runner.engine.detokenizer import token_text
from npu_runner.engine.executors.executor import Progress, silent
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.errors import RequestError
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.prompts.tasks import PromptTask
from npu_runner.request.outputs import RequestOutput
from npu_runner.serving.endpoint import Endpoint, Prepared, encode_ahead, failed_prompt, prepare_prompt
from npu_runner.serving.options import PreprocessingOptions, num_cpus
from npu_runner.serving.replica import FinishedRow, ReplicaFacts
from npu_runner.serving.replicas.inline_replica import InlineReplica, rows_ahead
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool
from npu_runner.strategies import open_checkpoint

Answer = RequestOutput | RequestError
_TOKEN_TEXT = "token_text"


def pack_answer(answer: Answer) -> bytes:
    packed = io.BytesIO()
    _Packer(packed, protocol=5).dump(answer)
    return packed.getvalue()


def unpack_answer(answer: Answer | bytes, processor: ChatProcessor) -> Answer:
    """The answer, packed or not. The processor's tokenizer gives the texts of tokens in log probabilities."""
    if isinstance(answer, bytes):
        answer = cast(Answer, _Unpacker(answer, processor).load())
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
    """The number of a row is the number of its request. `load` gives the engine, and reports its progress; `pack` makes
    the data of a FinishedRow."""

    num_rows_ahead = 0

    def __init__(self, load: Callable[[Progress], LLMEngine], options: PreprocessingOptions, name: str, *,
                 pack: Callable[[Answer], Any] = pack_answer, can_restart: bool = False):
        super().__init__(name)
        self.can_restart = can_restart
        self._load_engine = load
        self._options = options
        self._pack = pack
        self.pool: WorkerPool[Any] | None = None
        """None until the model is loaded."""

    def submit(self, run: Sequence[PromptTask | bytes]) -> None:  # bytes: from another process
        self.endpoint.submit(pickle.loads(task) if isinstance(task, bytes) else task for task in run)

    def _load(self) -> ReplicaFacts:
        engine = self._engine = self._open.enter_context(self._load_engine(self._report))
        ahead = rows_ahead(engine.max_num_seqs)
        limits = PoolLimits(
            num_workers=self._options.num_workers(num_cpus()), task_timeout_seconds=self._options.preprocessing_timeout,
            worker_memory_bytes=self._options.worker_memory_bytes, max_ready=ahead.ready,
            are_forked=engine.processor.transformers_images is not None)
        self.endpoint = Endpoint(functools.partial(prepare_prompt, engine.processor), self._write, limits,
                                 failed=failed_prompt, pages_of=lambda task: task.pages,
                                 look_ahead=functools.partial(encode_ahead, engine.processor))
        self.pool = self.endpoint.pool
        self._open.callback(self.pool.close)
        return ReplicaFacts(
            version=npu_runner.__version__, settings=engine.describe(), ledger=engine.ledger,
            max_rows=engine.max_num_seqs + sum(ahead) + limits.num_workers)

    def _write(self, prepared: Prepared, answer: Answer) -> FinishedRow:
        return FinishedRow(prepared.number, None, self._pack(answer))


def load_engine(config: RunnerConfig, progress: Progress = silent) -> LLMEngine:
    """The engine of a replica's own process, or of this one after a death."""
    return LLMEngine(open_checkpoint(config), progress=progress)
