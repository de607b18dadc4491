"""The progress or the end of a job, as `npu-runner status` prints it: from its status and its lock, without a model.

The lock says whether a job is at work, whatever the file says. Where no status belongs to the output (an older version
wrote it), its rows are counted instead. Changes nothing. Knows nothing of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from npu_runner.batch.files.durable import clear_file_errors
from npu_runner.batch.files.manifest import read_state
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.files.runs import FINISHED
from npu_runner.batch.files.status_file import Moment, Status, read_status
from npu_runner.batch.rows.counts import attempts_lines
from npu_runner.errors import ConfigError
from npu_runner.processes.child import is_stopped
from npu_runner.reports.summary import PastJob, Totals

_MAX_READS = 20
UNDER_WAY, SUSPENDED, KILLED, ENDED_EARLY = "under way", "suspended", "killed", "ended early"


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """The job of one output, at one moment."""

    output: str
    status: Status
    state: str
    """UNDER_WAY, SUSPENDED, KILLED, ENDED_EARLY or FINISHED."""
    age_seconds: float
    """Seconds since the status was written."""

    def to_json(self) -> dict[str, Any]:
        fields = self.status.model_dump(exclude={"format", "last_recorded", "runs"})
        rows = self.status.rows
        num_done = rows.answered + rows.failed
        fields["rows"] |= {"done": num_done, "unfinished": None if rows.total is None else rows.total - num_done}
        return {"output": self.output, "state": self.state, "source": "status",
                "age_seconds": round(self.age_seconds, 1), **fields}

    def to_lines(self) -> list[str]:
        status = self.status
        lines = [f"{self.output}: {self.state}{self._more()}", f"rows      {self._rows()}"]
        lines += attempts_lines(status.rows.model_dump())
        if self.state in (UNDER_WAY, SUSPENDED, KILLED):
            doing = status.phase if status.doing is None else f"{status.phase}: {status.doing}"
            lines.append(f"doing     {doing}, {_interval(self.age_seconds)} ago (pid {status.pid})")
        elif status.end != FINISHED:
            known = "" if status.exit_status is None else f" (exit status {status.exit_status})"
            lines.append(f"ended     {status.end}{known}")
        if status.pace.serve_seconds:
            lines += [f"rate      {self._rate()}", f"tokens    {status.tokens.prompt} prompt and "
                      f"{status.tokens.completion} completion tokens of rows that this run finished"]
            if self.status.end is None and self.state != KILLED:
                lines.append(f"in flight {status.engines.running} running, {status.engines.waiting} waiting; "
                             f"{status.tokens.prefill_computed} tokens prefilled and {status.tokens.decode_computed} "
                             "decoded in all")
        if status.replicas:
            lines += [f"replicas  {self._replicas()}", f"caches    {self._caches()}"]
        return lines

    def _more(self) -> str:
        if self.state == SUSPENDED:
            return " (its process is stopped)"
        if self.state == KILLED:
            return ": it has ended without a word, and its lock is free; the same command goes on"
        return ""

    def _rows(self) -> str:
        rows = self.status.rows
        num_done = rows.answered + rows.failed
        share = f" ({num_done / rows.total:.1%})" if rows.total else ""
        total = "?" if rows.total is None else rows.total
        counts = rows.counts
        return ", ".join([f"{num_done} of {total} done{share}: {counts.answered_shown}", *counts.shortcomings()])

    def _rate(self) -> str:
        pace = self.status.pace
        is_over = self.status.end is not None or self.state == KILLED
        left = "" if is_over or pace.seconds_left is None else f", {_interval(pace.seconds_left)} left"
        lately = "" if is_over else f" (lately {pace.lately:.2f})"
        return f"{pace.rows_per_second:.2f} rows/s{lately}{left}; {pace.rows} rows in {_interval(pace.serve_seconds)}"

    def _replicas(self) -> str:
        replicas = self.status.replicas
        phases = [replica.phase for replica in replicas]
        counts = [f"{phases.count(phase)} {phase}" for phase in dict.fromkeys(phases)]
        deaths = sum(replica.deaths for replica in replicas)
        return ", ".join(counts) + (f"; {deaths} deaths" if deaths else "")

    def _caches(self) -> str:
        engines = self.status.engines
        num_images = engines.vision_cache_hits + engines.vision_cache_misses
        return (f"{engines.vision_cache_hits} of {num_images} images and {engines.prefix_cache_hit_tokens} of "
                f"{engines.prefix_cache_queried_tokens} prompt tokens found; KV cache {engines.kv_blocks_used} of "
                f"{engines.kv_blocks_total} blocks")


@dataclass(frozen=True, kw_only=True)
class CountedStatus:
    """The rows of an output without a status of its own. `why`: the reason for that."""

    totals: Totals
    why: str

    def to_json(self) -> dict[str, Any]:
        """Its own state and rows, under the names of `npu-runner summary`."""
        totals: Mapping[str, Any] = self.totals.to_json()
        rows = {**totals["rows"], "done": totals["rows"]["answered"] + totals["rows"]["failed"]}
        return {"output": totals["output"], "state": totals["state"], "source": "rows of the output", "rows": rows}

    def to_lines(self) -> list[str]:
        return [*self.totals.to_lines(), f"counted   {self.why}"]


def status_of(output: str) -> JobStatus | CountedStatus:
    """Raises ConfigError where no job has begun."""
    path = Path(os.path.realpath(output))
    with clear_file_errors(f"output {output}"):
        why = f"there is no status beside it, so its rows were counted (npu-runner summary {output})"
        try:
            status, holder = _read(path)
        except ConfigError as error:
            return CountedStatus(totals=PastJob(output).totals(None), why=str(error))
        if status is not None and (found := _state(path, status, holder)) is not None:
            state, status = found
            age_seconds = status.updated.seconds_until(Moment.now())
            return JobStatus(output=output, status=status, state=state, age_seconds=age_seconds)
        if holder is not None and not path.is_file():
            raise ConfigError(f"output {output}: a job (pid {holder}) is about to begin it; ask again in a moment")
    return CountedStatus(totals=PastJob(output).totals(None), why=why if status is None else
                         "the status beside it is of another job, so its rows were counted")


def _read(path: Path) -> tuple[Status | None, str | None]:
    """The status, and the pid of the lock's holder while it stood there: a job writes its end before it lets go."""
    status = read_status(path)
    for _ in range(_MAX_READS):
        before, holder, status = status, job_at_work(path), read_status(path)
        if status == before:
            break
    return status, holder


def _state(path: Path, status: Status, holder: str | None) -> tuple[str, Status] | None:
    """None: the status is not of what is there."""
    if holder is not None:
        if holder != str(status.pid):
            return None
        if status.end is None:
            is_here = status.updated.host == Moment.now().host
            return SUSPENDED if is_here and is_stopped(status.pid) else UNDER_WAY, status
    else:
        _, recorded = read_state(path)
        if not status.belongs_to(recorded) or (not path.is_file() and status.rows.answered + status.rows.failed):
            return None
        if status.end is None and status.run == recorded.last_id:
            # A job that is killed between the two files has its end in the state.
            status = status.model_copy(update={"end": recorded.last[-1]["end"]})
    if status.end is None:
        return KILLED, status
    return FINISHED if status.end == FINISHED else ENDED_EARLY, status


def _interval(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 60 else str(tqdm.format_interval(seconds))
