"""A job seen from another process while it is suspended, killed and resumed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.errors import ConfigError
from npu_runner.reports.status import JobStatus, status_of
from tests.batch.scripted import row, write_rows
from tests.replicas.jobs import ended, num_rows, start_scripted, wait_for_rows, wait_until
from tests.replicas.scripted_job import HOLD
from tests.reports.report_pages import names

NUM_ROWS = 200


@pytest.fixture
def held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """While this file is there no row is answered."""
    monkeypatch.setenv(HOLD, str(tmp_path / "hold"))
    return tmp_path / "hold"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = ["bad" if n % 20 == 0 else "x" * 20 for n in range(NUM_ROWS)]
    write_rows(tmp_path / "in.jsonl", [row(f"r{n}", text, user=f"u{n}") for n, text in enumerate(texts)])
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


def test_a_report_is_made_beside_it_of_the_rows_that_are_there(folder: Path, held: Path) -> None:
    page, command = folder / "page.html", [sys.executable, "-m", "npu_runner", "report", "out.jsonl", "-i", "in.jsonl"]
    with start_scripted(folder, stage="watched") as process:
        hold(process, folder, held)
        subprocess.run([*command, "-o", "page.html", "--report-rows", "50"], cwd=folder, check=True)
        assert job_at_work(folder / "out.jsonl") == str(process.pid)
        assert len(names(page.read_text())) == 50
        held.unlink()
        status, said = ended(process)
    assert status == 3, said
