"""Counts what one text row passes on the CPU: files of ours entered, functions called, the deepest stack of our frames,
the frames from `main` to the engine's step, and the forms of the row.

    .venv/bin/python scripts/trace_row.py

The start and what serves the row (from the engine's first request on) are counted together and each by itself. The row
is prepared once more in this process, as its worker did it. Functions only: module and class bodies, comprehensions and
lambdas are not counted; all threads of the job's process are. Prints a line and the deepest stack of each part, and one
JSON line.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import npu_runner

PACKAGE = Path(npu_runner.__file__).resolve().parent
ROOTS = (str(PACKAGE), str(PACKAGE.parent / "strategies"))
_OPTIMISED = 1  # code flag that functions have and module bodies lack
BODY = {"messages": [{"role": "user", "content": "What is a circle?"}], "max_tokens": 3}
# The forms of a row: classes whose instance stands for one row between two functions, in the order in which a row takes
# them. Settings that stand in one (SamplingParams, ChatForm) and parts of one (a message, a completion) are none, nor
# is what stands for many rows (a run, a step's batch, an event). docs/architecture.md has them as a table.
FORMS = (
    "serving.replica.RawRow", "serving.workers.pool.PoolItem", "builtins.dict", "batch.rows.chat.ChatBody",
    "prompts.text.messages.Conversation", "request.prompt_inputs.PromptInputs", "serving.endpoint.Prepared",
    "engine.generation.UnfinishedRequest", "core.sequence.Sequence", "engine.generation.Generation",
    "request.outputs.RequestOutput", "batch.rows.counts.Counts", "serving.replica.FinishedRow",
)


class Part:
    """What was entered in a part of the run."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.deepest: list[str] = []

    def add(self, file: str, function: str, stack: list[str]) -> None:
        self.files.add(file)
        self.functions.add((file, function))
        self.deepest = max(self.deepest, stack, key=len)

    def counts(self) -> dict[str, int]:
        return {"files": len(self.files), "functions": len(self.functions), "frames": len(self.deepest)}


class Trace:
    """What was seen. `parts`: all of it, the start, what serves the row, its preparation. `to_step`: our frames above
    and with the engine's step. `passed`: the forms that a function was given or gave back."""

    def __init__(self, forms: tuple[type, ...]) -> None:
        self.parts = {"all": Part(), "start": Part(), "serving": Part(), "preparing": Part()}
        self.to_step: list[str] = []
        self.passed: set[type] = set()
        self.now = "start"
        self._forms = frozenset(forms)

    def record(self, frame: FrameType, event: str, argument: Any) -> None:
        """For sys.setprofile."""
        if event not in ("call", "return") or not _is_ours(frame):
            return
        code = frame.f_code
        if event == "return":
            self.passed |= {type(argument)} & self._forms
            return
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        self.passed |= {type(frame.f_locals.get(name)) for name in names if name != "self"} & self._forms
        if code.co_name == "add_request" and self.now == "start":
            self.now = "serving"
        stack, caller = [], frame
        while caller is not None:
            if _is_ours(caller):
                stack.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}")
            caller = caller.f_back  # type: ignore[assignment]
        if stack[0] == "llm_engine.py:step":
            self.to_step = stack
        for part in ("all", self.now):
            self.parts[part].add(code.co_filename, code.co_name, stack)


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    is_function = bool(code.co_flags & _OPTIMISED) and not code.co_name.startswith("<")
    return is_function and code.co_filename.startswith(ROOTS)


def form_of(name: str) -> type:
    module, _, name = name.rpartition(".")
    found: type = getattr(importlib.import_module(module if module == "builtins" else f"npu_runner.{module}"), name)
    return found


def prepare(rows: Path, trace: Trace) -> None:
    """Prepare the first row as a worker does."""
    from npu_runner.batch.files.input_file import InputFile
    from npu_runner.batch.job.row_server import CheckpointSide
    from npu_runner.batch.rows.preprocessing import RowPreprocessor
    from npu_runner.config import RunnerConfig

    config = RunnerConfig.from_keywords(model="shapes-vl", platform="cpu")
    with InputFile(str(rows), rows.parent) as file:
        preprocessor = RowPreprocessor(source=file.source, processor=CheckpointSide(config).processor)
        row = next(file.rows())
        trace.now = "preparing"
        preprocessor(row)


def main() -> int:
    """Run a job of one row under the profiler."""
    forms = tuple(map(form_of, FORMS))
    from npu_runner.cli.main import main as npu_runner_main

    trace = Trace(forms)
    with tempfile.TemporaryDirectory() as folder:
        rows, answers = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
        row = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": BODY}
        rows.write_text(json.dumps(row) + "\n")
        sys.argv = ["npu-runner", "batch", "-i", str(rows), "-o", str(answers), "--model", "shapes-vl", "--platform",
                    "cpu", "--kv-cache-bytes", "64M", "--preprocessing-workers", "1", "--progress", "off"]
        threading.setprofile(trace.record)
        sys.setprofile(trace.record)
        try:
            status = npu_runner_main()
            prepare(rows, trace)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    counts: dict[str, Any] = {name: part.counts() for name, part in trace.parts.items()}
    print(f"exit {status}")
    for name, part in trace.parts.items():
        print(f"{name}:", ", ".join(f"{count} {what}" for what, count in counts[name].items()))
        print("  " + " < ".join(part.deepest))
    print(f"main to step: {len(trace.to_step)} frames\n  " + " < ".join(trace.to_step))
    missing = [name for name, form in zip(FORMS, forms, strict=True) if form not in trace.passed]
    print(f"forms of the row: {len(forms) - len(missing)}\n  " + ", ".join(form.__name__ for form in forms))
    for name in missing:
        print(f"no function was given or gave back a {name}: strike it from FORMS", file=sys.stderr)
    print(json.dumps({**counts, "frames_to_step": len(trace.to_step), "forms": len(forms) - len(missing)}))
    return status or len(missing)


if __name__ == "__main__":
    sys.exit(main())
