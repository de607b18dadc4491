"""One host, as the doctor examines it: its environment, its folders and programs run on it.

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

from npu_runner.processes.child import Child, describe_exit
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
    """The end of a program: its reports (JSON values, in order), and the first error it named, if it failed."""

    reports: list[Any]
    error: str | None
    output: str = ""
    is_timeout: bool = False


def run_program(host: Host, module: str, arguments: Sequence[str], timeout_seconds: float | None = None,
                on_report: Callable[[Any], object] = lambda report: None) -> Outcome:
    """Run a module of ours on the host's Python. Reports are the lines it writes to the file its last argument names;
    `on_report` gets each while it runs.

    Not its standard output: libraries of the vendor write there, too.
    """
    limit = host.timeout_seconds if timeout_seconds is None else timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        reports.touch()
        with output.open("w") as file:
            child = Child("npu probe", module, *arguments, reports, environment=host.environment, python=host.python,
                          output=file)
            try:
                status = _status_within(limit, child, told := Reports(reports, on_report))
            finally:
                with contextlib.suppress(ProcessLookupError):  # and whatever it started: it leads a process group
                    os.killpg(child.pid, signal.SIGKILL)
                child.kill()
        text = output.read_text(errors="replace")
        told.read()
    return Outcome(told.found, _what_went_wrong(status, limit, text), text, status is None)


def run_command(command: Sequence[str], timeout_seconds: float = 60.0) -> str:
    """The output of a vendor's program, or why it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_seconds,
                              check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}\n"
    return done.stdout + done.stderr


def run_function(host: Host, function: Callable[[str], None]) -> Outcome:
    """Run `function`, which imports what it needs and appends to the file that it is given, on the host's Python. It
    travels as its source: that Python need not find its module."""
    return run_program(host, __name__, [inspect.getsource(function), function.__name__])


def main(arguments: list[str]) -> None:
    """SOURCE NAME REPORTS: the other end of `run_function`."""
    source, name, reports = arguments
    functions: dict[str, Any] = {}
    exec(source, functions)
    functions[name](reports)


class Reports:
    """The whole lines of a file that grows, as JSON."""

    def __init__(self, path: Path, tell: Callable[[Any], object]):
        self.found: list[Any] = []
        self._path, self._tell = path, tell

    def read(self) -> None:
        for line in self._path.read_bytes().split(b"\n")[len(self.found):-1]:
            self.found.append(json.loads(line))
            self._tell(self.found[-1])


def _status_within(limit: float, child: Child, reports: Reports) -> int | None:
    watch = Stopwatch()
    while not watch.exceeds(limit):
        status = child.exit_status(watch.poll_seconds(limit))
        reports.read()
        if status is not None:
            return status
    return None


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
