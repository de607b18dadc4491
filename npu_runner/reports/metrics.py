"""The figures of --metrics-file in Prometheus' text form, made of a status. The names are our own.

Counters of rows continue where earlier runs of the output ended; all others begin with the run. Source of the form:
https://prometheus.io/docs/instrumenting/exposition_formats (0.0.4).
"""

from __future__ import annotations

import typing
from collections.abc import Iterator

from npu_runner.batch.files.status_file import Phase, ReplicaPhase, Status

_PREFIX = "npu_runner_"
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
Labels = dict[str, str]
Family = tuple[str, str, str, float | list[tuple[Labels, float]]]
"""Kind (gauge or counter), name, help, and one number or several with labels."""


def metrics_of(status: Status) -> bytes:
    families = (*_run_families(status), *_row_families(status), *_engine_families(status))
    return "".join(line for family in families for line in _lines(*family)).encode()


def _lines(kind: str, name: str, help: str, samples: float | list[tuple[Labels, float]]) -> Iterator[str]:
    name = f"{_PREFIX}{name}_total" if kind == "counter" else f"{_PREFIX}{name}"
    yield f"# HELP {name} {help}\n# TYPE {name} {kind}\n"
    for labels, value in samples if isinstance(samples, list) else [(Labels(), samples)]:
        shown = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items())
        yield f"{name}{{{shown}}} {value!r}\n" if shown else f"{name} {value!r}\n"


def _run_families(status: Status) -> Iterator[Family]:
    info = {"version": status.npu_runner, "run": status.run, "host": status.updated.host}
    yield "gauge", "info", "Always 1; labels name the run.", [(info, 1)]
    yield "gauge", "start_time_seconds", "Unix time at which the run began.", status.started.time
    yield "gauge", "update_time_seconds", "Unix time at which this was written.", status.updated.time
    phases = [({"phase": name}, float(name == status.phase)) for name in typing.get_args(Phase)]
    yield "gauge", "phase", "1 for what the job does, or did last.", phases
    yield "gauge", "ended", "1 once the run has ended in good order.", float(status.end is not None)
    if status.exit_status is not None:
        yield "gauge", "exit_status", "Exit status of the run that has ended.", status.exit_status
    counts = dict.fromkeys(typing.get_args(ReplicaPhase), 0.0)
    for replica in status.replicas:
        counts[replica.phase] += 1
    yield "gauge", "replicas", "Replicas, by what they do.", [({"phase": name}, count)
                                                              for name, count in counts.items()]
    yield "counter", "replica_deaths", "Deaths of replicas.", sum(replica.deaths for replica in status.replicas)


def _row_families(status: Status) -> Iterator[Family]:
    rows, pace, tokens = status.rows, status.pace, status.tokens
    if rows.total is not None:
        yield "gauge", "input_rows", "Rows of the input.", rows.total
    yield "counter", "rows_answered", "Answered rows in the output, of all runs.", rows.answered
    yield "counter", "rows_failed", "Failed rows in the output, of all runs, by code.", [
        ({"code": code}, count) for code, count in rows.failures_by_code.items()]
    yield "counter", "rows_cut_off", "Answered rows that ended at their limit of tokens.", rows.cut_off
    yield "counter", "rows_copied", "Answered rows whose answers are copies of equal rows', of all runs.", rows.copied
    yield "counter", "rows_repetition", "Answered rows that were ended because they repeat themselves.", rows.repetition
    yield "counter", "rows_unparsed", "Answered rows that a rule asked for JSON and that are none.", rows.unparsed
    if rows.whole is not None:
        yield ("counter", "rows_whole", "Answered rows that are neither cut off, nor a repetition, nor unparsed.",
               rows.whole)
    if isinstance(reasons := rows.attempts.get("by_reason"), dict):
        yield "counter", "attempts", "Attempts after the first ones of rows, by reason.", [
            ({"reason": reason}, count) for reason, count in reasons.items()]
    yield ("gauge", "rows_per_second", "Rows that this run has finished, over its seconds of serving.",
           pace.rows_per_second)
    yield "gauge", "rows_per_second_lately", "The same over the last half minute.", pace.lately
    if pace.seconds_left is not None:
        yield "gauge", "left_seconds", "Time that the rest takes at the pace of this run.", pace.seconds_left
    yield "counter", "start_seconds", "Seconds of this run until its first row.", pace.start_seconds
    yield "counter", "serve_seconds", "Seconds of this run since then.", pace.serve_seconds
    yield "counter", "prompt_tokens", "Prompt tokens of rows that this run has answered.", tokens.prompt
    yield "counter", "completion_tokens", "Completion tokens of rows that this run has answered.", tokens.completion
    yield "counter", "prefill_computed_tokens", "Prompt tokens that engines have computed.", tokens.prefill_computed
    yield "counter", "decode_computed_tokens", "Tokens that engines have decoded.", tokens.decode_computed


def _engine_families(status: Status) -> Iterator[Family]:
    engines = status.engines
    yield "gauge", "sequences_running", "Sequences that engines decode.", engines.running
    yield "gauge", "sequences_waiting", "Sequences that wait in engines.", engines.waiting
    yield "counter", "vision_cache_hits", "Images whose features were in the vision cache.", engines.vision_cache_hits
    yield "counter", "vision_cache_misses", "Images whose features were computed.", engines.vision_cache_misses
    yield "gauge", "vision_cache_bytes", "Bytes in vision caches.", engines.vision_cache_bytes
    yield "counter", "prefix_cache_hit_tokens", "Prompt tokens found in prefix caches.", engines.prefix_cache_hit_tokens
    yield ("counter", "prefix_cache_queried_tokens", "Prompt tokens looked up in prefix caches.",
           engines.prefix_cache_queried_tokens)
    yield "gauge", "kv_cache_used_blocks", "Blocks of KV caches in use.", engines.kv_blocks_used
    yield "gauge", "kv_cache_blocks", "Blocks of KV caches.", engines.kv_blocks_total
    yield "counter", "preemptions", "Sequences that were begun again for want of blocks.", engines.preemptions
