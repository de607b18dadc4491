"""Tells how a job gets on while it runs: the status beside its output, and --metrics-file. Both every other second.

The driver's thread writes them between its polls of the replicas, so no figure changes meanwhile. An old file says that
the driver has been in one step since then. Knows nothing of how rows are served.
"""

from __future__ import annotations

import contextlib
import os
import time
import typing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

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
    """`summary`'s run, in the status and in --metrics-file. The output is locked within `writing`."""

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
    def writing(self, output: Path | None, metrics: Path | None) -> Iterator[None]:
        """When it is left, the files say how the run has ended; after one that was refused they are as before."""
        if output is not None:
            path = status_path(output)
            self._files.append((LiveFile(f"status {path}", path, self._say), encoded))
        if metrics is not None:
            self._files.append((LiveFile(f"metrics_file {metrics}", metrics, self._say), metrics_of))
        self._write()
        try:
            yield
        except BaseException as error:
            self._close(error)
            raise
        self._close(None)

    def enter(self, phase: Phase, doing: str | None = None) -> None:
        """From here on it does this."""
        if phase != self._phase:
            self._phase, self._next_at = phase, 0.0
        self._doing = None if doing is None else printable(doing)
        self.beat()

    def beat(self) -> None:
        """Call it as often as you like; it writes when it is time to."""
        if time.monotonic() >= self._next_at:
            self._write()

    def _close(self, error: BaseException | None) -> None:
        """A run that is none of the output's has changed nothing, unless it came to an end. A bug says nothing: to
        those outside it is a killed job."""
        if error is not None and not self._history.is_counted:
            for file, _ in self._files:
                file.put_back()
        elif self._summary.end is not None:
            self._exit_status = replace(self._summary, error=error if isinstance(error, NpuRunnerError) else None,
                                        is_interrupted=self._summary.end == INTERRUPTED).exit_status
            self._write()

    def measure(self) -> None:
        """Have the figures of the replicas in the summary."""
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
        rows = self._summary.rows
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


# -- --metrics-file: the names are our own. Counters of rows go on where earlier runs of the output have left them; all
# others begin with the run. Source of the form: https://prometheus.io/docs/instrumenting/exposition_formats (0.0.4).

_PREFIX = "npu_runner_"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Labels = dict[str, str]


class _Family(NamedTuple):
    name: str
    kind: str  # gauge or counter
    help: str
    samples: Iterable[tuple[Labels, float]]


def metrics_of(status: Status) -> bytes:
    return "".join(line for family in _families(status) for line in _lines(family)).encode()


def _families(status: Status) -> Iterator[_Family]:
    info = {"version": status.npu_runner, "run": status.run, "host": status.updated.host}
    yield _gauge("info", "Always 1; labels name the run.", 1, info)
    yield _gauge("start_time_seconds", "Unix time at which the run began.", status.started.time)
    yield _gauge("update_time_seconds", "Unix time at which this was written.", status.updated.time)
    phases = [({"phase": name}, float(name == status.phase)) for name in typing.get_args(Phase)]
    yield _Family("phase", "gauge", "1 for what the job does, or did last.", phases)
    yield _gauge("ended", "1 once the run has ended in good order.", float(status.end is not None))
    if status.exit_status is not None:
        yield _gauge("exit_status", "Exit status of the run that has ended.", status.exit_status)
    yield from _row_families(status)
    yield from _engine_families(status)
    counts = dict.fromkeys(typing.get_args(ReplicaPhase), 0.0)
    for replica in status.replicas:
        counts[replica.phase] += 1
    yield _Family("replicas", "gauge", "Replicas, by what they do.", [({"phase": name}, count)
                                                                      for name, count in counts.items()])
    yield _counter("replica_deaths", "Deaths of replicas.", sum(replica.deaths for replica in status.replicas))


def _row_families(status: Status) -> Iterator[_Family]:
    rows, pace, tokens = status.rows, status.pace, status.tokens
    if rows.total is not None:
        yield _gauge("input_rows", "Rows of the input.", rows.total)
    yield _counter("rows_answered", "Answered rows in the output, of all runs.", rows.answered)
    yield _Family("rows_failed_total", "counter", "Failed rows in the output, of all runs, by code.",
                  [({"code": code}, count) for code, count in rows.failures_by_code.items()])
    yield _counter("rows_cut_off", "Answered rows that ended at their limit of tokens.", rows.cut_off)
    yield _counter("rows_repetition", "Answered rows that were ended because they repeat themselves.", rows.repetition)
    yield _counter("rows_unparsed", "Answered rows that a rule asked for JSON and that are none.", rows.unparsed)
    if rows.whole is not None:
        yield _counter("rows_whole", "Answered rows that are neither cut off, nor a repetition, nor unparsed.",
                       rows.whole)
    yield _gauge("rows_per_second", "Rows that this run has finished, over its seconds of serving.",
                 pace.rows_per_second)
    yield _gauge("rows_per_second_lately", "The same over the last half minute.", pace.lately)
    if pace.seconds_left is not None:
        yield _gauge("left_seconds", "Time that the rest takes at the pace of this run.", pace.seconds_left)
    yield _counter("start_seconds", "Seconds of this run until its first row.", pace.start_seconds)
    yield _counter("serve_seconds", "Seconds of this run since then.", pace.serve_seconds)
    yield _counter("prompt_tokens", "Prompt tokens of rows that this run has answered.", tokens.prompt)
    yield _counter("completion_tokens", "Completion tokens of rows that this run has answered.", tokens.completion)
    yield _counter("prefill_computed_tokens", "Prompt tokens that engines have computed.", tokens.prefill_computed)
    yield _counter("decode_computed_tokens", "Tokens that engines have decoded.", tokens.decode_computed)


def _engine_families(status: Status) -> Iterator[_Family]:
    engines = status.engines
    yield _gauge("sequences_running", "Sequences that engines decode.", engines.running)
    yield _gauge("sequences_waiting", "Sequences that wait in engines.", engines.waiting)
    yield _counter("vision_cache_hits", "Images whose features were in the vision cache.", engines.vision_cache_hits)
    yield _counter("vision_cache_misses", "Images whose features were computed.", engines.vision_cache_misses)
    yield _gauge("vision_cache_bytes", "Bytes in vision caches.", engines.vision_cache_bytes)
    yield _counter("prefix_cache_hit_tokens", "Prompt tokens found in prefix caches.", engines.prefix_cache_hit_tokens)
    yield _counter("prefix_cache_queried_tokens", "Prompt tokens looked up in prefix caches.",
                   engines.prefix_cache_queried_tokens)
    yield _gauge("kv_cache_used_blocks", "Blocks of KV caches in use.", engines.kv_blocks_used)
    yield _gauge("kv_cache_blocks", "Blocks of KV caches.", engines.kv_blocks_total)
    yield _counter("preemptions", "Sequences that were begun again for want of blocks.", engines.preemptions)


def _gauge(name: str, help: str, value: float, labels: Labels | None = None) -> _Family:
    return _Family(name, "gauge", help, [(labels or {}, value)])


def _counter(name: str, help: str, value: float) -> _Family:
    return _Family(f"{name}_total", "counter", help, [({}, value)])


def _lines(family: _Family) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{family.name} {family.help}\n# TYPE {_PREFIX}{family.name} {family.kind}\n"
    for labels, value in family.samples:
        shown = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
        yield f"{_PREFIX}{family.name}{{{shown}}} {value!r}\n" if shown else f"{_PREFIX}{family.name} {value!r}\n"
