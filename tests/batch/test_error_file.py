"""--error-file: each row is in one of two files, once, whatever is interrupted, tried again, ordered or refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.output_lock import OutputLock
from npu_runner.errors import ConfigError, EngineDeadError, OutputLostError
from npu_runner.reports.summary import PastJob
from tests import zygote
from tests.batch.job_folder import Job, numbered
from tests.batch.scripted import OvertakingEngine, ScriptedEngine, read_rows, row, write_rows
from tests.full_set import only_full
from tests.replicas.jobs import ended, start_scripted

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("fixed_time")
MIXED = [row(f"r{n}", f"bad {n}" if n % 4 == 1 else f"engine error {n}" if n % 4 == 3 else f"text {n}")
         for n in range(40)] + [b"{broken"]
FAILED = {f"r{n}" for n in range(40) if n % 2} | {None}
ANSWERED = {f"r{n}" for n in range(40) if not n % 2}


@pytest.fixture
def errors(job: Job) -> Path:
    write_rows(job.input, MIXED)
    return job.folder / "errors.jsonl"


def names(path: Path) -> list[str | None]:
    return [item["custom_id"] for item in read_rows(path)]


def assert_each_once(job: Job, errors: Path) -> None:
    assert sorted(names(job.output), key=str) == sorted(ANSWERED, key=str)
    assert sorted(names(errors), key=str) == sorted(FAILED, key=str)


def lines_of(*paths: Path) -> list[bytes]:
    return sorted(line for path in paths for line in path.read_bytes().splitlines())


class Mended(ScriptedEngine):
    def _output(self, request_id: str, text: str, params: Any) -> Any:
        return super()._output(request_id, text.replace("error", "mended"), params)


def test_failed_rows_are_there_and_answers_are_not(job: Job, errors: Path, tmp_path_factory: Any) -> None:
    alone = Job(tmp_path_factory.mktemp("one_file"))
    write_rows(alone.input, MIXED)
    alone.run()
    summary = job.run(error_file=errors, report=job.folder / "report.html")
    assert (summary.exit_status, summary.tally.num_answered, summary.tally.num_failed) == (3, 20, 21)
    assert_each_once(job, errors)
    assert all(item["error"] for item in read_rows(errors))
    assert lines_of(job.output, errors) == lines_of(alone.output), "the rows are those of one file"
    page = (job.folder / "report.html").read_text()
    assert "scripted_bad" in page
    assert "0 txet" in page
    again = job.run(error_file=errors)
    assert (again.exit_status, again.num_resumed, again.rows.num_failed) == (3, 41, 21)
    assert len(job.engines) == 1


@pytest.mark.parametrize("steps", [3, *only_full("other moments; one of them stays", 0, 9, 14)])
def test_a_job_that_died_is_finished_by_the_same_command(job: Job, errors: Path, steps: int) -> None:
    def step(engine: ScriptedEngine) -> None:
        if engine.num_steps > steps:
            raise EngineDeadError("rank 1 died in decode")

    with pytest.raises(EngineDeadError):
        job.run(lambda config: ScriptedEngine(config, on_step=step), error_file=errors)
    with open(errors, "ab") as file:
        file.write(b'{"id":"torn')
    found = len(names(job.output)) + len(errors.read_bytes().splitlines()) - 1
    assert job.run(error_file=errors).num_resumed == found
    assert_each_once(job, errors)


def test_failed_rows_are_tried_again_only_when_asked_for(job: Job, errors: Path) -> None:
    job.run(error_file=errors)
    summary = job.run(Mended, error_file=errors, retry_errors=True)
    assert (summary.num_resumed, summary.tally.num_answered, summary.tally.num_failed) == (20, 10, 11)
    assert set(names(errors)) == {name for name in FAILED if name is None or int(name[1:]) % 4 == 1}
    assert len(names(job.output)) == 30
    assert job.run(error_file=errors).rows.num_failed == 11


def test_rows_that_failed_before_there_was_a_file_for_them_move(job: Job, errors: Path) -> None:
    job.run()
    whole = lines_of(job.output)
    summary = job.run(error_file=errors)
    assert (summary.num_resumed, summary.rows.num_failed) == (41, 21)
    assert_each_once(job, errors)
    assert lines_of(job.output, errors) == whole


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_process_that_vanishes_while_rows_move_leaves_each_once(job: Job, errors: Path, moment: str) -> None:
    """Failed rows are in both files, or in the new one alone."""
    job.run()
    whole = lines_of(job.output)
    write_rows(job.input, [*MIXED, row("more", "text more")])  # else no model is loaded, and nothing is in between
    (job.folder / "vanishes.py").write_text(f"""
import os, sys, json
from pathlib import Path
import npu_runner.batch.files.answer_file as files
from tests.replicas import scripted_job
rewrite = files.AnswerFile.rewrite
def vanishing(self, file, places):
    is_last = file == 0 and len(places) == 20
    if is_last and {moment!r} == "before":
        os._exit(9)
    rewrite(self, file, places)
    if is_last:
        os._exit(9)
files.AnswerFile.rewrite = vanishing
options = {{"input": {str(job.input)!r}, "output": {str(job.output)!r}, "model": {str(job.model)!r}, "progress": "off",
           "error_file": {str(errors)!r}, "preprocessing_workers": 1}}
sys.exit(scripted_job.main(options))
""")
    done = zygote.run([sys.executable, str(job.folder / "vanishes.py")],
                      env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 9
    job.run(error_file=errors)
    assert sorted(name for name in names(job.output) if name != "more") == sorted(ANSWERED)
    assert [line for line in lines_of(job.output, errors) if b'"more"' not in line] == whole


def test_both_files_are_in_the_order_of_the_input(job: Job, errors: Path) -> None:
    texts = numbered(30)
    write_rows(job.input, [row(text, f"bad {text}" if text.endswith("3") else text) for text in texts])
    job.run(OvertakingEngine, error_file=errors, ordered=True)
    assert names(job.output) == [text for text in texts if not text.endswith("3")]
    assert names(errors) == [text for text in texts if text.endswith("3")]


def test_overwriting_begins_both_anew(job: Job, errors: Path) -> None:
    job.run(error_file=errors)
    write_rows(job.input, [row("a"), row("b", "bad")])
    job.run(error_file=errors, overwrite=True)
    assert (names(job.output), names(errors)) == (["a"], ["b"])


@pytest.mark.parametrize(("given", "match"), [
    (None, "was begun with --error-file errors.jsonl .* none is given"),
    ("others.jsonl", "was begun with --error-file errors.jsonl .*others.jsonl is given"),
])
def test_an_output_goes_on_with_its_own_error_file_alone(
        job: Job, errors: Path, given: str | None, match: str) -> None:
    job.run(error_file=errors)
    before = lines_of(job.output, errors)
    with pytest.raises(ConfigError, match=match):
        job.run(error_file=None if given is None else job.folder / given)
    assert lines_of(job.output, errors) == before


def test_what_cannot_be_an_error_file_is_refused_before_any_work(job: Job, errors: Path) -> None:
    for options, match in (
        ({"error_file": job.output}, "error_file .*: is the output as well"),
        ({"error_file": job.folder}, "is a folder"),
        ({"error_file": job.folder / "no" / "where.jsonl"}, "does not exist"),
        ({"error_file": Path("/dev/null")}, "is no file"),
        ({"error_file": errors, "output": "/dev/null"}, "the output is a stream"),
    ):
        with pytest.raises(ConfigError, match=match):
            job.run(**options)
    errors.write_text("mine\n")
    with pytest.raises(ConfigError, match="has content, and is not what the output was begun with"):
        job.run(error_file=errors)
    assert errors.read_text() == "mine\n"
    errors.unlink()
    with OutputLock(errors), pytest.raises(ConfigError, match=r"another job .* is writing it"):
        job.run(error_file=errors)
    assert job.engines == []
    assert job.files() == set()


def test_an_error_file_that_goes_away_is_noticed_and_made_up_for(job: Job, errors: Path) -> None:
    def step(engine: ScriptedEngine) -> None:
        if engine.num_steps == 12:
            errors.unlink()

    with pytest.raises(OutputLostError, match=r"errors.jsonl: was removed"):
        job.run(lambda config: ScriptedEngine(config, on_step=step, latency=lambda text: 3), error_file=errors)
    job.run(error_file=errors)
    assert_each_once(job, errors)


@pytest.mark.full("two replicas; the files of a job of one stay, and whose fault it is (faults/test_blame.py)")
@pytest.mark.parametrize("stage", ["kill", *only_full("nobody is killed", "")])
def test_replicas_write_to_both(tmp_path: Path, stage: str) -> None:
    """A row that kills whoever has it is given up, and its error row, the driver's own, is among the others."""
    deadly = [row("deadly", "kill me")] if stage else []
    write_rows(tmp_path / "in.jsonl", [*MIXED, *deadly])
    error_file = str(tmp_path / "errors.jsonl")
    status, said = ended(start_scripted(tmp_path, error_file=error_file, max_replica_restarts=9))
    assert status == 3, said
    assert sorted(names(tmp_path / "out.jsonl"), key=str) == sorted(ANSWERED, key=str)
    expected = FAILED | {item["custom_id"] for item in deadly}
    assert sorted(names(tmp_path / "errors.jsonl"), key=str) == sorted(expected, key=str)


def test_the_manifest_of_an_output_without_one_is_as_it_was(job: Job) -> None:
    write_rows(job.input, [row("a")])
    job.run()
    manifest = json.loads((job.folder / "out.jsonl.manifest.json").read_text())
    assert "error_file" not in manifest


@pytest.mark.parametrize("failure_is_first", [False, True])
def test_an_answer_counts_more_than_a_failure_in_whichever_file_they_stand(
    job: Job, errors: Path, failure_is_first: bool
) -> None:
    """Somebody has put lines together: the job keeps what tables show, and answers no row again."""
    job.run(error_file=errors)
    whole = lines_of(job.output), lines_of(errors)
    failed = json.loads(errors.read_bytes().splitlines()[0])
    failure, of_r0 = (json.dumps({**failed, "custom_id": name}).encode() for name in ("r2", "r0"))
    moved = next(line for line in job.output.read_bytes().splitlines() if b'"custom_id":"r0"' in line)
    others = [line for line in job.output.read_bytes().splitlines() if line != moved]
    made = [failure, of_r0, *others] if failure_is_first else [*others, failure, of_r0]
    job.output.write_bytes(b"".join(line + b"\n" for line in made))
    with open(errors, "ab") as file:
        file.write(failure + b"\n" + moved + b"\n")
    totals = PastJob(str(job.output)).totals(None)
    assert (totals.rows.num_answered, totals.rows.num_failed) == (20, 21)
    assert job.run(error_file=errors).num_resumed == 41
    assert len(job.engines) == 1, "no row is answered again"
    assert (lines_of(job.output), lines_of(errors)) == whole
