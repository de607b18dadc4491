"""One run of a job for a person and for a program: the last lines of `batch`, and `this_run` of --summary."""

from __future__ import annotations

from typing import Any

from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.rows.counts import attempts_lines
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.replicas.replica_state import ReplicaState


def run_json(run: JobSummary) -> dict[str, Any]:
    tally, stats = run.tally, run.stats
    return {
        "exit_status": run.exit_status,
        "interrupted": run.is_interrupted,
        "error": None if run.error is None else str(run.error),
        "progress": {"quiet": run.silence is not None, "reason": run.silence},
        "rows": {"total": run.num_rows, "resumed": run.num_resumed, "failed_in_output": run.rows.num_failed,
                 "unfinished": run.num_unfinished, **tally.rows_json()},
        "tokens": {**tally.tokens_json(), "prefill_computed": stats.num_prefill_tokens,
                   "decode_computed": stats.num_decode_tokens},
        "seconds": {"start": round(run.start_seconds, 3), "serve": round(run.serve_seconds, 3),
                    "prefill": round(stats.prefill_seconds, 3), "decode": round(stats.decode_seconds, 3),
                    "preprocessing_wait": round(run.all_stats.wait_seconds, 3)},
        "start_phases": {phase: round(seconds, 3) for phase, seconds in run.start_phases.items()},
        "throughput": {"rows_per_second": _rate(run, tally.num_done),
                       "prompt_tokens_per_second": _rate(run, tally.num_prompt_tokens),
                       "completion_tokens_per_second": _rate(run, tally.num_completion_tokens)},
        "preprocessing": {"workers": run.num_workers, "workers_replaced": run.all_stats.num_workers_replaced},
        "replicas": list(map(_replica_json, run.replicas)),
        "vision_cache": {"hits": stats.vision_cache_hits, "misses": stats.vision_cache_misses,
                         "evictions": stats.vision_cache_evictions, "bytes": stats.vision_cache_bytes,
                         "host_hits": stats.vision_cache_host_hits, "host_bytes": stats.vision_cache_host_bytes,
                         "images_encoded": stats.num_images_encoded},
        "prefix_cache": {"queried_tokens": stats.prefix_cache_queries, "hit_tokens": stats.prefix_cache_hits,
                         "hit_rate": _share(stats.prefix_cache_hits, stats.prefix_cache_queries)},
        "state_snapshots": {"taken": stats.state_snapshots_taken, "used": stats.state_snapshots_used,
                            "evicted": stats.state_snapshots_evicted},
        "preemptions": stats.num_preemptions,
        "kv_cache": {"blocks": stats.kv_blocks_total, "peak_blocks": stats.kv_blocks_peak,
                     "peak_use": _share(stats.kv_blocks_peak, stats.kv_blocks_total)},
        **({"drafts": _drafts_json(stats)} if stats.num_drafts else {}),
        "expected_answers": {"rows": tally.num_expected, "as_expected": tally.num_as_expected,
                             "accuracy": _share(tally.num_as_expected, tally.num_expected)},
    }


def run_lines(run: JobSummary) -> list[str]:
    tally, stats = run.tally, run.stats
    rows = ", ".join([tally.answered_shown, *tally.shortcomings()])
    if run.num_resumed:
        failed = f" ({run.kept.num_failed} failed)" if run.kept.num_failed else ""
        rows += f", {run.num_resumed} finished earlier{failed}"
    if run.num_unfinished:
        rows += f", {run.num_unfinished} not finished"
    lines = [f"rows      {rows}", *attempts_lines(tally.rows_json())]
    num_images = stats.vision_cache_hits + stats.vision_cache_misses
    if tally.num_done and run.start_phases:  # a model was loaded
        of_reasoning = f" ({tally.num_reasoning_tokens} of reasoning)" if tally.num_reasoning_tokens else ""
        lines += [
            f"tokens    {tally.num_prompt_tokens} prompt ({tally.num_cached_tokens} from the prefix cache), "
            f"{tally.num_completion_tokens} completion{of_reasoning}",
            f"time      {run.start_seconds:.1f} s to start, {run.serve_seconds:.1f} s to serve: "
            f"{_rate(run, tally.num_done):.2f} rows/s, {_rate(run, tally.num_completion_tokens):.1f} completion "
            f"tokens/s; {run.all_stats.wait_seconds:.1f} s waiting for preprocessing",
            f"caches    {stats.vision_cache_hits} of {num_images} images from the vision cache, "
            f"{_share(stats.prefix_cache_hits, stats.prefix_cache_queries):.0%} of prompt tokens from the prefix cache",
            f"KV cache  peak {stats.kv_blocks_peak} of {stats.kv_blocks_total} blocks, {stats.num_preemptions} "
            "preemptions",
        ]
    if stats.state_snapshots_taken:
        lines.append(f"states    {stats.state_snapshots_taken} snapshots taken for the prefix cache, used "
                     f"{stats.state_snapshots_used} times, {stats.state_snapshots_evicted} evicted")
    if stats.num_drafts:
        lines.append(_drafts_line(stats))
    lines += list(map(_replica_line, run.replicas))
    if tally.num_expected:
        share = _share(tally.num_as_expected, tally.num_expected)
        lines.append(f"expected  {tally.num_as_expected} of {tally.num_expected} answers as expected ({share:.1%})")
    return lines


def _replica_json(state: ReplicaState) -> dict[str, Any]:
    stats, engine = state.stats(), state.stats().engine
    return {
        "name": state.name, "rows": state.num_finished, "deaths": state.num_deaths,
        "prefill_computed": engine.num_prefill_tokens, "decode_computed": engine.num_decode_tokens,
        "prefill_seconds": round(engine.prefill_seconds, 3), "decode_seconds": round(engine.decode_seconds, 3),
        "preprocessing_wait": round(stats.wait_seconds, 3)}


def _replica_line(state: ReplicaState) -> str:
    stats, engine = state.stats(), state.stats().engine
    deaths = f", died {state.num_deaths} times" if state.num_deaths else ""
    return (f"{state.name:<9} {state.num_finished} rows in {engine.prefill_seconds:.1f} s of prefill and "
            f"{engine.decode_seconds:.1f} s of decode, {stats.wait_seconds:.1f} s waiting{deaths}")


def _drafts_json(stats: EngineStats) -> dict[str, Any]:
    return {
        "rows": stats.num_drafts,
        "proposed": stats.num_draft_tokens,
        "accepted": stats.num_accepted_tokens,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "by_method": {
            "forced": {"proposed": stats.num_forced_drafted, "accepted": stats.num_forced_accepted},
            "ngram": {"proposed": stats.num_ngram_drafted, "accepted": stats.num_ngram_accepted},
            "suffix": {"proposed": stats.num_suffix_drafted, "accepted": stats.num_suffix_accepted},
            "mtp": {"proposed": stats.num_mtp_drafted, "accepted": stats.num_mtp_accepted}}}


def _drafts_line(stats: EngineStats) -> str:
    of_head = f", by the head {stats.num_mtp_accepted} of {stats.num_mtp_drafted}" if stats.num_mtp_drafted else ""
    return (f"drafts    {stats.num_accepted_tokens} of {stats.num_draft_tokens} tokens kept (forced "
            f"{stats.num_forced_accepted} of {stats.num_forced_drafted}, looked up "
            f"{stats.num_ngram_accepted + stats.num_suffix_accepted} of "
            f"{stats.num_ngram_drafted + stats.num_suffix_drafted}{of_head}); "
            f"{stats.mean_acceptance_length:.2f} tokens a row and step")


def _rate(run: JobSummary, count: int) -> float:
    return round(count / run.serve_seconds, 3) if run.serve_seconds > 0 else 0.0


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0
