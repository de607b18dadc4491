"""How a job gets on, seen from outside while it runs and afterwards: counts are those of the output, the lock is real.

The oracle of rows is the output itself, counted; of the metrics file the parser of prometheus_client.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from npu_runner.batch.files.names import status_path
from npu_runner.batch.files.status_file import LiveFile, Moment, read_status
from npu_runner.batch.job import live
from npu_runner.cli.main import main
from npu_runner.errors import ConfigError, OutputLostError
from npu_runner.reports.status import CountedStatus, JobStatus, status_of
from npu_runner.reports.summary import PastJob
from tests.batch.job_folder import LEFT, Job, numbered
from tests.batch.mounts import mounted
from tests.batch.scripted import ScriptedEngine, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
NUM_ROWS = 80
BAD = [number for number in range(NUM_ROWS) if number % 10 == 3]


@pytest.fixture
def job(job: Job) -> Job:
    write_rows(job.input, [row(text, "bad" if int(text) in BAD else "x" * 3) for text in numbered(NUM_ROWS)])
    return job


@pytest.fixture
def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.0)


def looking(look: Callable[[], Any], *, every: int = 1) -> Callable[[Any], ScriptedEngine]:
    """An engine that looks from outside between its steps."""
    return lambda config: ScriptedEngine(config, on_step=lambda engine: engine.num_steps % every or look())


def seen(job: Job) -> JobStatus:
    status = status_of(str(job.output))
    assert isinstance(status, JobStatus)
    return status


@pytest.mark.usefixtures("without_pause")
def test_while_it_runs_it_says_what_is_on_disk_and_then_how_it_ended(job: Job) -> None:
    looks: list[tuple[JobStatus, int]] = []

    def look() -> None:
        time.sleep(0.01)  # the writer has a thread of its own
        looks.append((seen(job), job.output.read_bytes().count(b"\n")))

    summary = job.run(looking(look))
    assert {status.state for status, _ in looks} == {"under way"}
    for status, num_lines in looks:
        rows = status.to_json()["rows"]
        assert rows["total"] == NUM_ROWS
        assert rows["done"] == rows["answered"] + rows["failed"] <= num_lines
        assert rows["unfinished"] == NUM_ROWS - rows["done"]
        assert rows["failed"] == rows["failures_by_code"].get("scripted_bad", 0)
        assert status.status.pid == os.getpid()
    dones = [status.to_json()["rows"]["done"] for status, _ in looks]
    assert dones == sorted(dones)
    assert 0 < dones[-1] < NUM_ROWS
    ended, counted = seen(job), PastJob(str(job.output)).totals(None)
    assert (ended.state, ended.status.exit_status) == ("finished", summary.exit_status) == ("finished", 3)
    assert (ended.status.rows.answered, ended.status.rows.failures_by_code) == (
        counted.rows.num_answered, dict(counted.rows.failures_by_code)) == (NUM_ROWS - len(BAD),
                                                                            {"scripted_bad": len(BAD)})
    assert job.files() == LEFT


def test_a_run_that_is_refused_leaves_the_files_as_they_were(job: Job) -> None:
    metrics = job.folder / "job.prom"
    with pytest.raises(ConfigError):
        job.run(metrics_file=metrics, accept_changed=("nothing",), max_row_bytes=1 << 20, input=str(job.model))
    assert job.files() == set(), "there was none before"
    job.run(metrics_file=metrics)
    before = status_path(job.output).read_bytes(), metrics.read_bytes()
    write_rows(job.input, [*map(json.loads, job.input.read_bytes().splitlines()), row("new")])
    with pytest.raises(ConfigError, match="seed"):
        job.run(seed=1, metrics_file=metrics)
    assert (status_path(job.output).read_bytes(), metrics.read_bytes()) == before


def test_totals_are_of_all_runs_and_rates_of_this_one(job: Job) -> None:
    job.run()
    write_rows(job.input, [*map(json.loads, job.input.read_bytes().splitlines()), *(row(f"n{n}") for n in range(5))])
    job.run()
    status = seen(job).status
    assert (status.rows.total, status.rows.answered, status.rows.failed) == (NUM_ROWS + 5, NUM_ROWS + 5 - len(BAD),
                                                                             len(BAD))
    assert status.pace.rows == 5
    assert status.pace.rows_per_second == pytest.approx(5 / status.pace.serve_seconds)
    job.run()
    assert (seen(job).state, seen(job).status.pace.rows) == ("finished", 0), "nothing was left to do"


@pytest.mark.parametrize("text", ["", '{"format": 1', '{"format": 2}', *only_full(
    "more that is no status; nothing, half of one and one of another format stay",
    "[]", "{}", '{"format": NaN}', "nul\0")])
def test_a_status_that_is_damaged_is_named_and_the_rows_are_counted(job: Job, text: str,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    job.run()
    status_path(job.output).write_text(text)
    assert main(["status", str(job.output)]) == 0
    said = capsys.readouterr().out
    assert "out.jsonl: finished" in said
    assert "status.json: it is not whole, or of another version" in said


def test_an_output_without_a_status_or_with_anothers_is_counted(job: Job, tmp_path_factory: pytest.TempPathFactory,
                                                                capsys: pytest.CaptureFixture[str]) -> None:
    other = Job(tmp_path_factory.mktemp("other"))
    write_rows(other.input, [row("a")])
    for each in (job, other):
        each.run()
    other_status = status_path(other.output).read_bytes()
    status_path(other.output).unlink()
    assert isinstance(status_of(str(other.output)), CountedStatus)
    status_path(job.output).write_bytes(other_status)
    assert main(["status", str(job.output), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["rows"]["done"], found["source"]) == ("finished", NUM_ROWS, "rows of the output")
    counted = status_of(str(job.output))
    assert isinstance(counted, CountedStatus)
    assert "of another job" in counted.why


@pytest.mark.parametrize("name", ["nothing.jsonl", "in.jsonl", "no/such/folder.jsonl", "model"])
def test_what_is_no_output_is_refused(job: Job, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(job.folder / name)]) == 2
    assert "output" in capsys.readouterr().err


def test_how_old_it_is_does_not_depend_on_the_clock_that_people_set() -> None:
    written = Moment(host="h", boot="b", clock=100.0, time=5000.0)
    assert written.seconds_until(Moment(host="h", boot="b", clock=103.0, time=9.0)) == 3.0
    assert written.seconds_until(Moment(host="i", boot="c", clock=1.0, time=5004.0)) == 4.0
    assert written.seconds_until(Moment(host="i", boot="c", clock=1.0, time=9.0)) == 0.0


def test_lately_is_the_last_half_minute() -> None:
    lately = live.Lately()
    rates = [lately.rate(10.0 + 2 * beat, min(beat, 50) * 8) for beat in range(100)]
    assert rates[0] == 0.0
    assert set(rates[1:51]) == {4.0}
    assert rates[50] > rates[60] > rates[64] > rates[65] == 0.0


@pytest.mark.usefixtures("without_pause")
def test_the_metrics_file_is_what_prometheus_reads(job: Job) -> None:
    metrics, looks = job.folder / "job.prom", []
    job.run(looking(lambda: looks.append(values(metrics)), every=7), metrics_file=metrics)
    assert all(look["npu_runner_ended", ()] == 0 for look in looks)
    ended, status = values(metrics), seen(job).status
    assert ended["npu_runner_exit_status", ()] == 3
    assert ended["npu_runner_rows_failed_total", (("code", "scripted_bad"),)] == len(BAD)
    assert ended["npu_runner_rows_answered_total", ()] == NUM_ROWS - len(BAD)
    assert ended["npu_runner_input_rows", ()] == NUM_ROWS
    assert ended["npu_runner_completion_tokens_total", ()] == status.tokens.completion == 3 * (NUM_ROWS - len(BAD))
    assert ended["npu_runner_replicas", (("phase", "ended"),)] == 1
    assert ended["npu_runner_update_time_seconds", ()] == pytest.approx(status.updated.time, abs=60)


def values(metrics: Path) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    families = list(text_string_to_metric_families(metrics.read_text()))
    assert len({family.name for family in families}) == len(families), "each family once"
    assert all(family.documentation and family.type in ("gauge", "counter") for family in families)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.name.startswith("npu_runner_") for sample in samples)
    found = {(sample.name, tuple(sorted(sample.labels.items()))): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def test_labels_that_codes_of_an_edited_output_make_are_escaped(job: Job) -> None:
    code = 'a "b" \\ {c}\n漢 \ud800'
    job.run()
    lines = [json.loads(line) for line in job.output.read_bytes().splitlines()]
    for line in lines:
        if line["error"] is not None:
            line["error"]["code"] = code
    job.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_rows(job.input, [*map(json.loads, job.input.read_bytes().splitlines()), row("new")])
    job.run(metrics_file=job.folder / "job.prom")
    shown = code.encode(errors="backslashreplace").decode()
    assert values(job.folder / "job.prom")["npu_runner_rows_failed_total", (("code", shown),)] == len(BAD)
    assert seen(job).status.rows.failures_by_code == {shown: len(BAD)}


@pytest.mark.usefixtures("without_pause")
def test_a_disk_that_is_full_is_said_once_and_the_job_goes_on(
    job: Job, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = tmp_path_factory.mktemp("disk")
    with mounted(disk, "size=16k"):
        metrics = disk / "job.prom"
        with open(disk / "fill", "wb", buffering=0) as file:
            file.write(bytes(16 << 10))
        assert job.run(metrics_file=metrics, progress="lines").exit_status == 3
        assert capsys.readouterr().err.count("metrics_file") == 1
        assert {path.name for path in disk.iterdir()} == {"fill"}
        (disk / "fill").unlink()
        said: list[str] = []
        file = LiveFile("status x", metrics, said.append)
        file.write(b"old")
        for _ in range(3):
            file.write(bytes(17 << 10))
        assert metrics.read_bytes() == b"old"
        assert said == ["status x: No space left on device; the job goes on, and tries again without a word"]
        file.put_back()
        assert not metrics.exists()


@pytest.mark.usefixtures("without_pause")
def test_an_output_that_is_lost_is_said_as_the_end(job: Job) -> None:
    looks: list[JobStatus] = []

    def look() -> None:
        looks.append(seen(job))
        if job.output.is_file() and job.output.stat().st_size:
            job.output.unlink()

    with pytest.raises(OutputLostError):
        job.run(looking(look))
    ended = read_status(job.output)
    assert ended is not None
    assert ended.end is not None
    assert "was removed" in ended.end
    assert (ended.exit_status, ended.rows.answered, ended.pace.lately) == (1, 0, 0.0)


def test_of_a_stream_there_are_metrics_and_no_status(job: Job) -> None:
    job.run(output="/dev/null", metrics_file=job.folder / "job.prom")
    assert job.files() == {"job.prom"}
    assert values(job.folder / "job.prom")["npu_runner_rows_answered_total", ()] == NUM_ROWS - len(BAD)


def test_neither_is_a_setting_that_an_output_keeps_to(job: Job) -> None:
    job.run(metrics_file=job.folder / "a.prom", max_failures="50%")
    write_rows(job.input, [*map(json.loads, job.input.read_bytes().splitlines()), row("new")])
    summary = job.run(metrics_file=job.folder / "b.prom", max_failures="20", report=job.folder / "r.html")
    assert summary.num_resumed == NUM_ROWS


def test_a_replicas_status_is_read_whole_by_what_writes_it(job: Job) -> None:
    job.run()
    status = read_status(job.output)
    assert status is not None
    assert [(replica.phase, replica.rows, replica.deaths) for replica in status.replicas] == [("ended", NUM_ROWS, 0)]
