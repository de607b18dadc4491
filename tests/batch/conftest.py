"""What tests of jobs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch.job_folder import Job


@pytest.fixture
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)
