"""An output that goes away while it is written is noticed, and the counts are of what is still there."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.answer_writer import AnswerWriter
from npu_runner.config import RunnerConfig
from npu_runner.errors import EngineDeadError, JobError, OutputLostError
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
NUM_ROWS = 150


def replace_by_another(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"")
    other.replace(path)


def append(path: Path) -> None:
    with open(path, "ab") as file:
        file.write(b"hello\n")


HARMS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "removed": (Path.unlink, "was removed or renamed while the job wrote it"),
    "renamed": (lambda path: path.rename(path.with_name("elsewhere")), "was removed or renamed"),
    "folder removed": (lambda path: shutil.rmtree(path.parent), "was removed or renamed"),
    "replaced": (replace_by_another, "another file was put in its place"),
    "cut": (lambda path: os.truncate(path, 10), "another process cut it or wrote to it"),
    "written to": (append, "another process cut it or wrote to it"),
}


def harmed_after(num_rows: int, harm: Callable[[], Any]) -> Callable[[RunnerConfig], ScriptedEngine]:
    class Harmed(ScriptedEngine):
        num_finished = 0

        def step(self) -> list[Any]:
            outputs = super().step()
            before, self.num_finished = self.num_finished, self.num_finished + len(outputs)
            if before < num_rows <= self.num_finished:
                harm()
            return outputs

    return lambda config: Harmed(config, latency=lambda text: 1)


@pytest.mark.parametrize(("name", "num_rows"), [
    ("removed", 50), ("replaced", NUM_ROWS), ("written to", NUM_ROWS),
    *only_full("each harm in the midst and at the end; one of each kind stays",
               *((name, 50) for name in HARMS if name != "removed"),
               *((name, NUM_ROWS) for name in HARMS if name not in ("replaced", "written to")))])
def test_an_output_that_is_lost_ends_the_job_and_nothing_of_it_is_counted(job: Job, name: str, num_rows: int) -> None:
    harm, why = HARMS[name]
    write_rows(job.input, [row(f"r{n}") for n in range(NUM_ROWS)])
    folder = job.folder / "answers"
    folder.mkdir()
    output, summary = folder / "out.jsonl", job.folder / "summary.json"
    with pytest.raises(OutputLostError, match=why):
        job.run(harmed_after(num_rows, lambda: harm(output)), output=str(output), summary=summary)
    with AnswerFile([output]) as rows:
        there = rows.scan().num_rows
    told = json.loads(summary.read_text())
    run = told["this_run"]
    assert (run["exit_status"], run["rows"]["answered"], told["rows"]["answered"]) == (1, 0, there)
    assert why in run["error"]
    assert run["rows"]["unfinished"] == told["rows"]["unfinished"] == NUM_ROWS - there, "what stands in it is finished"
    if folder.exists():
        assert job.run(output=str(output)).exit_status == 0
        assert sorted(item["custom_id"] for item in read_rows(output)) == sorted(f"r{n}" for n in range(NUM_ROWS))


def test_a_loss_is_noticed_long_before_the_end(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}") for n in range(20_000)])
    with pytest.raises(OutputLostError):
        job.run(harmed_after(100, job.output.unlink))
    assert job.engines[0].num_steps < 20_000 / 8 / 2


def test_a_loss_is_noticed_while_no_row_finishes(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 9) for n in range(70)])

    def step(engine: ScriptedEngine) -> None:
        if not engine.waiting and len(engine.running) == 1:  # it never ends
            job.output.unlink(missing_ok=True)

    with pytest.raises(OutputLostError):
        job.run(lambda config: ScriptedEngine(config, latency=Latencies(), on_step=step))


class Latencies:
    """One row in the whole job takes for ever."""

    count = 0

    def __call__(self, text: str) -> int:
        self.count += 1
        return 10**9 if self.count == 1 else 1


def test_an_output_that_changes_while_the_model_loads_is_not_written(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error")])
    job.run()

    def loads(config: RunnerConfig) -> ScriptedEngine:
        job.output.unlink()
        return ScriptedEngine(config)

    with pytest.raises(JobError, match="was changed while the model loaded"):
        job.run(loads, retry_errors=True)
    assert not job.output.exists()


@pytest.mark.parametrize("option", ["ordered", "report"])
def test_an_output_that_goes_before_the_last_steps_is_a_job_error(job: Job, option: str) -> None:
    write_rows(job.input, [row("a"), row("b")])

    class GoesAtTheEnd(ScriptedEngine):
        def __exit__(self, *error: Any) -> None:
            job.output.unlink()

    with pytest.raises(JobError, match=r"out\.jsonl"):
        job.run(GoesAtTheEnd, summary=job.folder / "s.json", **{option: job.folder / "r.html"})
    # A report is made when the job has ended.
    assert json.loads((job.folder / "s.json").read_text())["this_run"]["exit_status"] == (option == "ordered")


@pytest.mark.full("a limit on the size of files; a disk that is full stays (test_full_disk.py)")
def test_a_full_disk_ends_the_job_with_the_rows_it_took_counted(job: Job) -> None:
    write_rows(job.input, [row(f"r{n:03d}") for n in range(400)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(JobError, match="File too large"):
            job.run(summary=job.folder / "summary.json")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    told = json.loads((job.folder / "summary.json").read_text())
    assert 0 < told["rows"]["answered"] == len(job.names()) < 400
    assert told["rows"]["answered"] + told["rows"]["unfinished"] == 400
    assert job.output.read_bytes().endswith(b"\n")
    again = job.run()
    assert again.num_resumed == told["rows"]["answered"]
    assert sorted(job.names()) == [f"r{n:03d}" for n in range(400)]


def test_a_dead_engine_leaves_a_summary_of_what_it_did(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}") for n in range(NUM_ROWS)])

    def die() -> None:
        raise EngineDeadError("rank 1 died in decode")

    with pytest.raises(EngineDeadError):
        job.run(harmed_after(100, die), summary=job.folder / "summary.json")
    told = json.loads((job.folder / "summary.json").read_text())
    run = told["this_run"]
    assert (run["exit_status"], run["interrupted"], run["error"]) == (1, False, "rank 1 died in decode")
    assert told["rows"]["answered"] == len(job.names()) > 0


def test_a_refused_setting_leaves_the_summary_of_the_run_before(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error")])
    job.run(summary=job.folder / "summary.json")
    before = (job.folder / "summary.json").read_bytes()
    with pytest.raises(Exception, match="other settings"):
        job.run(summary=job.folder / "summary.json", seed=1, retry_errors=True)
    assert (job.folder / "summary.json").read_bytes() == before


def test_a_summary_that_cannot_be_written_is_a_job_error(job: Job) -> None:
    write_rows(job.input, [row("a")])
    folder = job.folder / "reports"
    folder.mkdir()

    def loads(config: RunnerConfig) -> ScriptedEngine:
        shutil.rmtree(folder)
        return ScriptedEngine(config)

    with pytest.raises(JobError, match=r"summary .*s\.json: No such file or directory, which was not so when the job"):
        job.run(loads, summary=folder / "s.json")
    assert job.names() == ["a"]


def test_an_output_that_can_no_longer_be_written_is_no_wrong_setting(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_bytes(b"")
    writer = AnswerWriter(os.open(tmp_path / "out.jsonl", os.O_RDONLY), "out.jsonl")
    writer.put(b"row\n")
    with pytest.raises(JobError, match=r"out\.jsonl: Bad file descriptor, which was not so when the job began"):
        writer.close()
    assert writer.num_kept == 0
