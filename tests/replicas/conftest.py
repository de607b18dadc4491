"""Settings of these tests, and answers that nothing disturbed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.batch.scripted import write_rows
from tests.replicas import real_jobs, scripted_runs
from tests.replicas.jobs import ended, start_real


@pytest.fixture
def fixed_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")


@pytest.fixture
def one_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    folder = tmp_path_factory.mktemp("undisturbed")
    write_rows(folder / "in.jsonl", scripted_runs.rows())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        status, said = scripted_runs.run(folder, data_parallel_size=1)
    assert status == 3, said
    return sorted((folder / "out.jsonl").read_bytes().splitlines())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rows, and `one.jsonl`: the answers of one replica that nobody disturbed."""
    made = tmp_path_factory.mktemp("replicas")
    write_rows(made / "in.jsonl", real_jobs.requests(made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "1700000000")
        status, said = ended(start_real(made, "one.jsonl"))
    assert status == 3, said
    return made
