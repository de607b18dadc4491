"""What the closing summary says of the prefix cache of models with state, and of drafts."""

from __future__ import annotations

from npu_runner.batch.job.history import JobSummary
from npu_runner.reports.run_summary import run_json, run_lines
from npu_runner.request.outputs import EngineStats
from npu_runner.serving.replica import ReplicaStats


def summary_of(stats: EngineStats) -> JobSummary:
    return JobSummary(num_rows=0, all_stats=ReplicaStats(engine=stats))


def test_snapshots_are_counted_where_there_are_some() -> None:
    summary = summary_of(EngineStats(state_snapshots_taken=5, state_snapshots_used=7, state_snapshots_evicted=2))
    assert run_json(summary)["state_snapshots"] == {"taken": 5, "used": 7, "evicted": 2}
    assert "states    5 snapshots taken for the prefix cache, used 7 times, 2 evicted" in run_lines(summary)
    assert not any(line.startswith("states") for line in run_lines(summary_of(EngineStats())))


def test_drafts_are_counted_where_there_are_some() -> None:
    summary = summary_of(EngineStats(num_drafts=4, num_forced_drafted=6, num_forced_accepted=5, num_ngram_drafted=4,
                                     num_ngram_accepted=1))
    assert run_json(summary)["drafts"] == {
        "rows": 4, "proposed": 10, "accepted": 6, "mean_acceptance_length": 2.5,
        "by_method": {"forced": {"proposed": 6, "accepted": 5}, "ngram": {"proposed": 4, "accepted": 1},
                      "suffix": {"proposed": 0, "accepted": 0}, "mtp": {"proposed": 0, "accepted": 0}}}
    line = "drafts    6 of 10 tokens kept (forced 5 of 6, looked up 1 of 4); 2.50 tokens a row and step"
    assert line in run_lines(summary)
    assert "drafts" not in run_json(summary_of(EngineStats()))
    assert not any(line.startswith("drafts") for line in run_lines(summary_of(EngineStats())))
