"""What one run of a job has done: counts while it runs, and its summary for programs and for people.

Knows nothing of how the job was done, or of its other runs.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from npu_runner.batch.files.answer_file import RowCounts
from npu_runner.batch.rows.flaw import WHOLE, Flaw
from npu_runner.batch.rows.openai_response import is_as_expected, is_json
from npu_runner.errors import ConfigError, NpuRunnerError, TooManyFailuresError
from npu_runner.request.outputs import EngineStats, RequestOutput
from npu_runner.serving.replica import ReplicaStats

_MOST_CODES = 6


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one row adds to the tally once it is in the output."""

    failure_code: str | None = None
    """None: it is answered."""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    flaws: Flaw = WHOLE
    """Why the answer is not whole."""
    is_as_expected: bool | None = None
    """None: nobody said what to expect."""


def answered(output: RequestOutput, answer: str, expected: str | None, *, has_json_rule: bool) -> Outcome:
    """`answer`: what `expected` is compared with. `has_json_rule`: it is to be JSON, by a schema or without one."""
    return Outcome(
        flaws=Flaw.where(
            cut_off=any(completion.is_cut_off for completion in output.completions),
            repetition=any(completion.is_repetition for completion in output.completions),
            unparsed=has_json_rule and not all(is_json(completion.text) for completion in output.completions)),
        num_prompt_tokens=output.num_prompt_tokens,
        num_cached_tokens=output.num_cached_tokens,
        num_completion_tokens=sum(len(completion.token_ids) for completion in output.completions),
        num_reasoning_tokens=sum(completion.num_reasoning_tokens for completion in output.completions),
        is_as_expected=None if expected is None else is_as_expected(answer, expected))


@dataclass
class Tally:
    """Running counts of this run of the job (not of runs that it resumes). A row counts once it is written."""

    num_answered: int = 0
    num_failed: int = 0
    failures_by_code: Counter[str] = field(default_factory=Counter)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_completion_tokens: int = 0
    num_reasoning_tokens: int = 0
    """Those of the completion tokens that are reasoning."""
    num_not_whole: int = 0
    """Answered rows that have at least one of the three flaws that follow."""
    num_cut_off: int = 0
    num_repetition: int = 0
    num_unparsed: int = 0
    num_expected: int = 0
    """Answered rows whose metadata holds the expected answer."""
    num_as_expected: int = 0

    @property
    def num_done(self) -> int:
        return self.num_answered + self.num_failed

    @property
    def num_whole(self) -> int:
        return self.num_answered - self.num_not_whole

    def add(self, outcome: Outcome) -> None:
        if outcome.failure_code is not None:
            self.num_failed += 1
            self.failures_by_code[outcome.failure_code] += 1
            return
        self.num_answered += 1
        self.num_prompt_tokens += outcome.num_prompt_tokens
        self.num_cached_tokens += outcome.num_cached_tokens
        self.num_completion_tokens += outcome.num_completion_tokens
        self.num_reasoning_tokens += outcome.num_reasoning_tokens
        self.num_not_whole += bool(outcome.flaws)
        self.num_cut_off += Flaw.CUT_OFF in outcome.flaws
        self.num_repetition += Flaw.REPETITION in outcome.flaws
        self.num_unparsed += Flaw.UNPARSED in outcome.flaws
        if outcome.is_as_expected is not None:
            self.num_expected += 1
            self.num_as_expected += outcome.is_as_expected

    def shortcomings(self, *, with_codes: bool = True) -> list[str]:
        """The counts to show: "3 failed (2 media_missing, 1 not_json)", "cut off 4", "unparsed 1", "whole 9"."""
        codes = listed_codes(self.failures_by_code) if with_codes else ""
        return [f"{self.num_failed} failed{codes}", *listed_flaws(
            self.num_whole, self.num_cut_off, self.num_repetition, self.num_unparsed)]


def listed_flaws(num_whole: int, num_cut_off: int, num_repetition: int, num_unparsed: int) -> list[str]:
    """How many answers have each flaw, and how many are whole; empty if all are."""
    counts = (("cut off", num_cut_off), ("repetition", num_repetition), ("unparsed", num_unparsed))
    found = [f"{name} {count}" for name, count in counts if count]
    return [*found, f"whole {num_whole}"] if found else []


def listed_codes(failures_by_code: Mapping[str, int]) -> str:
    """" (2 media_missing, 1 not_json)"; empty without any."""
    common = Counter(failures_by_code).most_common()
    codes = [f"{count} {code}" for code, count in common[:_MOST_CODES]] + ["..."] * (len(common) > _MOST_CODES)
    return f" ({', '.join(codes)})" if codes else ""


def seconds_left(num_left: int, tally: Tally, stats: EngineStats, seconds: float) -> float | None:
    """How long the other `num_left` rows take at the pace of the `seconds` so far; None: no row is answered, or none
    is left.

    Rows in flight count for the pace: without them, a first batch of hundreds of rows would count as a single row when
    the first of them ends. Their tokens say how many rows they are worth, by the mean of the answered rows; at most
    half a row each, as short answers end first. They still count as left, because the last rows run in a batch that
    shrinks.
    """
    if not num_left or not tally.num_answered:
        return None
    tokens_in_flight = max(0, stats.num_decode_tokens - tally.num_completion_tokens)
    tokens_of_a_row = tally.num_completion_tokens / tally.num_answered
    partly = min(stats.num_running / 2, tokens_in_flight / tokens_of_a_row) if tokens_of_a_row else 0.0
    return num_left * seconds / (tally.num_done + min(partly, num_left))


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """What one of several replicas did, and those that took its place when it died."""

    name: str
    num_rows: int
    num_deaths: int
    stats: ReplicaStats

    def to_json(self) -> dict[str, Any]:
        engine = self.stats.engine
        return {
            "name": self.name,
            "rows": self.num_rows,
            "deaths": self.num_deaths,
            "prefill_computed": engine.num_prefill_tokens,
            "decode_computed": engine.num_decode_tokens,
            "prefill_seconds": round(engine.prefill_seconds, 3),
            "decode_seconds": round(engine.decode_seconds, 3),
            "preprocessing_wait": round(self.stats.wait_seconds, 3),
        }

    def to_line(self) -> str:
        engine = self.stats.engine
        deaths = f", died {self.num_deaths} times" if self.num_deaths else ""
        return (
            f"{self.name:<9} {self.num_rows} rows in {engine.prefill_seconds:.1f} s of prefill and "
            f"{engine.decode_seconds:.1f} s of decode, {self.stats.wait_seconds:.1f} s waiting{deaths}"
        )


@dataclass
class JobRecord:
    """What a run of a job has done so far, as it is filled in on the way."""

    num_rows: int | None = None
    """None: nothing was planned yet."""
    num_resumed: int = 0
    kept: RowCounts = field(default_factory=RowCounts)
    """Rows of earlier runs that stay as they are."""
    tally: Tally = field(default_factory=Tally)
    stats: ReplicaStats = field(default_factory=ReplicaStats)
    replicas: tuple[ReplicaReport, ...] = ()
    num_workers: int = 0
    start_phases: Mapping[str, float] = field(default_factory=dict)
    is_interrupted: bool = False
    """By a signal that came before the first row."""
    run_id: str = field(default_factory=lambda: secrets.token_hex(8))
    started_at: float = field(default_factory=time.time)
    """Unix time; the others are of the monotonic clock."""
    started: float = field(default_factory=time.monotonic)
    serve_began: float | None = None
    serve_ended: float | None = None
    platform: str | None = None
    num_devices: int = 0
    """Held by the replicas that were there at the last `hold`."""
    device_seconds: float = 0.0
    """Those of the start and of serving, times the devices."""
    _held_since: float | None = None

    @property
    def rows(self) -> RowCounts:
        """Of all runs, as far as they are in the output."""
        kept, tally = self.kept, self.tally
        return RowCounts(**{name: count + getattr(tally, name) for name, count in vars(kept).items()})

    @property
    def rows_done(self) -> tuple[int, int]:
        """Failed rows, and all, of all runs, in the output."""
        return self.kept.num_failed + self.tally.num_failed, self.num_resumed + self.tally.num_done

    @property
    def start_seconds(self) -> float:
        return (self.serve_began or time.monotonic()) - self.started

    @property
    def serve_seconds(self) -> float:
        return 0.0 if self.serve_began is None else (self.serve_ended or time.monotonic()) - self.serve_began

    def hold(self, num_devices: int) -> None:
        """So many devices were held since the last call; at the first one, since the run began."""
        now = time.monotonic()
        self.device_seconds += (now - (self._held_since or self.started)) * num_devices
        self.num_devices, self._held_since = num_devices, now

    @property
    def is_cut_short(self) -> bool:
        """Rows are missing."""
        assert self.num_rows is not None, "no work was planned yet"
        return self.num_resumed + self.tally.num_done < self.num_rows

    def is_worth_saying(self, error: NpuRunnerError) -> bool:
        """A refused setting (exit status 2) changed nothing, and the summary of an earlier run is still true."""
        return self.num_rows is not None and (self.serve_began is not None or not isinstance(error, ConfigError))

    def summary(self, error: NpuRunnerError | None) -> JobSummary:
        assert self.num_rows is not None, "no work was planned yet"
        return JobSummary(
            num_rows=self.num_rows, num_resumed=self.num_resumed, tally=self.tally, stats=self.stats.engine,
            num_failed_in_output=self.kept.num_failed + self.tally.num_failed,
            wait_seconds=self.stats.wait_seconds, replicas=self.replicas, start_seconds=self.start_seconds,
            start_phases=self.start_phases, serve_seconds=self.serve_seconds, num_workers=self.num_workers,
            num_workers_replaced=self.stats.num_workers_replaced, error=error,
            is_interrupted=self.is_interrupted or (error is None and self.is_cut_short))


@dataclass(frozen=True, kw_only=True)
class JobSummary:
    """What a run of a job did, finished or not: rows count that are in the output."""

    num_rows: int
    num_resumed: int
    """Rows that earlier runs had finished."""
    num_failed_in_output: int
    """Failed rows in the output, of this run and of earlier ones."""
    tally: Tally
    stats: EngineStats
    """Of all replicas together."""
    start_seconds: float
    """Reading the input and loading the model, while preprocessing begins."""
    serve_seconds: float
    """From when the model stood ready to the last row."""
    num_workers: int
    num_workers_replaced: int
    start_phases: Mapping[str, float] = field(default_factory=dict)
    """Of the first engine that stood ready, in order; what they leave of `start_seconds` came before the model."""
    wait_seconds: float = 0.0
    """Time in which the model had nothing to do but wait for preprocessing."""
    replicas: tuple[ReplicaReport, ...] = ()
    """Where there are several."""
    is_interrupted: bool = False
    silence: str | None = None
    """Why progress went quiet before the end; None: it did not."""
    error: NpuRunnerError | None = None
    """What ended the run before its end, or kept it from its last steps (order, report)."""

    @property
    def num_unfinished(self) -> int:
        return self.num_rows - self.num_resumed - self.tally.num_done

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
        return 3 if self.num_failed_in_output else 0

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
            "preprocessing": {"workers": self.num_workers, "workers_replaced": self.num_workers_replaced},
            "replicas": [replica.to_json() for replica in self.replicas],
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
            "answered": self.tally.num_answered,
            "failed": self.tally.num_failed,
            "failed_in_output": self.num_failed_in_output,
            "unfinished": self.num_unfinished,
            "cut_off": self.tally.num_cut_off,
            "repetition": self.tally.num_repetition,
            "unparsed": self.tally.num_unparsed,
            "whole": self.tally.num_whole,
            "failures_by_code": dict(sorted(self.tally.failures_by_code.items())),
        }

    def _tokens(self) -> dict[str, int]:
        return {
            "prompt": self.tally.num_prompt_tokens,
            "cached": self.tally.num_cached_tokens,
            "completion": self.tally.num_completion_tokens,
            "reasoning": self.tally.num_reasoning_tokens,
            "prefill_computed": self.stats.num_prefill_tokens,
            "decode_computed": self.stats.num_decode_tokens,
        }

    def _seconds(self) -> dict[str, float]:
        return {
            "start": round(self.start_seconds, 3),
            "serve": round(self.serve_seconds, 3),
            "prefill": round(self.stats.prefill_seconds, 3),
            "decode": round(self.stats.decode_seconds, 3),
            "preprocessing_wait": round(self.wait_seconds, 3),
        }

    def to_lines(self) -> list[str]:
        """The summary for a person."""
        tally, stats = self.tally, self.stats
        rows = ", ".join([f"{tally.num_answered} answered", *tally.shortcomings()])
        earlier_failed = self.num_failed_in_output - tally.num_failed
        if self.num_resumed:
            rows += f", {self.num_resumed} finished earlier" + (f" ({earlier_failed} failed)" if earlier_failed else "")
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
                f"{self.wait_seconds:.1f} s waiting for preprocessing",
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
        lines += [replica.to_line() for replica in self.replicas]
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
