"""`<output>.runs.jsonl`: what each run of a job has done, so that all of them can be added up.

A run appends its totals so far under its id, now and then and at its end; the last line of each run counts. So a killed
run counts up to its last line. Only the last line is synced: a power cut may take lines of a run under way, and with
them figures, never rows. Lines that cannot be read are left out. Knows nothing of what is counted.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing, sync_folder, write_all
from npu_runner.batch.files.names import runs_path
from npu_runner.errors import ConfigError

Line = Mapping[str, Any]
"""What is known of a run; `run` is its id."""


def read_runs(output: Path) -> list[Line]:
    """The last line of each run, in the order in which they began.

    Raises ConfigError for a file of whole lines none of which is a run's: no job has made it.
    """
    path = runs_path(output)
    with clear_file_errors(f"record of runs {path}"):
        # What follows the last line end is torn.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: dict[str, Line] = {}
    for line in lines:
        with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
            run = json.loads(line)
            found[run["run"]] = run  # a dict keeps the place of the first
    if lines and not found:
        raise ConfigError(f"record of runs {path}: no line of it can be read, so no job has made it; move it away")
    return list(found.values())


class RunRecord:
    """The record while a run holds the output. Without an output file (`output` None) nothing is kept."""

    def __init__(self, output: Path | None, *, overwrite: bool = False):
        self._path = None if output is None else runs_path(output)
        self.earlier = [] if output is None or overwrite else read_runs(output)
        """Of the runs before this one, as far as their answers stay."""

    def clear(self) -> None:
        """Before an output is overwritten: killed in between, its answers are of no known run, and never of another
        output's."""
        if self._path is not None:
            with clear_file_errors(f"record of runs {self._path}"):
                self._path.unlink(missing_ok=True)

    def begin(self) -> None:
        """Leave one whole line of each earlier run: killed at any moment, the old or the new file is there."""
        if self._path is not None and self._path.exists():
            with clear_file_errors(f"record of runs {self._path}"), replacing(self._path) as file:
                file.writelines(map(_encoded, self.earlier))

    def append(self, line: Line, *, is_last: bool = False) -> None:
        """`is_last`: it is on disk when this returns. Raises JobError."""
        if self._path is None:
            return
        with late_file_errors(f"record of runs {self._path}"):
            # By its name each time: a file that was removed is made again.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o666)
            try:
                _write_whole(descriptor, _encoded(line))
                if is_last:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if is_last:
                sync_folder(self._path.parent)


def _encoded(line: Line) -> bytes:
    return json.dumps(line).encode() + b"\n"


def _write_whole(descriptor: int, data: bytes) -> None:
    """A full disk may take a part of a line: nothing of it stays, so that later lines are whole."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        write_all(descriptor, data)
    except OSError:
        os.ftruncate(descriptor, end)
        raise
