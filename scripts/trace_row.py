"""Counts what one text row passes on the CPU: files of ours entered, functions called, the deepest stack of our frames.

    .venv/bin/python scripts/trace_row.py

Functions only: module and class bodies, comprehensions and lambdas are not counted. All threads of the job's process;
workers are not. Prints a line, the deepest stack, and one JSON line.
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


class Trace:
    """What was seen so far."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.deepest: list[str] = []

    def record(self, frame: FrameType, event: str, _argument: Any) -> None:
        """For sys.setprofile."""
        if event != "call" or not _is_ours(frame):
            return
        self.files.add(frame.f_code.co_filename)
        self.functions.add((frame.f_code.co_filename, frame.f_code.co_name))
        stack, caller = [], frame
        while caller is not None:
            if _is_ours(caller):
                stack.append(f"{Path(caller.f_code.co_filename).name}:{caller.f_code.co_name}")
            caller = caller.f_back  # type: ignore[assignment]
        if len(stack) > len(self.deepest):
            self.deepest = stack


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
    num_files, num_functions, depth = len(trace.files), len(trace.functions), len(trace.deepest)
    print(f"exit {status}: {num_files} files, {num_functions} functions, {depth} frames deep")
    print(" < ".join(trace.deepest))
    print(json.dumps({"files": num_files, "functions": num_functions, "frames": depth}))
    return status


if __name__ == "__main__":
    sys.exit(main())
