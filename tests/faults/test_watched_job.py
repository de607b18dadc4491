"""A job seen from another process while it is suspended, killed and resumed, and reports that are made meanwhile."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.names import new_version_path
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.batch.job.job_status import JobStatus, status_of
from npu_runner.batch.job.options import BatchOptions
from npu_runner.errors import ConfigError
from tests.batch.report_pages import names
from tests.batch.scripted import row, write_rows
from tests.replicas.jobs import ended, kill, num_rows, processes, start_scripted, wait_for_rows, wait_until
from tests.replicas.scripted_job import HOLD

NUM_ROWS = 200
REPORT = b"npu_runner.batch.job.live_report"


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there no row is answered."""
    monkeypatch.setenv(HOLD, str(tmp_path / "hold"))
    return tmp_path / "hold"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "in.jsonl", [row(f"r{n}", "bad" if n % 20 == 0 else "x" * 20) for n in range(NUM_ROWS)])
    return tmp_path


def seen(folder: Path) -> JobStatus | None:
    try:
        status = status_of(str(folder / "out.jsonl"))
    except ConfigError:  # not begun yet
        return None
    return status if isinstance(status, JobStatus) else None


def wait_for(process: subprocess.Popen[bytes], folder: Path, holds: Callable[[JobStatus], bool]) -> JobStatus:
    def look() -> JobStatus | None:
        status = seen(folder)
        return status if status is not None and holds(status) else None

    found: Any = wait_until(look, process)
    assert found is not None, process.communicate()
    return found  # type: ignore[no-any-return]


def hold(process: subprocess.Popen[bytes], folder: Path, held: Path) -> None:
    """Have it stand still with some rows on disk, and say so."""
    wait_for_rows(process, folder / "out.jsonl", 65)
    held.touch()
    status = wait_for(process, folder, lambda status: status.status.rows.answered > 20)
    assert status.state == "under way"


def test_suspended_killed_resumed_and_finished(folder: Path, held: Path) -> None:
    with start_scripted(folder, stage="watched") as process:
        hold(process, folder, held)
        process.send_signal(signal.SIGSTOP)
        assert wait_for(process, folder, lambda status: status.state != "under way").state == "suspended"
        process.send_signal(signal.SIGCONT)
        assert wait_for(process, folder, lambda status: status.state != "suspended").state == "under way"
        process.kill()
        process.wait()
    killed = seen(folder)
    assert killed is not None
    assert killed.state == "killed"
    assert killed.status.end is None
    assert 20 < killed.status.rows.answered <= num_rows(folder / "out.jsonl")
    assert "it has ended without a word" in "\n".join(killed.to_lines())
    held.unlink()
    status, said = ended(start_scripted(folder, stage="watched"))
    assert status == 3, said
    finished = seen(folder)
    assert finished is not None
    assert (finished.state, finished.status.exit_status) == ("finished", 3)
    assert (finished.status.rows.answered, finished.status.rows.failed) == (NUM_ROWS - 10, 10)
    assert 0 < finished.status.pace.rows < NUM_ROWS - 10
    assert sum(replica.rows for replica in finished.status.replicas) == finished.status.pace.rows


@pytest.mark.full("a lost output that is said as the end stays (batch/test_status.py), and a job that is killed")
def test_a_signal_is_said_as_the_end(folder: Path, held: Path) -> None:
    with start_scripted(folder, stage="watched") as process:
        hold(process, folder, held)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 1
    status = seen(folder)
    assert status is not None
    assert (status.state, status.status.end, status.status.exit_status) == ("ended early", "interrupted", 1)


def test_reports_are_made_while_it_runs_of_rows_that_are_there(folder: Path, held: Path) -> None:
    report = folder / "report.html"
    with start_scripted(folder, stage="watched", report=str(report), report_every=0.01, report_rows=50) as process:
        hold(process, folder, held)
        made = wait_for(process, folder, lambda status: status.status.report is not None)
        assert made.status.report is not None
        assert made.status.report.error is None
        assert job_at_work(folder / "out.jsonl") == str(process.pid)
        assert 0 < len(wait_until(lambda: names(report.read_text()), process)) <= 50
        assert len(processes(REPORT, process.pid)) <= 1
        held.unlink()
        status, said = ended(process)
    assert status == 3, said
    assert said.startswith("rows "), "the last lines alone"
    assert not new_version_path(report).exists()
    assert len(names(report.read_text())) == 50


@pytest.mark.full("reports that are made again and again; those that are made while a job runs stay")
def test_a_report_that_is_killed_is_said_and_costs_nothing(folder: Path, held: Path) -> None:
    options = {"report": str(folder / "report.html"), "report_every": 0.01, "progress": "lines"}
    with start_scripted(folder, stage="watched", **options) as process:
        hold(process, folder, held)

        def has_failed(status: JobStatus) -> bool:
            kill(processes(REPORT, process.pid))
            return status.status.report is not None and status.status.report.error is not None

        assert wait_for(process, folder, has_failed).state == "under way"
        held.unlink()
        status, said = ended(process)
    assert status == 3, said
    assert "report    none of the rows so far could be made: killed by SIGKILL; the job goes on" in said
    assert (folder / "report.html").exists()


@pytest.mark.parametrize("minutes", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_interval_is_refused(minutes: float) -> None:
    with pytest.raises(ConfigError, match="report_every"):
        BatchOptions(input="a", output="b", report=Path("r"), report_every=minutes)


def test_without_a_report_there_is_nothing_to_make() -> None:
    with pytest.raises(ConfigError, match="report_every: there is no report to make; name its file with --report"):
        BatchOptions(input="a", output="b", report_every=1.0)
