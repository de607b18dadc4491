"""Runs that have served no row: killed or interrupted while the model loads they are in the record, refused they are
not."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest

from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import lock_path, manifest_path, status_path
from npu_runner.batch.files.runs import Run
from npu_runner.batch.job import live
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.signals import Interrupted
from npu_runner.cli.main import main
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError
from npu_runner.reports.report import report_job
from npu_runner.reports.summary import NO_INPUT, PastJob
from tests.batch.job_folder import Job
from tests.batch.killed_runs import kill, killed_within, told_in
from tests.batch.scripted import ScriptedEngine, ScriptedProcessor, row, write_rows

pytestmark = pytest.mark.usefixtures("fixed_time")


@pytest.fixture
def job(job: Job) -> Job:
    write_rows(job.input, [row("a"), row("b", "bad")])
    return job


def raises(error: BaseException) -> Callable[[RunnerConfig], NoReturn]:
    def load(config: RunnerConfig) -> NoReturn:
        raise error

    return load


def runs_of(job: Job) -> list[Run]:
    """The runs as they are told from outside."""
    return list(PastJob(str(job.output)).runs.last)


def killed_while_loading(job: Job, **options: Any) -> None:
    killed_within(job, lambda: job.run(lambda config: kill(), **options))


def test_a_run_that_is_killed_while_it_loads_counts(job: Job, monkeypatch: pytest.MonkeyPatch,
                                                    capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.0)
    killed_while_loading(job)
    (first,) = runs_of(job)
    assert (first["end"], first["rows"], first["devices"], first["platform"]) == (None, 2, 1, None)
    assert first["seconds"]["device"] > 0, "as the engine has said how far it is"
    assert job.files() - {lock_path(job.output).name} == {status_path(job.output).name}
    assert main(["summary", str(job.output)]) == 0
    told = capsys.readouterr().out
    assert "out.jsonl: unfinished\nrows      0 answered, 0 failed, 2 not finished" in told
    assert "None" not in told
    assert main(["report", str(job.output), "-o", str(job.folder / "page.html")]) == 2
    assert "out.jsonl: it is not there yet, or not any more" in capsys.readouterr().err
    job.run(summary=job.folder / "summary.json")
    told_now = told_in(job.folder / "summary.json")
    assert told_now["runs"][0] == first
    assert [run["end"] for run in told_now["runs"]] == [None, "finished"]
    assert told_now["rows"]["unrecorded"] == 0
    assert told_now["seconds"]["device"] == pytest.approx(sum(run["seconds"]["device"] for run in told_now["runs"]))


def test_the_first_run_of_an_output_can_be_looked_at_while_it_loads(job: Job) -> None:
    seen = []

    def look(config: RunnerConfig) -> ScriptedEngine:
        totals = PastJob(str(job.output)).totals(None)
        seen.append((job.output.exists(), totals.state, totals.num_rows, len(totals.runs)))
        return ScriptedEngine(config)

    job.run(look)
    assert seen == [(False, "under way", 2, 1)]


@pytest.mark.parametrize(("error", "end"), [
    (EngineDeadError("rank 1 died in load"), "rank 1 died in load"),
    (Interrupted("SIGINT"), "interrupted"),
])
def test_a_run_that_ends_while_it_loads_has_its_end_in_the_record(job: Job, error: BaseException, end: str) -> None:
    summary = job.folder / "summary.json"
    with pytest.raises(Exception, match=r"rank 1 died in load|interrupted by SIGINT"):
        job.run(raises(error), summary=summary)
    (run,) = runs_of(job)
    assert (run["end"], run["devices"]) == (end, 1)
    assert told_in(summary)["runs"] == [run]
    job.run(summary=summary)
    assert [run["end"] for run in told_in(summary)["runs"]] == [end, "finished"]


@pytest.mark.parametrize("begun_before", [False, True])
def test_a_run_that_is_refused_while_it_loads_leaves_no_trace(job: Job, begun_before: bool) -> None:
    summary = job.folder / "summary.json"
    if begun_before:
        write_rows(job.input, [row("a")])
        job.run(summary=summary)
        write_rows(job.input, [row("a"), row("b")])
    before = files_of(job)
    with pytest.raises(ConfigError, match="too small"):
        job.run(raises(ConfigError("memory is too small")), summary=summary)
    assert files_of(job) == before


def files_of(job: Job) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in job.folder.iterdir() if path.is_file()}


def test_a_run_that_is_to_overwrite_an_output_is_none_of_its_runs_while_it_loads(job: Job) -> None:
    job.run()
    before = runs_of(job)
    killed_while_loading(job, overwrite=True)
    assert runs_of(job) == before
    with pytest.raises(EngineDeadError):
        job.run(raises(EngineDeadError("rank 1 died in load")), overwrite=True)
    assert runs_of(job) == before
    job.run(overwrite=True)
    assert len(runs_of(job)) == 1


def test_runs_of_an_output_that_was_moved_away_are_none_of_the_next_one_of_its_name(job: Job) -> None:
    """The status stayed behind."""
    killed_while_loading(job)
    job.run()
    for path in (job.output, manifest_path(job.output)):
        shutil.move(path, job.model / path.name)
    job.run()
    assert [run["end"] for run in runs_of(job)] == ["finished"]
    assert PastJob(str(job.output)).totals(None).num_unrecorded == 0


def test_a_retry_that_needs_no_model_is_a_run_of_the_record(job: Job) -> None:
    job.run()
    summary = job.folder / "summary.json"
    job.run(retry_errors=True, summary=summary)
    assert len(job.engines) == 1
    told = told_in(summary)
    first, second = told["runs"]
    assert (first["end"], second["end"]) == ("finished", "finished")
    assert (second["devices"], second["seconds"]["device"], second["tally"]["num_failed"]) == (0, 0.0, 1)
    assert told["this_run"]["seconds"]["serve"] == pytest.approx(second["seconds"]["serve"], abs=0.01)
    assert told["rows"]["failed"] == 1


def test_a_retry_that_has_other_rows_to_do_prepares_each_once(job: Job) -> None:
    """They are not looked through before the model loads."""
    job.run()
    write_rows(job.input, [row("a"), row("b", "bad"), row("c", "more")])
    flag = job.folder / "begun"
    job.run(retry_errors=True, processor=ScriptedProcessor(flag=str(flag)))
    assert sorted(flag.read_text().splitlines()) == ["bad", "more"]


def test_rows_that_are_not_of_the_input_leave_none_unfinished(job: Job) -> None:
    """Somebody has put answers of two jobs together."""
    job.run()
    with open(job.output, "ab") as file:
        file.write(b'{"custom_id": "x", "error": null}\n')
    assert PastJob(str(job.output)).totals(None).to_json()["rows"]["unfinished"] == 0


def test_an_output_that_is_gone_has_no_report(job: Job) -> None:
    job.run()
    job.output.unlink()
    page = job.folder / "page.html"
    with pytest.raises(ConfigError, match="it is not there yet, or not any more"):
        report_job(BatchOptions(input=NO_INPUT, output=str(job.output), report=page))
    assert not page.exists()


@pytest.mark.parametrize("retry_errors", [False, True])
def test_a_setting_that_is_accepted_where_no_model_is_loaded_is_said_to_have_no_effect(
    job: Job, capsys: pytest.CaptureFixture[str], retry_errors: bool
) -> None:
    job.run()
    before = Manifest.load(job.output)
    assert before is not None
    job.run(seed=1, retry_errors=retry_errors, accept_changed=("seed", "sed"), progress="lines")
    assert "; accept_changed seed, sed: without effect, the manifest's settings stay\n" in capsys.readouterr().err
    after = Manifest.load(job.output)
    assert after is not None
    assert after == replace(before, runs=after.runs)
