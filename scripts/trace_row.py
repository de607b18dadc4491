"""Counts what one text row passes on the CPU: files of ours entered, functions called, the deepest stack of our frames.
The start and what serves the row (from the engine's first request on) are counted together and each by itself.

    .venv/bin/python scripts/trace_row.py

Functions only: module and class bodies, comprehensions and lambdas are not counted. All threads of the job's process;
workers are not. Prints a line and the deepest stack of each, and one JSON line.
"""

from __future__ import annotations

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
    """What was seen so far. `parts`: all of it, the start, what serves the row."""

    def __init__(self) -> None:
        self.parts = {"all": Part(), "start": Part(), "serving": Part()}
        self._now = "start"

    def record(self, frame: FrameType, event: str, _argument: Any) -> None:
        """For sys.setprofile."""
        if event != "call" or not _is_ours(frame):
            return
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function == "add_request":
            self._now = "serving"
        stack, caller = [], frame
        while caller is not None:
            if _is_ours(caller):
                stack.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}")
            caller = caller.f_back  # type: ignore[assignment]
        for part in ("all", self._now):
            self.parts[part].add(file, function, stack)


def _is_ours(frame: FrameType) -> bool:
    code = frame.f_code
    is_function = bool(code.co_flags & _OPTIMISED) and not code.co_name.startswith("<")
    return is_function and code.co_filename.startswith(ROOTS)


def main() -> int:
    """Runs a job of one row under the profiler."""
    from npu_runner.cli.main import main as npu_runner_main

    trace = Trace()
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
        finally:
            sys.setprofile(None)
            threading.setprofile(None)  # type: ignore[arg-type]
    counts = {name: part.counts() for name, part in trace.parts.items()}
    print(f"exit {status}")
    for name, part in trace.parts.items():
        print(f"{name}:", ", ".join(f"{count} {what}" for what, count in counts[name].items()))
        print("  " + " < ".join(part.deepest))
    print(json.dumps(counts))
    return status


if __name__ == "__main__":
    sys.exit(main())
