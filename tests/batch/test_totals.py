"""What the runs of a job add up to: rows as they stand in the output, the rest over all runs, whatever ended them."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from npu_runner.batch.files import answer_writer
from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.destination import Destination
from npu_runner.batch.files.manifest import StateFile, read_state
from npu_runner.batch.files.names import manifest_path, status_path
from npu_runner.batch.files.runs import Runs
from npu_runner.batch.job import live
from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.rows.counts import Counts
from npu_runner.batch.rows.openai_response import error_row
from npu_runner.cli.main import main
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError, JobError, RequestError
from npu_runner.reports.report import report_job
from npu_runner.reports.status import status_of
from npu_runner.reports.summary import PastJob, Totals
from tests.batch.job_folder import Job
from tests.batch.killed_runs import kill, killed_within, told_in
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.replicas.jobs import PYTHONPATH

pytestmark = pytest.mark.usefixtures("fixed_time")
MIXED = [row(f"r{n}", f"bad {n}" if n == 7 else f"engine error {n}" if n in (3, 4) else f"text {n}") for n in range(30)]


class Mended(ScriptedEngine):
    def _output(self, request_id: str, text: str, params: Any) -> Any:
        return super()._output(request_id, text.replace("error", "mended"), params)


def after_steps(steps: int, do: Callable[[], Any]) -> Callable[[RunnerConfig], ScriptedEngine]:
    def step(engine: ScriptedEngine) -> None:
        if engine.num_steps > steps:
            do()

    return lambda config: ScriptedEngine(config, on_step=step)


def dies() -> None:
    raise EngineDeadError("rank 1 died in decode")


def found_in(output: Path) -> dict[str, Any]:
    """Counted once more, by the rows themselves."""
    codes = Counter(item["error"]["code"] for item in read_rows(output) if item["error"])
    return {"answered": len(read_rows(output)) - codes.total(), "failed": codes.total(), "failures_by_code": codes}


def test_rows_are_those_of_the_output_and_the_rest_is_of_all_runs(job: Job) -> None:
    write_rows(job.input, MIXED)
    summary, runs = job.folder / "summary.json", []
    with pytest.raises(EngineDeadError):
        job.run(after_steps(9, dies), summary=summary)
    runs.append(told_in(summary)["this_run"])
    for engine, retry in ((ScriptedEngine, False), (Mended, True), (Mended, False)):
        job.run(engine, summary=summary, retry_errors=retry)
        told = told_in(summary)
        runs.append(told["this_run"])
        assert told["rows"].items() >= {**found_in(job.output), "total": 30, "unfinished": 0, "unrecorded": 0}.items()
        for name in ("prompt", "cached", "completion", "reasoning", "prefill_computed", "decode_computed"):
            assert told["tokens"][name] == sum(run["tokens"][name] for run in runs)
        assert told["seconds"]["serve"] == pytest.approx(sum(run["seconds"]["serve"] for run in runs), abs=0.01)
    # The refused row fails in the run that dies or in the one behind it, as its worker is early or late.
    failed = [run["rows"]["failed"] for run in runs]
    assert [failed[0] + failed[1], *failed[2:]] == [3, 1, 0], "failures that were mended are none of the job"
    assert told["rows"]["failures_by_code"] == {"scripted_bad": 1}, "also where nothing was left to do"
    assert [run["end"] for run in told["runs"]] == ["rank 1 died in decode", "finished", "finished"]
    assert {**PastJob(str(job.output)).totals(None).to_json(), "this_run": told["this_run"]} == told
    assert len({run["run"] for run in told["runs"]}) == 3


def test_a_summary_is_written_once_and_the_command_says_that_a_run_is_under_way(job: Job) -> None:
    write_rows(job.input, MIXED[:2])
    summary, seen = job.folder / "summary.json", []
    job.run(summary=summary)
    before = summary.read_bytes()
    write_rows(job.input, MIXED)

    def look(engine: ScriptedEngine | None = None) -> None:
        outside = PastJob(str(job.output)).totals(str(job.input))
        seen.append((outside.state, outside.num_rows, len(outside.runs), summary.read_bytes() == before))
        assert outside.rows.num_answered >= 2

    def loads(config: RunnerConfig) -> ScriptedEngine:
        look()
        return ScriptedEngine(config, on_step=look)

    job.run(loads, summary=summary)
    assert len(seen) > 1
    assert all(look == ("under way", 30, 2, True) for look in seen)
    assert told_in(summary)["state"] == PastJob(str(job.output)).totals(None).state == "finished"
    write_rows(job.input, [*MIXED, row("more")])
    assert PastJob(str(job.output)).totals(str(job.input)).state == "unfinished"


def test_a_killed_run_counts_up_to_its_last_status(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(job.input, MIXED)
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.0)
    killed_within(job, lambda: job.run(after_steps(20, kill)))
    (line,) = PastJob(str(job.output)).runs.last
    there = len(read_rows(job.output))
    assert line["end"] is None
    assert line["tally"]["num_answered"] <= there
    summary = job.folder / "summary.json"
    job.run(summary=summary)
    told = told_in(summary)
    assert told["runs"][0] == line
    assert [run["end"] for run in told["runs"]] == [None, "finished"]
    assert told["rows"]["answered"] == 27
    assert told["rows"]["unrecorded"] == 27 - sum(run["tally"]["num_answered"] for run in told["runs"]) >= 0


def test_killed_while_it_overwrites_no_run_of_the_old_output_counts_for_the_new_one(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed behind the output's end, and once the new state is there."""
    write_rows(job.input, MIXED[:2])
    for owner, moment, runs in ((StateFile, "clear", 0), (Destination, "open_writers", 1)):
        job.run()
        done = getattr(owner, moment)

        def vanishing(*arguments: Any, done: Callable[..., None] = done, **options: Any) -> None:
            done(*arguments, **options)
            kill()

        with monkeypatch.context() as patched:
            patched.setattr(owner, moment, vanishing)
            killed_within(job, lambda: job.run(overwrite=True))
        _, recorded = read_state(job.output)
        assert (len(recorded), recorded.sums("tally").get("num_answered", 0)) == (runs, 0)
        assert not job.output.exists() or not job.output.read_bytes()


def test_a_state_that_cannot_be_written_at_the_end_is_an_error_and_the_rows_stay(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(job.input, MIXED[:3])

    def failing(self: StateFile, **changes: Any) -> None:
        raise JobError("manifest: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(StateFile, "update", failing)
        with pytest.raises(JobError, match="No space left on device"):
            job.run()
    assert len(job.names()) == 3
    assert status_of(str(job.output)).to_json()["state"] == "ended early"
    job.run()
    totals = PastJob(str(job.output)).totals(None)
    assert (totals.num_unrecorded, [run["tally"]["num_answered"] for run in totals.runs.last]) == (0, [3])


def test_nothing_is_synced_by_the_thread_that_drives_an_engine_while_it_has_rows(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One replica works in the job's own thread; a disk may take long."""
    write_rows(job.input, MIXED)
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.0)
    engines: list[ScriptedEngine] = []
    seen: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def recording(descriptor: int) -> None:
        is_driver = threading.current_thread() is threading.main_thread()
        seen.append((is_driver, any(engine.has_unfinished_requests() for engine in engines)))
        time.sleep(0.05)
        fsync(descriptor)

    def make(config: RunnerConfig) -> ScriptedEngine:
        engines.append(ScriptedEngine(config, on_step=lambda engine: time.sleep(0.1)))
        return engines[-1]

    monkeypatch.setattr(os, "fsync", recording)
    monkeypatch.setattr(answer_writer.AnswerWriter.__init__, "__kwdefaults__",
                        {"path": None, "sync_rows": 2, "sync_seconds": 0.0})
    job.run(make)
    assert (True, True) not in seen
    assert {(True, False), (False, True)} <= {*seen}, "the state and the answers are synced"


def test_device_seconds_are_those_that_replicas_held(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((130.0, 140.0, 140.0, 150.0))
    record = JobSummary(started=100.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    for num_devices in (8, 4, 0, 4):
        record.add_device_time(num_devices)
    assert record.device_seconds == 30 * 8 + 10 * 4 + 10 * 4


def answer(name: str, *reasons: str) -> bytes:
    choices = [{"finish_reason": reason} for reason in reasons]
    response = {"status_code": 200, "body": {"choices": choices}}
    return json.dumps({"custom_id": name, "response": response, "error": None}).encode() + b"\n"


def failure(name: str | None, line: int, code: str) -> bytes:
    return error_row(RequestError(code=code, message="m"), custom_id=name, line=line)


def test_rows_of_both_files_count_once(tmp_path: Path) -> None:
    output, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    output.write_bytes(answer("a", "stop", "length") + answer("b", "stop") + failure("c", 3, "bad") + answer("d"))
    errors.write_bytes(failure("c", 3, "bad") + failure("b", 2, "was_mended") + failure(None, 9, "not_json"))
    expected = Counts(num_answered=3, num_not_whole=1, num_cut_off=1, failures_by_code={"bad": 1, "not_json": 1})
    with AnswerFile([output, errors]) as rows:
        assert rows.scan().counts() == expected
    told = Totals(output="o", num_rows=5, rows=expected, runs=Runs()).to_lines()[1]
    assert told == "rows      3 answered, 2 failed (1 bad, 1 not_json), cut off 1, whole 2, 0 not finished"


def test_runs_of_other_versions_add_up(job: Job) -> None:
    """One that counted less, and one that counted more."""
    fewer = {"run": "a", "started": 0, "npu_runner": "0", "platform": "npu", "devices": 8, "rows": 9, "end": None,
             "seconds": {"start": 1.0, "serve": 2.0, "device": 24.0}, "computed": {},
             "tally": {"num_answered": 2, "num_prompt_tokens": 5}}  # fmt: skip
    more = dict(JobSummary(num_rows=9, end="finished").to_run())
    more["seconds"] = {"start": 1.0, "serve": 0.5, "device": 1.0, "new": 1}
    more["tally"] = {**more["tally"], "num_answered": 3, "num_prompt_tokens": 6, "num_new": 7}
    totals = Totals(output="o", num_rows=9, rows=Counts(num_answered=5), runs=Runs((fewer, more)))
    told = totals.to_json()
    assert (told["tokens"]["prompt"], told["seconds"]["device"], told["rows"]["unfinished"]) == (11, 25.0, 4)
    assert "new" not in told["rows"]
    assert Totals(output="o", num_rows=9, rows=Counts(), runs=Runs((fewer,))).to_json()["tokens"]["cached"] == 0
    assert "device seconds" in "\n".join(totals.to_lines())


def test_the_commands_read_what_is_there_and_load_no_torch(job: Job) -> None:
    write_rows(job.input, MIXED[:8])
    job.run(error_file=job.folder / "errors.jsonl")
    before = {path: path.stat().st_mtime_ns for path in job.folder.iterdir()}
    script = """
import sys
from npu_runner.cli.main import main
assert main(["summary", "out.jsonl"]) == 0
assert main(["summary", "out.jsonl", "--input", "in.jsonl", "--json"]) == 0
assert main(["report", "out.jsonl", "-o", "page.html", "--input", "in.jsonl", "--allowed-media-dir", "."]) == 0
assert main(["report", "out.jsonl", "-o", "answers.html"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=job.folder, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": PYTHONPATH})
    assert done.returncode == 0, done.stderr
    text, _, told = done.stdout.partition("{")
    assert "5 answered, 3 failed (2 generation_failed, 1 scripted_bad), 0 not finished" in text
    assert json.loads("{" + told)["rows"]["failures_by_code"] == {"generation_failed": 2, "scripted_bad": 1}
    page, answers = ((job.folder / name).read_text() for name in ("page.html", "answers.html"))
    assert "engine error 3" in page
    assert "made without the input" not in page
    assert "engine error 3" not in answers
    assert answers.count("made without the input") == 1
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_page_made_afterwards_shows_no_image_that_the_job_would_have_refused(job: Job) -> None:
    data = io.BytesIO()
    Image.new("RGB", (8, 8)).save(data, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what"}]
    write_rows(job.input, [row("a", messages=[{"role": "user", "content": content}])])
    job.run()
    fields, num_shown = json.loads(manifest_path(job.output).read_text()), []
    for most_pixels in (64, 63):
        fields["settings"]["prompts.max_source_pixels"] = most_pixels
        manifest_path(job.output).write_text(json.dumps(fields))
        page = job.folder / "page.html"
        report_job(BatchOptions(input=str(job.input), output=str(job.output), report=page))
        num_shown.append(page.read_text().count("<img"))
    assert num_shown == [1, 0]


@pytest.mark.parametrize(("wrong", "match"), [
    ({"input": "other.jsonl"}, "it is not the input that .* was begun with"),
    ({"page": "out.jsonl.manifest.json"}, "is the manifest of the output"),
    ({"page": "in.jsonl"}, "is the input as well"),
    ({"output": "nowhere.jsonl"}, "there is no such file"),
    ({"output": "in.jsonl"}, "so it is no job's output"),
])
def test_what_is_no_job_is_named(job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                 wrong: dict[str, str], match: str) -> None:
    write_rows(job.input, [row("a")])
    job.run()
    write_rows(job.folder / "other.jsonl", [row("other")])
    monkeypatch.chdir(job.folder)
    given = {"output": "out.jsonl", "page": "page.html", "input": "in.jsonl", **wrong}
    before = {path.name for path in job.folder.iterdir()}
    assert main(["report", given["output"], "-o", given["page"], "-i", given["input"]]) == 2
    assert re.search(match, capsys.readouterr().err)
    assert {path.name for path in job.folder.iterdir()} == before


def test_an_output_whose_runs_are_not_known_is_read(job: Job) -> None:
    """As the first versions left it."""
    write_rows(job.input, MIXED[:3])
    job.run()
    fields = json.loads(manifest_path(job.output).read_text())
    manifest_path(job.output).write_text(json.dumps({**fields, "format": 2, "runs": []}))
    status_path(job.output).unlink()
    totals = PastJob(str(job.output)).totals(str(job.input))
    assert (totals.state, totals.num_unrecorded) == ("finished", 3)
    with pytest.raises(ConfigError, match="no such file"):
        PastJob(str(job.folder / "none.jsonl"))
