"""Writes the status beside the output every other second while a job runs, and with it the command's views of it.

The driver's thread writes between its polls of the replicas, so no figure changes meanwhile. An old file says that the
driver has been in one step since then. Knows nothing of how rows are served.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from npu_runner import __version__
from npu_runner.batch.files.names import status_path
from npu_runner.batch.files.runs import INTERRUPTED
from npu_runner.batch.files.status_file import (
    Engines,
    LiveFile,
    Moment,
    Pace,
    Phase,
    ReplicaPhase,
    ReplicaStatus,
    Rows,
    Status,
    Tokens,
    encoded,
    printable,
)
from npu_runner.batch.job.driver import stats_of
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.errors import NpuRunnerError
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.replicas.fleet import Fleet
from npu_runner.serving.replicas.replica_state import ReplicaState

BEAT_SECONDS = 2.0
LATELY_SECONDS = 30.0


class Lately:
    """Rows per second in the last LATELY_SECONDS, of counts that come now and then."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def rate(self, now: float, num_done: int) -> float:
        """`now`: of the monotonic clock; `num_done`: so far. It falls where rows were lost with their output."""
        self._seen.append((now, num_done))
        while len(self._seen) > 2 and self._seen[1][0] <= now - LATELY_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        return max(0, num_done - before) / (now - since) if now > since else 0.0


class Live:
    """The status of `summary`'s run. The output is locked within `writing`."""

    def __init__(self, summary: JobSummary, history: JobHistory, say: Callable[[str], None]):
        self._summary = summary
        self._history = history
        self._say = say
        self._files: list[tuple[LiveFile, Callable[[Status], bytes]]] = []
        self._started = Moment.now()
        self._phase: Phase = "starting"
        self._doing: str | None = None
        self._exit_status: int | None = None
        self._lately = Lately()
        self._next_at = 0.0
        self.fleet: Fleet | None = None
        """The replicas, once there are some."""
        self.num_held: Callable[[], int] | None = None
        """The number of devices that they hold; None: the model is not loading yet."""

    @contextlib.contextmanager
    def writing(self, output: Path | None, views: Mapping[Path, Callable[[Status], bytes]]) -> Iterator[None]:
        """Write the status, and the view of it in each of these files. When this is left, they say how the run has
        ended; after a run that was refused they are as before."""
        if output is not None:
            path = status_path(output)
            self._files.append((LiveFile(f"status {path}", path, self._say), encoded))
        self._files += [(LiveFile(f"metrics_file {path}", path, self._say), view) for path, view in views.items()]
        self._write()
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def enter(self, phase: Phase, doing: str | None = None) -> None:
        """Report this phase from now on."""
        if phase != self._phase:
            self._phase, self._next_at = phase, 0.0
        self._doing = None if doing is None else printable(doing)
        self.beat()

    def beat(self) -> None:
        """Write if BEAT_SECONDS have passed."""
        if time.monotonic() >= self._next_at:
            self._write()

    def _close(self, error: BaseException | None) -> None:
        """A run that is none of the output's has changed nothing, unless it came to an end. After a bug nothing is
        written: from outside the job was killed."""
        if error is not None and not self._history.is_counted:
            for file, _ in self._files:
                file.put_back()
        elif self._summary.end is not None:
            self._exit_status = replace(self._summary, error=error if isinstance(error, NpuRunnerError) else None,
                                        is_interrupted=self._summary.end == INTERRUPTED).exit_status
            self._write()

    def measure(self) -> None:
        """Read the figures of the replicas into the summary."""
        if self.fleet is not None:
            self._summary.all_stats = stats_of(self.fleet)
        if self.num_held is not None:
            self._summary.add_device_time(self.num_held())

    def _write(self) -> None:
        self._next_at = time.monotonic() + BEAT_SECONDS
        if self._files:
            if self._summary.end is None and self._summary.serve_ended is None:
                self.measure()
            status = self._status()
            for file, encode in self._files:
                file.write(encode(status))

    def _status(self) -> Status:
        summary, tally = self._summary, self._summary.tally
        states = [] if self.fleet is None else self.fleet.states
        engine = summary.stats
        if summary.end is not None:
            engine = replace(engine, num_running=0, num_waiting=0, kv_blocks_used=0)
        return Status(
            run=summary.run_id, last_recorded=self._history.last_recorded, npu_runner=__version__, pid=os.getpid(),
            started=self._started, updated=Moment.now(), phase=self._phase, doing=self._doing, end=summary.end,
            exit_status=self._exit_status, rows=self._rows(), pace=self._pace(engine),
            tokens=Tokens(prompt=tally.num_prompt_tokens, completion=tally.num_completion_tokens,
                          prefill_computed=engine.num_prefill_tokens, decode_computed=engine.num_decode_tokens),
            engines=_engines(engine), runs=self._history.runs_of_status,
            replicas=[_replica(state, is_over=summary.end is not None) for state in states])

    def _rows(self) -> Rows:
        rows = replace(self._summary.rows, num_copied=self._history.num_copied)
        codes = {printable(code): count for code, count in rows.failures_by_code.items()}
        return Rows(**{"total": self._summary.num_rows, **replace(rows, failures_by_code=codes).rows_json()})

    def _pace(self, engine: EngineStats) -> Pace:
        summary, num_done = self._summary, self._summary.tally.num_done
        seconds = max(0.0, summary.serve_seconds)
        num_left = (summary.num_rows or 0) - summary.num_resumed - num_done
        return Pace(
            rows=num_done, start_seconds=max(0.0, summary.start_seconds), serve_seconds=seconds,
            rows_per_second=num_done / seconds if seconds > 0 else 0.0,
            lately=self._lately.rate(time.monotonic(), num_done),
            seconds_left=summary.tally.seconds_left(max(0, num_left), engine, seconds))


def _engines(stats: EngineStats) -> Engines:
    return Engines(
        running=stats.num_running, waiting=stats.num_waiting, vision_cache_hits=stats.vision_cache_hits,
        vision_cache_misses=stats.vision_cache_misses, vision_cache_bytes=stats.vision_cache_bytes,
        prefix_cache_hit_tokens=stats.prefix_cache_hits, prefix_cache_queried_tokens=stats.prefix_cache_queries,
        kv_blocks_used=stats.kv_blocks_used, kv_blocks_total=stats.kv_blocks_total, preemptions=stats.num_preemptions)


def _replica(state: ReplicaState, *, is_over: bool) -> ReplicaStatus:
    phase: ReplicaPhase
    if is_over:
        phase = "ended"
    elif state.facts is not None:
        phase = "serving"
    elif state.replica is None:
        phase = "dead"
    else:
        phase = "loading" if state.waits_for is None else "waiting"
    return ReplicaStatus(name=printable(state.name), phase=phase, rows=state.num_finished, deaths=state.num_deaths)
