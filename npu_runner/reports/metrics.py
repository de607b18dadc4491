"""The figures of --metrics-file in Prometheus' text form, made of a status. The names are our own.

Counters of rows continue where earlier runs of the output ended; all others begin with the run. Source of the form:
https://prometheus.io/docs/instrumenting/exposition_formats (0.0.4).
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from npu_runner.batch.files.status_file import Phase, ReplicaPhase, Status

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
