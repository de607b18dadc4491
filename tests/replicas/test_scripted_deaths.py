"""Replicas that die, whatever they are doing: each row is there once, as an undisturbed replica would have it."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.job.options import BatchOptions
from npu_runner.errors import ConfigError
from npu_runner.reports.summary import PastJob
from tests import zygote
from tests.batch.scripted import read_rows, row, write_rows
from tests.replicas.jobs import (
    REPLICA,
    ended,
    family,
    kill,
    leftovers,
    processes,
    start_scripted,
    wait_for_rows,
    wait_until,
    wait_until_gone,
)
from tests.replicas.scripted_runs import NUM_ROWS, lines, rows, run

pytestmark = pytest.mark.usefixtures("fixed_time")


def test_a_killed_replica_is_named_its_rows_are_answered_and_it_is_started_again(
    tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    summary = tmp_path / "summary.json"
    job = start_scripted(tmp_path, progress="lines", summary=str(summary))
    wait_for_rows(job, tmp_path / "out.jsonl", 1)
    victim, other = processes(REPLICA, job.pid)
    whole = family(job.pid)
    kill([victim])
    wait_until(lambda: set(processes(REPLICA, job.pid)) - {victim, other}, job)
    status, said = ended(job)
    assert status == 3, said
    assert f"process {victim}) died: killed by SIGKILL" in said
    assert "started again (1 of 3)" in said
    assert lines(tmp_path) == undisturbed
    wait_until_gone(whole)
    replicas = json.loads(summary.read_text())["this_run"]["replicas"]
    assert sum(replica["deaths"] for replica in replicas) == 1
    assert sum(replica["rows"] for replica in replicas) == NUM_ROWS + 1
    assert leftovers(tmp_path) == {"summary.json"}


@pytest.mark.from_nothing("the command's own start of replicas and workers")
def test_a_driver_that_is_killed_leaves_nobody_and_goes_on_with_another_number(
    tmp_path: Path, undisturbed: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start_scripted(tmp_path)
    wait_for_rows(job, tmp_path / "out.jsonl", 20)
    whole = family(job.pid)
    assert len(whole) >= 4, "two replicas, a worker each"
    job.kill()
    job.communicate()
    wait_until_gone(whole)
    found = lines(tmp_path)
    assert 20 <= len(found) < NUM_ROWS
    assert set(found) <= set(undisturbed)
    monkeypatch.setattr(zygote, "start_from_nothing", False)  # what goes on starts like any job
    job = start_scripted(tmp_path, data_parallel_size=3, progress="lines")
    kill(wait_until(lambda: processes(REPLICA, job.pid), job)[:1])
    status, said = ended(job)
    assert status == 3, said
    assert f"resuming: {len(found)} of {NUM_ROWS + 1} rows are finished" in said
    assert "died: killed by SIGKILL" in said, "one of them while it loaded"
    assert lines(tmp_path) == undisturbed
    assert leftovers(tmp_path) == set()


@pytest.mark.full("a signal to a job of one stays (batch/test_job_process.py), and a driver that is killed")
def test_a_signal_stops_all_of_them_and_the_job_goes_on_with_one(tmp_path: Path, undisturbed: list[bytes]) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start_scripted(tmp_path)
    wait_for_rows(job, tmp_path / "out.jsonl", 10)
    whole = family(job.pid)
    job.send_signal(signal.SIGINT)
    status, said = ended(job)
    assert (status, "SIGINT: stopping" in said) == (1, True), said
    wait_until_gone(whole)
    assert run(tmp_path, data_parallel_size=1)[0] == 3
    assert lines(tmp_path) == undisturbed


def test_order_report_summary_and_failed_rows_once_more_are_as_with_one(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [row(f"r{n:03d}", "bad" if n % 10 == 3 else "x" * (n % 17 + 1))
                                       for n in range(80)])  # fmt: skip
    extras = {"report": str(tmp_path / "report.html"), "summary": str(tmp_path / "summary.json")}
    status, said = run(tmp_path, ordered=True, **extras)
    assert status == 3, said
    assert [item["custom_id"] for item in read_rows(tmp_path / "out.jsonl")] == [f"r{n:03d}" for n in range(80)]
    assert "r079" in (tmp_path / "report.html").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())["this_run"]
    assert [replica["name"] for replica in summary["replicas"]] == ["replica 0", "replica 1"]
    assert summary["rows"]["copied"] == 72 - 17, "of 17 texts each is served once, by one of the replicas"
    assert sum(replica["rows"] for replica in summary["replicas"]) == 80 - 55
    assert (summary["rows"]["answered"], summary["preprocessing"]["workers"]) == (72, 2)
    status, said = run(tmp_path, ordered=True, retry_errors=True, data_parallel_size=3, **extras)
    assert status == 3, said
    summary = json.loads((tmp_path / "summary.json").read_text())["this_run"]
    assert (summary["rows"]["resumed"], summary["rows"]["failed"]) == (72, 8)
    assert [item["custom_id"] for item in read_rows(tmp_path / "out.jsonl")] == [f"r{n:03d}" for n in range(80)]


def test_with_no_replica_left_the_job_ends_and_can_be_resumed(tmp_path: Path, undisturbed: list[bytes]) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start_scripted(tmp_path, max_replica_restarts=0, progress="lines")
    wait_for_rows(job, tmp_path / "out.jsonl", 5)
    kill(processes(REPLICA, job.pid))
    status, said = ended(job)
    assert status == 1
    assert "no replica is left" in said
    assert "not started again (max_replica_restarts)" in said
    assert run(tmp_path)[0] == 3
    assert lines(tmp_path) == undisturbed
    assert leftovers(tmp_path) == set()


@pytest.mark.full("a replica that stops beside others stays (test_stopped_replicas.py)")
def test_a_stopped_replica_is_noticed(tmp_path: Path, undisturbed: list[bytes]) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    job = start_scripted(tmp_path, progress="lines", stage="impatient")
    wait_for_rows(job, tmp_path / "out.jsonl", 1)
    os.kill(processes(REPLICA, job.pid)[0], signal.SIGSTOP)
    status, said = ended(job)
    assert status == 3, said
    assert "has been stopped for 1 seconds (SIGSTOP)" in said
    assert lines(tmp_path) == undisturbed


@pytest.mark.full("one that is killed while it starts stays, in the test of a killed driver")
def test_a_replica_that_loses_a_rank_while_it_starts_is_started_again(
    tmp_path: Path, undisturbed: list[bytes]
) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    status, said = run(tmp_path, stage="loses a rank once", progress="lines")
    assert status == 3, said
    assert "died: rank 1 died (killed by SIGKILL) while being started" in said
    assert "started again (1 of 3)" in said
    assert lines(tmp_path) == undisturbed
    assert leftovers(tmp_path) == {"lost"}


def test_what_is_wrong_is_named_before_rows_move(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", rows())
    for stage, message in (("broken", "a tensor is missing"),
                           ("differs", "its settings are not those of another replica")):  # fmt: skip
        status, said = run(tmp_path, stage=stage)
        assert (status, message in said) == (2, True), said
        assert "replica " in said
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "model"}
    status, said = run(tmp_path, stage="dies", max_replica_restarts=0)
    assert (status, "no replica is left" in said) == (1, True), said
    assert {path.name for path in tmp_path.iterdir()} == {"in.jsonl", "model", "out.jsonl.status.json"}
    (line,) = PastJob(str(tmp_path / "out.jsonl")).runs.last
    assert "no replica is left" in line["end"], "a run that loaded and died has taken devices"


@pytest.mark.parametrize(("options", "message"), [
    ({"data_parallel_size": "four"}, "data_parallel_size: 'four' is no number of replicas, nor auto"),
    ({"data_parallel_size": 0}, "data_parallel_size: 0 is no number"),
    ({"max_replica_restarts": -1}, "max_replica_restarts: -1 is negative"),
])  # fmt: skip
def test_what_is_no_number_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchOptions.from_keywords(input="in.jsonl", output="out.jsonl", **options)
