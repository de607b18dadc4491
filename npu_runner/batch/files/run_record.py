"""`<output>.runs.jsonl`: what each run of a job has done, so that all of them can be added up.

A run appends its totals so far under its id, now and then and at its end; the last line of each run counts. So a killed
run counts up to its last line. Only the last line is synced: a power cut may take lines of a run under way, and with
them figures, never rows. Lines that are torn, or were edited into something else, are left out.

Knows nothing of what is counted, but which of it can be added.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from npu_runner.batch.files.durable import clear_file_errors, late_file_errors, replacing, sync_folder, write_all
from npu_runner.batch.files.names import runs_path
from npu_runner.errors import ConfigError

Line = Mapping[str, Any]
"""What is known of a run; `run` is its id. The fields are `_RunLine`'s, and whatever a later version adds."""

_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Seconds = Annotated[float, Field(ge=0, lt=1 << 63, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]
"""With no half of a surrogate pair, which cannot be printed."""
_END_OF_CALENDAR = 253_402_300_800
"""The first second of the year 10000."""


class _RunLine(BaseModel):
    """What each line has, so that lines of any version can be added up."""

    model_config = ConfigDict(strict=True)

    run: _Text
    started: Annotated[int, Field(ge=0, lt=_END_OF_CALENDAR)]
    npu_runner: _Text
    platform: _Text | None
    devices: _Count
    rows: _Count | None
    end: _Text | None
    seconds: dict[str, _Seconds]
    computed: dict[str, _Count]
    tally: dict[str, _Count | dict[str, _Count]]

    @model_validator(mode="after")
    def _can_be_added(self) -> _RunLine:
        """A name has a number in each line, or a mapping in each line."""
        if not (self.seconds.keys() >= {"start", "serve", "device"} and "num_answered" in self.tally):
            raise ValueError("a sum is missing")
        if any(isinstance(count, int) != name.startswith("num_") for name, count in self.tally.items()):
            raise ValueError("names of numbers begin with num_, and no others do")
        return self


def read_runs(output: Path) -> list[Line]:
    """The last line of each run, in the order in which they began.

    Raises ConfigError for a file of whole lines none of which is a run's: no job has left it so.
    """
    path = runs_path(output)
    with clear_file_errors(f"record of runs {path}"):
        # What follows the last line end is torn.
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    found: dict[str, Line] = {}
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):  # pydantic's errors are ValueErrors
            run = json.loads(line, parse_constant=_refuse)
            found[_RunLine.model_validate(run).run] = run  # a dict keeps the place of the first
    if lines and not found:
        raise ConfigError(f"record of runs {path}: no line of it can be read, so no job has left it so; move it away, "
                          "and earlier runs are not counted")
    return list(found.values())


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


class RunRecord:
    """The record while a run holds the output. Without an output file (`output` None) nothing is kept."""

    def __init__(self, output: Path | None, *, overwrite: bool = False, counts: Callable[[Line], bool] = bool):
        """`counts`: whether an earlier run is one of this output."""
        self._path = None if output is None else runs_path(output)
        self.earlier = [] if output is None or overwrite else [run for run in read_runs(output) if counts(run)]
        """Of the runs before this one, as far as their answers stay."""
        self._before: bytes | None = None
        if self._path is not None and self._path.exists():
            with clear_file_errors(f"record of runs {self._path}"):
                self._before = self._path.read_bytes()

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

    def withdraw(self) -> None:
        """Leave the file as it was before this run. Raises JobError."""
        if self._path is None:
            return
        with late_file_errors(f"record of runs {self._path}"):
            if self._before is None:
                self._path.unlink(missing_ok=True)
                return
            with replacing(self._path) as file:
                file.write(self._before)

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
    """A full disk, or a signal, may take a part of a line: nothing of it stays, so that later lines are whole."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        write_all(descriptor, data)
    except BaseException:
        os.ftruncate(descriptor, end)
        raise
