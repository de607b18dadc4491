"""What the doctor looks at: one host, described by its environment, its folders and programs run on it.

Everything that could crash or hang (importing torch_npu, loading a library of the vendor) runs in a process of its own.
Knows nothing of what is right or wrong.
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
    installation: Path = Path("/usr/local/Ascend")
    """Where driver and toolkit are installed by default."""
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


def run_program(host: Host, arguments: Sequence[str], timeout_seconds: float | None = None) -> Outcome:
    """Run the host's Python with `arguments`; reports are the lines it writes to the file named by its last argument.

    Not its standard output: libraries of the vendor write there, too.
    """
    limit = host.timeout_seconds if timeout_seconds is None else timeout_seconds
    with tempfile.TemporaryDirectory() as folder:
        reports, output = Path(folder, "reports"), Path(folder, "output")
        reports.touch()
        with output.open("w") as file:
            process = subprocess.Popen([host.python, *arguments, str(reports)], env=dict(host.environment), stdout=file,
                                       stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)
            try:
                status: int | None = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        text = output.read_text(errors="replace")
        found = [json.loads(line) for line in reports.read_text().splitlines()]
    return Outcome(found, _what_went_wrong(status, limit, text), text, status is None)


def run_function(host: Host, function: Callable[[str], None]) -> Outcome:
    """Run `function`, which imports what it needs and appends to the file that it is given, on the host's Python."""
    return run_program(host, ["-c", f"{inspect.getsource(function)}\nimport sys\n{function.__name__}(sys.argv[1])"])


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
        return f"died by {signal.Signals(-status).name}{first}"
    lines = output.strip().splitlines()
    return errors[0] if errors else lines[-1] if lines else f"exit status {status}"
