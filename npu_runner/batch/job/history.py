"""This run of a job in figures, and its place among the runs of the output.

Runs are in the state once a run has begun to write. Until then they are in the status: this run, and those before it
that were killed while they loaded or whose last figures the state does not have. Knows nothing of how rows are served,
or of how figures are shown.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from npu_runner import __version__
from npu_runner.batch.files.manifest import StateFile
from npu_runner.batch.files.runs import FINISHED, INTERRUPTED, Run, Runs
from npu_runner.batch.files.status_file import Status, printable, read_status
from npu_runner.batch.job.signals import Interrupted
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.flaw import Flaw
from npu_runner.errors import ConfigError, JobError, NpuRunnerError, TooManyFailuresError
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.replica import ReplicaStats
from npu_runner.serving.replicas.replica_state import ReplicaState


@dataclass(kw_only=True)
class JobSummary:
    """The progress and result of one run of a job, filled in as it proceeds. Only rows in the output count."""

    num_rows: int | None = None
    """Rows of the input; None: nothing was planned yet."""
    num_resumed: int = 0
    """Rows that earlier runs had finished."""
    kept: Counts = field(default_factory=Counts)
    """Rows of earlier runs that stay as they are."""
    tally: Counts = field(default_factory=Counts)
    """Rows of this run."""
    all_stats: ReplicaStats = field(default_factory=ReplicaStats)
    """The figures of all replicas together."""
    replicas: tuple[ReplicaState, ...] = ()
    """The replicas one by one, where there are several."""
    num_workers: int = 0
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase of the first engine that was ready; the rest of `start_seconds` came before the model."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_at: float = field(default_factory=time.time)
    """Unix time; the others are of the monotonic clock."""
    started: float = field(default_factory=time.monotonic)
    serve_began: float | None = None
    serve_ended: float | None = None
    platform: str | None = None
    num_devices: int = 0
    """Devices that the replicas held at the last `add_device_time`."""
    device_seconds: float = 0.0
    """The seconds of the start and of serving, times the devices."""
    is_interrupted: bool = False
    silence: str | None = None
    """Why progress went quiet before the end; None: it did not."""
    error: NpuRunnerError | None = None
    """The error that ended the run early, or that kept it from sorting its output."""
    end: str | None = None
    """FINISHED, INTERRUPTED or the error; None: the run goes on."""
    _held_since: float | None = None

    @property
    def rows(self) -> Counts:
        """The rows of all runs that are in the output."""
        return self.kept + self.tally

    @property
    def stats(self) -> EngineStats:
        return self.all_stats.engine

    @property
    def start_seconds(self) -> float:
        """Reading the input and loading the model, while preprocessing begins."""
        return (self.serve_began or time.monotonic()) - self.started

    @property
    def serve_seconds(self) -> float:
        """From when the model stood ready to the last row."""
        return 0.0 if self.serve_began is None else (self.serve_ended or time.monotonic()) - self.serve_began

    @property
    def num_unfinished(self) -> int:
        assert self.num_rows is not None, "no work was planned yet"
        return self.num_rows - self.num_resumed - self.tally.num_done

    @property
    def is_cut_short(self) -> bool:
        return self.num_unfinished > 0

    @property
    def exit_status(self) -> int:
        """0 all rows answered, 3 finished with failed rows, 1 ended early, 2 ended by what a setting must mend, 4 ended
        early because too many rows failed."""
        if isinstance(self.error, TooManyFailuresError):
            return 4
        if isinstance(self.error, ConfigError):
            return 2
        if self.is_interrupted or self.error is not None:
            return 1
        return 3 if self.rows.num_failed else 0

    def add_device_time(self, num_devices: int) -> None:
        """Count the time since the last call, or since the run began, for this number of devices."""
        now = time.monotonic()
        self.device_seconds += (now - (self._held_since or self.started)) * num_devices
        self.num_devices, self._held_since = num_devices, now

    def is_worth_reporting(self, error: NpuRunnerError) -> bool:
        """A refused setting (exit status 2) changed nothing, and the summary of an earlier run is still true."""
        return self.num_rows is not None and (self.serve_began is not None or not isinstance(error, ConfigError))

    def to_run(self) -> Run:
        """The figures that are added over runs."""
        stats = self.stats
        seconds = {
            "start": self.start_seconds,
            "serve": self.serve_seconds,
            "device": self.device_seconds,
            "prefill": stats.prefill_seconds,
            "decode": stats.decode_seconds,
            "preprocessing_wait": self.all_stats.wait_seconds,
        }
        drafts = {"draft_proposed": stats.num_draft_tokens, "draft_accepted": stats.num_accepted_tokens}
        return {
            "run": self.run_id,
            "started": int(self.started_at),
            "npu_runner": __version__,
            "platform": self.platform,
            "devices": self.num_devices,
            "rows": self.num_rows,
            "end": self.end,
            "seconds": {name: round(value, 3) for name, value in seconds.items()},
            "computed": {"prefill": stats.num_prefill_tokens, "decode": stats.num_decode_tokens,
                         **(drafts if stats.num_drafts else {})},
            "tally": self.tally.to_json(),
        }


class JobHistory:
    """`summary`'s run among the runs of its output. The output is locked from `read` to the end of `ending`."""

    def __init__(self, summary: JobSummary, say: Callable[[str], None]):
        self._summary = summary
        self._say = say
        self._state = StateFile(None)
        self._earlier = Runs()
        self._pending: tuple[Run, ...] = ()
        """Earlier runs as the status has them."""
        self._overwrites = False
        self._final: Run | None = None
        """This run once it has ended."""
        self.is_counted = False
        """This run is one of the output's runs: it has begun to load, and was not refused."""
        self.is_complete = False
        """Every row has its line."""

    def read(self, state: StateFile, output: Path | None, *, overwrite: bool) -> None:
        """Read what earlier runs have done. A status that is torn costs figures, and is no error."""
        self._state, self._overwrites = state, overwrite
        if not overwrite:
            state.load()
        status: Status | None = None
        if output is not None:
            with contextlib.suppress(ConfigError):
                status = read_status(output)
        if status is not None and status.belongs_to(state.runs):
            self._pending = Runs.from_json(status.runs).last
        if not overwrite:
            self._earlier = state.runs.with_runs(self._pending)

    def start(self) -> None:
        """The model is about to load. Until it stands ready, a run that overwrites an output is none of its runs."""
        self.is_counted = not self._overwrites

    @property
    def runs(self) -> Runs:
        return self._earlier.with_runs(self._this_run)

    @property
    def num_copied(self) -> int:
        """Answers that were copied from equal rows, by all runs."""
        return int(self._earlier.sums("tally").get("num_copied", 0)) + self._summary.tally.num_copied

    @property
    def has_earlier(self) -> bool:
        """Another run has worked on the output before."""
        return len(self._earlier) > 0 or self._summary.num_resumed > 0

    @property
    def _this_run(self) -> list[Run]:
        return [self._final or self._summary.to_run()] if self.is_counted else []

    @property
    def runs_of_status(self) -> list[Run]:
        """The runs that are not in the state, and this one."""
        return [*(() if self._state.is_begun else self._pending), *self._this_run]

    @property
    def last_recorded(self) -> str | None:
        return self._state.runs.last_id

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """When it is left, the state on disk has the end of the run, if the run had begun to write. After an error it
        raises no second one."""
        try:
            yield
        except (NpuRunnerError, Interrupted) as error:
            self._summary.end = INTERRUPTED if isinstance(error, Interrupted) else printable(str(error))
            is_refused = isinstance(error, NpuRunnerError) and not self._summary.is_worth_reporting(error)
            self.is_counted &= self._state.is_begun or not is_refused
            try:
                self._save()
            except JobError as second:
                self._say(str(second))
            raise
        self._summary.end = INTERRUPTED if self._summary.is_cut_short else FINISHED
        try:
            self._save()
        except JobError as error:
            self._summary.end = printable(str(error))
            self._final = self._summary.to_run()
            raise

    def _save(self) -> None:
        self._final = self._summary.to_run()
        over: dict[str, Any] = {"retry": Flaw(0), "suspects": {}} if self.is_complete else {}
        self._state.update(runs=self.runs, **over)
