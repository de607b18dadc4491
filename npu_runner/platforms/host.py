"""What the doctor looks at: one host, described by its environment, its folders and programs run on it.

Everything that could crash or hang (importing torch, loading a library of a vendor) runs in a process of its own. Knows
nothing of what is right or wrong.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner.processes import commands
from npu_runner.processes.child import describe_exit
from npu_runner.processes.stopwatch import Stopwatch

STATUSES = ("ok", "warning", "failed", "skipped")


@dataclass(frozen=True)
class Check:
    """One thing looked at. `remedy` is empty where nothing is to be done."""

    name: str
    status: str
    found: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host. Tests give it folders and environments of their own."""

    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    python: str = sys.executable
    software: Path = Path("/usr/local")
    """Where vendors install drivers and toolkits."""
    device_files: Path = Path("/dev")
    shared_memory: Path = Path("/dev/shm")
    timeout_seconds: float = 180.0
    """For one probe; a driver that hangs must not hang the doctor."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended: what it reported (JSON values, in order), and the first error it named, if it failed."""

    reports: list[Any]
    error: str | None
    output: str = ""
    is_timeout: bool = False


def run_program(host: Host, module: str, arguments: Sequence[str], timeout_seconds: float | None = None) -> Outcome:
    """Run a module of ours on the host's Python. Reports are the lines it writes to the file its last argument names.

    Not its standard output: libraries of the vendor write there, too.
    """
    limit = host.timeout_seconds if timeout_seconds is None else timeout_seconds
    return _run(host, commands.module_command(module, *arguments, python=host.python), limit)


def run_function(host: Host, function: Callable[[str], None]) -> Outcome:
    """Run `function`, which imports what it needs and appends to the file that it is given, on the host's Python."""
    code = f"{inspect.getsource(function)}\nimport sys\n{function.__name__}(sys.argv[1])"
    return _run(host, commands.code_command(code, python=host.python), host.timeout_seconds)


def _run(host: Host, command: list[str], limit: float) -> Outcome:
    with tempfile.TemporaryDirectory() as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        reports.touch()
        with output.open("w") as file:
            process = subprocess.Popen(
                [*command, str(reports)], env=commands.environment(host.environment), stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                status = _status_within(limit, process)
            finally:
                _end(process)
        text = output.read_text(errors="replace")
        found = [json.loads(line) for line in reports.read_text().splitlines()]
    return Outcome(found, _what_went_wrong(status, limit, text), text, status is None)


def _status_within(limit: float, process: subprocess.Popen[bytes]) -> int | None:
    watch = Stopwatch()
    while not watch.exceeds(limit):
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(watch.look_seconds(limit))
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started: they are a process group of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _what_went_wrong(status: int | None, limit: float, output: str) -> str | None:
    if status == 0:
        return None
    # The first error of a chain is the cause; those after it say what it led to.
    errors = re.findall(r"^(?:[\w.]*(?:Error|Exception): |npu-runner: ).+", output, re.MULTILINE)
    first = f": {errors[0]}" if errors else ""
    if status is None:
        return f"no end after {limit:g} s{first}"
    if status < 0:
        return f"{describe_exit(status)}{first}"
    lines = output.strip().splitlines()
    return errors[0] if errors else lines[-1] if lines else f"exit status {status}"
