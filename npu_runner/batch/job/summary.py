"""One run of a job, and all of its runs: figures, and the summary of both for programs and for people.

Knows nothing of how the job was done, and no file.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner import __version__
from npu_runner.batch.files.runs import FINISHED, Run, Runs
from npu_runner.batch.rows.counts import Counts
from npu_runner.errors import ConfigError, NpuRunnerError, TooManyFailuresError
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
    """All replicas together."""
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
    """Devices that the replicas held at the last `hold`."""
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
        """Rows are missing."""
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

    def hold(self, num_devices: int) -> None:
        """So many devices were held since the last call; at the first one, since the run began."""
        now = time.monotonic()
        self.device_seconds += (now - (self._held_since or self.started)) * num_devices
        self.num_devices, self._held_since = num_devices, now

    def is_worth_saying(self, error: NpuRunnerError) -> bool:
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

    def to_json(self) -> dict[str, Any]:
        return {
            "exit_status": self.exit_status,
            "interrupted": self.is_interrupted,
            "error": None if self.error is None else str(self.error),
            "progress": {"quiet": self.silence is not None, "reason": self.silence},
            "rows": self._rows(),
            "tokens": self._tokens(),
            "seconds": self._seconds(),
            "start_phases": {phase: round(seconds, 3) for phase, seconds in self.start_phases.items()},
            "throughput": {
                "rows_per_second": self._per_second(self.tally.num_done),
                "prompt_tokens_per_second": self._per_second(self.tally.num_prompt_tokens),
                "completion_tokens_per_second": self._per_second(self.tally.num_completion_tokens),
            },
            "preprocessing": {"workers": self.num_workers, "workers_replaced": self.all_stats.num_workers_replaced},
            "replicas": list(map(_replica_json, self.replicas)),
            **_memory(self.stats),
            **({"drafts": _drafts(self.stats)} if self.stats.num_drafts else {}),
            "expected_answers": {
                "rows": self.tally.num_expected,
                "as_expected": self.tally.num_as_expected,
                "accuracy": _share(self.tally.num_as_expected, self.tally.num_expected),
            },
        }

    def _rows(self) -> dict[str, Any]:
        return {
            "total": self.num_rows,
            "resumed": self.num_resumed,
            "failed_in_output": self.rows.num_failed,
            "unfinished": self.num_unfinished,
            **self.tally.rows_json(),
        }

    def _tokens(self) -> dict[str, int]:
        return {
            **self.tally.tokens_json(),
            "prefill_computed": self.stats.num_prefill_tokens,
            "decode_computed": self.stats.num_decode_tokens,
        }

    def _seconds(self) -> dict[str, float]:
        return {
            "start": round(self.start_seconds, 3),
            "serve": round(self.serve_seconds, 3),
            "prefill": round(self.stats.prefill_seconds, 3),
            "decode": round(self.stats.decode_seconds, 3),
            "preprocessing_wait": round(self.all_stats.wait_seconds, 3),
        }

    def to_lines(self) -> list[str]:
        """The summary for a person."""
        tally, stats = self.tally, self.stats
        rows = ", ".join([f"{tally.num_answered} answered", *tally.shortcomings()])
        if self.num_resumed:
            failed = f" ({self.kept.num_failed} failed)" if self.kept.num_failed else ""
            rows += f", {self.num_resumed} finished earlier{failed}"
        if self.num_unfinished:
            rows += f", {self.num_unfinished} not finished"
        lines = [f"rows      {rows}"]
        num_images = stats.vision_cache_hits + stats.vision_cache_misses
        if tally.num_done and self.start_phases:  # a model was loaded
            of_reasoning = f" ({tally.num_reasoning_tokens} of reasoning)" if tally.num_reasoning_tokens else ""
            lines += [
                f"tokens    {tally.num_prompt_tokens} prompt ({tally.num_cached_tokens} from the prefix cache), "
                f"{tally.num_completion_tokens} completion{of_reasoning}",
                f"time      {self.start_seconds:.1f} s to start, {self.serve_seconds:.1f} s to serve: "
                f"{self._per_second(tally.num_done):.2f} rows/s, "
                f"{self._per_second(tally.num_completion_tokens):.1f} completion tokens/s; "
                f"{self.all_stats.wait_seconds:.1f} s waiting for preprocessing",
                f"caches    {stats.vision_cache_hits} of {num_images} images from the vision cache, "
                f"{_share(stats.prefix_cache_hits, stats.prefix_cache_queries):.0%} of prompt tokens from the prefix "
                "cache",
                f"KV cache  peak {stats.kv_blocks_peak} of {stats.kv_blocks_total} blocks, "
                f"{stats.num_preemptions} preemptions",
            ]
        if stats.state_snapshots_taken:
            lines.append(f"states    {stats.state_snapshots_taken} snapshots taken for the prefix cache, used "
                         f"{stats.state_snapshots_used} times, {stats.state_snapshots_evicted} evicted")
        if stats.num_drafts:
            lines.append(self._drafts_line())
        lines += list(map(_replica_line, self.replicas))
        if tally.num_expected:
            share = _share(tally.num_as_expected, tally.num_expected)
            lines.append(f"expected  {tally.num_as_expected} of {tally.num_expected} answers as expected ({share:.1%})")
        return lines

    def _drafts_line(self) -> str:
        stats = self.stats
        of_head = f", by the head {stats.num_mtp_accepted} of {stats.num_mtp_drafted}" if stats.num_mtp_drafted else ""
        return (f"drafts    {stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens kept (forced "
                f"{stats.num_forced_accepted} of {stats.num_forced_drafted}, looked up "
                f"{stats.num_ngram_accepted + stats.num_suffix_accepted} of "
                f"{stats.num_ngram_drafted + stats.num_suffix_drafted}{of_head}); "
                f"{stats.mean_acceptance_length:.2f} tokens a row and step")

    def _per_second(self, count: int) -> float:
        return round(count / self.serve_seconds, 3) if self.serve_seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True)
class Totals:
    """The runs of a job, the one under way among them."""

    output: str
    num_rows: int | None
    """Rows of the input; None: it is not known."""
    rows: Counts
    """The rows in the output and its error file."""
    runs: Runs
    is_under_way: bool = False

    @property
    def state(self) -> str:
        if self.is_under_way:
            return "under way"
        if self.num_rows is None:
            return "unknown"
        return "unfinished" if self.num_unfinished else FINISHED

    @property
    def num_unfinished(self) -> int | None:
        return None if self.num_rows is None else max(0, self.num_rows - self.rows.num_done)

    @property
    def num_unrecorded(self) -> int:
        """Answers of runs that are not known, and of killed ones after their last status: their tokens are not
        counted."""
        return max(0, self.rows.num_answered - self.runs.sums("tally").get("num_answered", 0))

    @property
    def counts(self) -> Counts:
        return self.runs.counts(self.rows)

    def to_json(self) -> dict[str, Any]:
        counts, older = self.counts, self.runs.older
        return {
            "output": self.output,
            "state": self.state,
            "rows": {"total": self.num_rows, **counts.rows_json(), "expected": counts.num_expected,
                     "as_expected": counts.num_as_expected, "unfinished": self.num_unfinished,
                     "unrecorded": self.num_unrecorded},
            "tokens": {**counts.tokens_json(), **{name if name.startswith("draft_") else f"{name}_computed": count
                                                  for name, count in self.runs.sums("computed").items()}},
            "seconds": {name: round(value, 3) for name, value in self.runs.sums("seconds").items()},
            "runs": list(self.runs.last),
            **({"older_runs": older} if older else {}),
        }

    def to_line(self) -> str:
        """The line for a person who has read of the last run."""
        cost = f"; {self.cost}; runs {len(self.runs)}" if len(self.runs) else ""
        return f"in all    {self.rows_shown}{cost}"

    @property
    def rows_shown(self) -> str:
        counts = self.counts
        return ", ".join([f"{counts.num_answered} answered", *counts.shortcomings()])

    @property
    def cost(self) -> str:
        counts, seconds = self.counts, self.runs.sums("seconds")
        return (f"{counts.num_prompt_tokens} prompt and {counts.num_completion_tokens} completion tokens, "
                f"{seconds['start']:.1f} s to start and {seconds['serve']:.1f} s to serve, {seconds['device']:.1f} "
                "device seconds")


def _replica_json(state: ReplicaState) -> dict[str, Any]:
    stats, engine = state.stats(), state.stats().engine
    return {
        "name": state.name,
        "rows": state.num_finished,
        "deaths": state.num_deaths,
        "prefill_computed": engine.num_prefill_tokens,
        "decode_computed": engine.num_decode_tokens,
        "prefill_seconds": round(engine.prefill_seconds, 3),
        "decode_seconds": round(engine.decode_seconds, 3),
        "preprocessing_wait": round(stats.wait_seconds, 3),
    }


def _replica_line(state: ReplicaState) -> str:
    stats, engine = state.stats(), state.stats().engine
    deaths = f", died {state.num_deaths} times" if state.num_deaths else ""
    return (f"{state.name:<9} {state.num_finished} rows in {engine.prefill_seconds:.1f} s of prefill and "
            f"{engine.decode_seconds:.1f} s of decode, {stats.wait_seconds:.1f} s waiting{deaths}")


def _memory(stats: EngineStats) -> dict[str, Any]:
    """What was kept, found again and given up."""
    return {
        "vision_cache": {
            "hits": stats.vision_cache_hits,
            "misses": stats.vision_cache_misses,
            "evictions": stats.vision_cache_evictions,
            "bytes": stats.vision_cache_bytes,
            "images_encoded": stats.num_images_encoded,
        },
        "prefix_cache": {
            "queried_tokens": stats.prefix_cache_queries,
            "hit_tokens": stats.prefix_cache_hits,
            "hit_rate": _share(stats.prefix_cache_hits, stats.prefix_cache_queries),
        },
        "state_snapshots": {
            "taken": stats.state_snapshots_taken,
            "used": stats.state_snapshots_used,
            "evicted": stats.state_snapshots_evicted,
        },
        "preemptions": stats.num_preemptions,
        "kv_cache": {
            "blocks": stats.kv_blocks_total,
            "peak_blocks": stats.kv_blocks_peak,
            "peak_use": _share(stats.kv_blocks_peak, stats.kv_blocks_total),
        },
    }


def _drafts(stats: EngineStats) -> dict[str, Any]:
    """Tokens that were proposed ahead of a step, and those of them that were drawn."""
    return {
        "rows": stats.num_drafts,
        "proposed": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "by_method": {
            "forced": {"proposed": stats.num_forced_drafted, "accepted": stats.num_forced_accepted},
            "ngram": {"proposed": stats.num_ngram_drafted, "accepted": stats.num_ngram_accepted},
            "suffix": {"proposed": stats.num_suffix_drafted, "accepted": stats.num_suffix_accepted},
            "mtp": {"proposed": stats.num_mtp_drafted, "accepted": stats.num_mtp_accepted},
        },
    }


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
