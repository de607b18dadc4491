"""`<output>.status.json`: how a job gets on, for whoever looks from outside. Written anew every other second.

It is whole whenever it is read, and never synced: a power cut may leave an empty one. What cannot be written is said
once, and the job goes on. Knows nothing of where the figures come from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from npu_runner.batch.counts import Counts
from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.names import status_path
from npu_runner.errors import ConfigError, JobError

Phase = Literal["starting", "loading", "serving", "ordering", "reporting"]
ReplicaPhase = Literal["loading", "serving", "waiting", "dead", "ended"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]
_Number = Annotated[float, Field(ge=0, lt=1 << 63, allow_inf_nan=False)]
_Text = Annotated[str, AfterValidator(lambda text: text.encode().decode())]
"""With no half of a surrogate pair, which cannot be printed."""


class _Part(BaseModel):
    """What a later version adds is read over."""

    model_config = ConfigDict(strict=True, frozen=True)


@functools.cache
def _boot() -> str:
    """Which start of the host this is; empty where the system does not say."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""


class Moment(_Part):
    """When a status was written. Clocks of people jump: on the same boot of a host `clock` says how long ago."""

    host: _Text
    boot: _Text
    clock: _Number
    """Seconds since the boot, suspensions of the host included."""
    time: _Number
    """Unix time."""

    @classmethod
    def now(cls) -> Moment:
        return cls(host=socket.gethostname(), boot=_boot(), clock=time.clock_gettime(time.CLOCK_BOOTTIME),
                   time=time.time())

    def seconds_until(self, later: Moment) -> float:
        is_one_clock = self.boot == later.boot != ""
        return max(0.0, later.clock - self.clock if is_one_clock else later.time - self.time)


class Rows(_Part):
    """Of all runs, as far as they are on disk."""

    total: _Count | None
    """Of the input; None: it was not read yet."""
    answered: _Count
    failed: _Count
    cut_off: _Count
    repetition: _Count
    unparsed: _Count = 0
    whole: _Count | None = None
    """Answers without a flaw; None: the version that wrote it did not count them."""
    failures_by_code: dict[_Text, _Count]

    @property
    def counts(self) -> Counts:
        return Counts(num_answered=self.answered, num_not_whole=self.answered - (self.whole or 0),
                      num_cut_off=self.cut_off, num_repetition=self.repetition, num_unparsed=self.unparsed,
                      failures_by_code=self.failures_by_code)


class Pace(_Part):
    """Of this run alone, by the monotonic clock."""

    rows: _Count
    """Finished by this run."""
    start_seconds: _Number
    serve_seconds: _Number
    rows_per_second: _Number
    lately: _Number
    """Rows per second in the last half minute."""
    seconds_left: _Number | None
    """None: it has answered no row, from which to tell."""


class Tokens(_Part):
    """Of this run alone."""

    prompt: _Count
    completion: _Count
    prefill_computed: _Count
    decode_computed: _Count


class Engines(_Part):
    """Of all replicas together: counters since their start, and gauges of the moment."""

    running: _Count
    waiting: _Count
    vision_cache_hits: _Count
    vision_cache_misses: _Count
    vision_cache_bytes: _Count
    prefix_cache_hit_tokens: _Count
    prefix_cache_queried_tokens: _Count
    kv_blocks_used: _Count
    kv_blocks_total: _Count
    preemptions: _Count


class ReplicaStatus(_Part):
    name: _Text
    phase: ReplicaPhase
    rows: _Count
    deaths: _Count


class ReportStatus(_Part):
    """Of reports while the job runs."""

    made: Moment | None
    """The last one."""
    error: _Text | None
    """Why the last try has made none."""


class Status(_Part):
    """How a run of a job gets on, or how it has ended."""

    format: Literal[1] = 1
    run: _Text
    last_recorded: _Text | None
    """The last run in the record of runs beside it, mostly this one. So a status of another output is known."""
    npu_runner: _Text
    pid: _Count
    """The same as in the lock."""
    started: Moment
    updated: Moment
    phase: Phase
    doing: _Text | None
    """While it loads: what exactly."""
    end: _Text | None
    """FINISHED, INTERRUPTED or its error; None: it goes on, or was killed."""
    exit_status: _Count | None
    """None: it goes on."""
    rows: Rows
    pace: Pace
    tokens: Tokens
    engines: Engines
    replicas: list[ReplicaStatus]
    report: ReportStatus | None


def printable(text: str) -> str:
    """As a status has it: errors name files, whose names may be no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def read_status(output: Path) -> Status | None:
    """None where there is none. Raises ConfigError for a file that no job has left so, but after a power cut."""
    path = status_path(output)
    try:
        with clear_file_errors(f"status {path}"):
            return Status.model_validate(json.loads(path.read_bytes())) if path.is_file() else None
    except (ValueError, RecursionError, ValidationError) as error:
        raise ConfigError(f"status {path}: it is not whole, or of another version") from error


class LiveFile:
    """A file that is replaced again and again while a job runs. Made when nothing of it is written yet."""

    def __init__(self, title: str, path: Path, say: Callable[[str], None]):
        self._title = title
        self._path = path
        self._say = say
        self._has_failed = False
        self._before: bytes | None = None
        with contextlib.suppress(OSError):
            self._before = path.read_bytes() if path.is_file() else None

    def write(self, data: bytes) -> None:
        """The first failure is said, and none is raised."""
        try:
            with replacing(self._path, is_synced=False) as file:
                file.write(data)
        except (OSError, JobError) as error:
            self._report(error)

    def put_back(self) -> None:
        """As it was before."""
        if self._before is not None:
            self.write(self._before)
            return
        try:
            self._path.unlink(missing_ok=True)
        except OSError as error:
            self._report(error)

    def _report(self, error: OSError | JobError) -> None:
        if not self._has_failed:
            self._has_failed = True
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            self._say(f"{self._title}: {reason}; the job goes on, and tries again without a word")


def encoded(status: Status) -> bytes:
    return json.dumps(status.model_dump()).encode() + b"\n"
