"""Starts jobs that are killed, and looks at how far they are."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests import zygote


def started(arguments: list[str], folder: Path) -> subprocess.Popen[Any]:
    return zygote.Popen([sys.executable, "-m", "npu_runner", *arguments], cwd=folder, stdout=2)


def whole_lines(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines(keepends=True)


def is_over(pid: int) -> bool:
    """Until its status is asked for, a job that has ended is a zombie."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def wait_for_rows(pid: int, output: Path, count: int) -> None:
    """Until so many rows lie on disk, or the job is over."""
    while len(whole_lines(output)) < count and not is_over(pid):
        time.sleep(0.002)
