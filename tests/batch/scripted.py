"""An engine and a processor that follow a script instead of a model, and rows for them. Holds no tests.

They stand where the model would, so that what the job does around it can be driven to any corner in milliseconds.
The same laws are checked with the real engine in tests/batch/test_real_job.py and tests/faults.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

from npu_runner.batch.rows.preprocessing import RowPreprocessor
from npu_runner.batch.rows.shape import CHECKSUM_BYTES, name_of
from npu_runner.config import RunnerConfig
from npu_runner.errors import RequestError
from npu_runner.request.outputs import CompletionOutput, EngineStats, RequestOutput
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.request.sampling_params import SamplingParams
from npu_runner.serving.endpoint import Prepared
from npu_runner.serving.replica import RawRow


@dataclass(frozen=True)
class ScriptedProcessor:
    """A token per character of the last message. Words in it are stage directions for the worker process."""

    flag: str = ""
    """A file that counts, across processes, how often a row was begun."""

    transformers_images = None

    def identity(self) -> dict[str, Any]:
        return {"kind": "scripted"}

    def check_task(self, task: str) -> None: ...

    def resolve_params(self, params: Any) -> Any:
        return params

    def from_text(self, prompt: str | list[int], **options: Any) -> PromptInputs:
        return PromptInputs([ord(character) for character in prompt] if isinstance(prompt, str) else prompt)

    def most_prompt_tokens(self, params: SamplingParams) -> int | None:
        return params.truncate_prompt_tokens

    def template_reads(self, name: str) -> bool:
        return True

    def parser_of_calls(self) -> str | None:
        return "hermes"

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))

    def __call__(
        self, messages: list[dict[str, Any]], chat_template_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> PromptInputs:
        content = messages[-1]["content"]
        text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        if self.flag:
            with open(self.flag, "a") as file:
                file.write(f"{text}\n")
        if text.startswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("die once") or text.startswith("hang"):
            time.sleep(3600)
        if text.startswith("bug"):
            raise ZeroDivisionError("a bug in preprocessing")
        if text.startswith("bad"):
            raise RequestError("a bad row", code="scripted_bad")
        return PromptInputs([ord(character) for character in text])


@dataclass
class ScriptedEngine:
    """Answers a prompt with itself, reversed, after as many steps as it has tokens; `latency` decides otherwise."""

    config: RunnerConfig
    latency: Callable[[str], int] = lambda text: len(text)
    on_step: Callable[[ScriptedEngine], None] = lambda engine: None
    max_running: int = 8
    num_steps: int = 0
    most_held: int = 0
    waiting: list[tuple[str, str, SamplingParams]] = field(default_factory=list)
    running: dict[str, tuple[int, str, SamplingParams]] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)

    max_num_batched_tokens: ClassVar[int] = 0
    """Requests wait as if each were longer than a step: few of them do."""
    ledger = "no memory at all"
    start_seconds: ClassVar[Mapping[str, float]] = {"learning the script": 0.5}

    @property
    def max_num_seqs(self) -> int:
        return self.max_running

    def describe(self) -> dict[str, str]:
        return {"engine": "scripted", "seed": str(self.config.seed)}

    def add_request(self, request_id: str, prompt: PromptInputs, params: SamplingParams) -> list[int]:
        text = "".join(chr(token) for token in prompt.token_ids)
        if len(text) > 100:
            raise RequestError(f"{len(text)} tokens, 100 are the limit", code="prompt_too_long")
        self.waiting.append((request_id, text, params))
        self.most_held = max(self.most_held, len(self.waiting) + len(self.running))
        return [len(text)]

    def pop_started(self) -> list[str]:
        started, self.started = self.started, []
        return started

    def plan(self) -> bool:
        """Whether waiting requests are to run from the next step on, as an engine says before it runs them."""
        while self.waiting and len(self.running) < self.max_running:
            request_id, text, params = self.waiting.pop(0)
            self.running[request_id] = (self.latency(text), text, params)
            self.started.append(request_id)
        return bool(self.started)

    def abort_request(self, request_id: str) -> None:
        self.waiting = [item for item in self.waiting if item[0] != request_id]
        self.running.pop(request_id, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting or self.running)

    def step(self) -> list[RequestOutput]:
        if self.plan():
            return []
        self.num_steps += 1
        self.on_step(self)
        self.running = {name: (left - 1, text, params) for name, (left, text, params) in self.running.items()}
        done = [name for name, (left, _, _) in self.running.items() if left <= 0]
        return [self._output(name, *self.running.pop(name)[1:]) for name in done]

    def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
        answer, reason = text[::-1], "error" if text.startswith("engine error") else "stop"
        completions = [
            CompletionOutput(
                index, f"{answer} {params.seed}" if params.temperature else answer, [1] * len(text), reason
            )
            for index in range(params.n)
        ]
        return RequestOutput(request_id, completions, len(text), 0)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    def stats(self) -> EngineStats:
        return EngineStats(num_waiting=self.num_waiting, num_running=len(self.running))

    def __enter__(self) -> ScriptedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.running.clear()


@dataclass
class OvertakingEngine(ScriptedEngine):
    """Hands over one row a step, and a row whose number ends in 0 only after the fifth row behind it.

    So rows finish in an order that is known and is not the input's, however fast they arrive. Their texts are numbers.
    `crash` is called instead of handing over one row more than `crash_after`.
    """

    crash_after: int = -1
    crash: Callable[[], None] = lambda: None
    finished: list[str] = field(default_factory=list)

    def step(self) -> list[RequestOutput]:
        if self.plan():
            return []
        if len(self.finished) == self.crash_after:
            self.crash()
        for name, (_, text, params) in self.running.items():
            if not text.endswith("0") or f"{int(text) + 5:03d}" in self.finished:
                del self.running[name]
                self.finished.append(text)
                return [self._output(name, text, params)]
        time.sleep(0.001)  # nothing can end before rows that are still prepared, in processes beside this one
        return []


@dataclass
class ScriptedModel:
    """What stands where a checkpoint would: the engine is made when the job loads it."""

    config: RunnerConfig
    make_engine: Callable[[RunnerConfig], ScriptedEngine] = ScriptedEngine
    processor: Any = field(default_factory=ScriptedProcessor)
    generation_defaults: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, str]:
        return {"seed": str(self.config.seed)}

    def load(self, wants_grammars: Any = None, progress: Callable[[str], None] = print) -> ScriptedEngine:
        progress("learning the script")
        return self.make_engine(self.config)


def workers_of(job: int) -> list[int]:
    """Preprocessing workers of a process; their command line ends with its pid."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"npu_runner.serving.workers.worker" in words and str(job).encode() in words:
            found.append(int(process.name))
    return found


def completion_row(custom_id: str, prompt: Any = "hello", **body: Any) -> dict[str, Any]:
    """A valid row of /v1/completions; greedy unless told otherwise."""
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, "temperature": 0, **body},
    }


def row(custom_id: str, text: str = "hello", **body: Any) -> dict[str, Any]:
    """A valid row; greedy unless told otherwise."""
    messages = [{"role": "user", "content": text}]
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"messages": messages, "temperature": 0, **body},
    }


@dataclass(frozen=True)
class OneRow:
    """A source that has this one row."""

    data: bytes

    @property
    def row(self) -> RawRow:
        return RawRow(0, 1, 0, len(self.data), hashlib.blake2b(self.data, digest_size=CHECKSUM_BYTES).digest())

    def read(self, _: RawRow) -> bytes:
        return self.data

    def pieces(self, _: RawRow) -> Iterator[bytes]:
        yield self.data

    def name(self, _: RawRow) -> str | None:
        return name_of(self.data)


def prepared(line: bytes, processor: Any, **settings: Any) -> Prepared:
    """What preprocessing makes of a line."""
    source = OneRow(line)
    return RowPreprocessor(source=source, processor=processor, **settings)(source.row)


def write_rows(path: Path, rows: Iterable[dict[str, Any] | bytes]) -> Path:
    """A JSONL file; bytes are written as they are."""
    with open(path, "wb") as file:
        for item in rows:
            file.write((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n")
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]
