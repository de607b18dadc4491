"""`<output>.status.json`: the run under way, for a view from outside and for the next run.

It is replaced every other second: whole whenever it is read, and never synced, so a power cut may leave an empty one.
A failure to write it is reported once, and the job goes on. Knows nothing of where the figures come from.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from npu_runner.batch.files.durable import clear_file_errors, replacing
from npu_runner.batch.files.names import status_path
from npu_runner.batch.files.runs import Count, Number, Runs, Text
from npu_runner.batch.rows.counts import Counts
from npu_runner.errors import ConfigError, JobError

Phase = Literal["starting", "loading", "serving", "ordering", "reporting"]
ReplicaPhase = Literal["loading", "serving", "waiting", "dead", "ended"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Part(BaseModel):
    """A part of the status. Fields that a later version adds are ignored."""

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

    host: Text
    boot: Text
    clock: Number
    """Seconds since the boot, suspensions of the host included."""
    time: Number
    """Seconds since the epoch of Unix."""

    @classmethod
    def now(cls) -> Moment:
        return cls(host=socket.gethostname(), boot=_boot(), clock=time.clock_gettime(time.CLOCK_BOOTTIME),
                   time=time.time())

    def seconds_until(self, later: Moment) -> float:
        is_one_clock = self.boot == later.boot != ""
        return max(0.0, later.clock - self.clock if is_one_clock else later.time - self.time)


class Rows(_Part):
    """The rows of all runs, as far as they are on disk."""

    total: Count | None
    """Rows of the input; None: it was not read yet."""
    answered: Count
    failed: Count
    cut_off: Count
    repetition: Count
    unparsed: Count = 0
    whole: Count | None = None
    """Answers without a flaw; None: the version that wrote it did not count them."""
    copied: Count = 0
    """Answers that runs have copied from equal rows."""
    failures_by_code: dict[Text, Count]
    attempts: dict[Text, Count | dict[Text, Count]] = {}
    """Counts.attempts_json; empty: no row has had several."""

    @property
    def counts(self) -> Counts:
        return Counts(num_answered=self.answered, num_not_whole=self.answered - (self.whole or 0),
                      num_cut_off=self.cut_off, num_repetition=self.repetition, num_unparsed=self.unparsed,
                      num_copied=self.copied, failures_by_code=self.failures_by_code)


class Pace(_Part):
    """The speed of this run alone, by the monotonic clock."""

    rows: Count
    """Finished by this run."""
    start_seconds: Number
    serve_seconds: Number
    rows_per_second: Number
    lately: Number
    """Rows per second in the last half minute."""
    seconds_left: Number | None
    """None: it has answered no row, from which to tell."""


class Tokens(_Part):
    """The tokens of this run alone."""

    prompt: Count
    completion: Count
    prefill_computed: Count
    decode_computed: Count


class Engines(_Part):
    """All engines together: counters since their start, and gauges of the moment."""

    running: Count
    waiting: Count
    vision_cache_hits: Count
    vision_cache_misses: Count
    vision_cache_bytes: Count
    prefix_cache_hit_tokens: Count
    prefix_cache_queried_tokens: Count
    kv_blocks_used: Count
    kv_blocks_total: Count
    preemptions: Count


class ReplicaStatus(_Part):
    name: Text
    phase: ReplicaPhase
    rows: Count
    deaths: Count


class Status(_Part):
    """The progress of a run, or its end."""

    format: Literal[1] = 1
    run: Text
    last_recorded: Text | None
    """The last run that the state beside it has, mostly this one. It tells the status of another output."""
    npu_runner: Text
    pid: Count
    """The same as in the lock."""
    started: Moment
    updated: Moment
    phase: Phase
    doing: Text | None
    """The step of the load."""
    end: Text | None
    """FINISHED, INTERRUPTED or its error; None: it goes on, or was killed."""
    exit_status: Count | None
    """None: it goes on."""
    rows: Rows
    pace: Pace
    tokens: Tokens
    engines: Engines
    replicas: list[ReplicaStatus]
    report: Any = None
    """Versions before 0.6 listed reports here."""
    runs: list[Any] = []
    """The figures of this run, behind those of earlier runs that the state does not have."""

    def belongs_to(self, recorded: Runs) -> bool:
        """Whether it is of the output whose state has these runs. A job may be killed between the two files."""
        return recorded.last_id in (self.last_recorded, self.run)


def printable(text: str) -> str:
    """Text for a status: errors name files, whose names may be no UTF-8."""
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
        """Raises nothing; the first failure is reported."""
        try:
            with replacing(self._path, is_synced=False) as file:
                file.write(data)
        except (OSError, JobError) as error:
            self._report(error)

    def put_back(self) -> None:
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
