"""The job around the model: every row exactly once, whatever is interrupted, repeated, reordered or refused."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError, JobError, ModelError
from npu_runner.reports.run_summary import run_json, run_lines
from tests.batch.job_folder import LEFT, Job, numbered
from tests.batch.scripted import ScriptedEngine, ScriptedProcessor, read_rows, row, workers_of, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")


def dies_after(steps: int) -> Callable[[RunnerConfig], ScriptedEngine]:
    def step(engine: ScriptedEngine) -> None:
        if engine.num_steps > steps:
            raise EngineDeadError("rank 1 died in decode")

    return lambda config: ScriptedEngine(config, on_step=step)


def test_every_row_is_answered_with_a_chat_completion(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", f"question {n}", model="anything", n=2) for n in range(30)])
    summary = job.run(summary=job.folder / "summary.json")
    assert summary.exit_status == 0
    for item in read_rows(job.output):
        completion = ChatCompletion.model_validate(item["response"]["body"], strict=True)
        number = item["custom_id"][1:]
        assert [choice.message.content for choice in completion.choices] == [f"question {number}"[::-1]] * 2
        assert (completion.model, completion.created) == ("anything", 1_700_000_000)
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(30))
    assert job.files() == {*LEFT, "summary.json"}
    written = json.loads((job.folder / "summary.json").read_text())["this_run"]
    assert written == run_json(summary)
    assert written["start_phases"] == {"learning the script": 0.5}
    assert written["rows"] | {"failures_by_code": None} == {
        "total": 30, "resumed": 0, "answered": 30, "cut_off": 0, "repetition": 0, "unparsed": 0, "whole": 30,
        "copied": 0, "failed": 0, "failed_in_output": 0, "unfinished": 0, "failures_by_code": None,
    }  # fmt: skip


def test_bad_rows_fail_alone_and_the_exit_status_says_so(job: Job) -> None:
    lines: list[Any] = [
        row("a"),
        b"{",
        b"\xff",
        row("b", "bad"),
        {"custom_id": "c"},
        b"  ",
        row("d", max_tokens=0),
        row("e"),
    ]
    write_rows(job.input, lines)
    summary = job.run()
    results = {(item["custom_id"], (item["error"] or {}).get("line")): item for item in read_rows(job.output)}
    assert {name: item["error"] and item["error"]["code"] for name, item in results.items()} == {
        ("a", None): None,
        (None, 2): "not_json",
        (None, 3): "not_utf8",
        ("b", 4): "scripted_bad",
        ("c", 5): "missing_required_parameter",
        ("d", 7): "invalid_sampling_parameter",
        ("e", None): None,
    }
    assert (summary.exit_status, summary.tally.num_failed, summary.num_unfinished) == (3, 5, 0)
    again = job.run()
    assert (again.exit_status, again.num_resumed) == (3, 7), "rows without a name are found again by their line"
    assert len(read_rows(job.output)) == 7


@pytest.mark.parametrize("steps", [0, 7, *only_full("other moments; before any row and among them stay", 1, 40)])
def test_a_job_that_died_is_finished_by_the_same_command(job: Job, steps: int) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * (n % 17 + 1)) for n in range(50)])
    with pytest.raises(EngineDeadError):
        job.run(dies_after(steps))
    finished = job.names() if job.output.exists() else []
    summary = job.run()
    assert summary.num_resumed == len(finished)
    assert job.names()[: len(finished)] == finished
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(50))


def test_a_resumed_output_equals_an_undisturbed_one_byte_for_byte(job: Job, tmp_path_factory) -> None:
    rows = [row(f"r{n}", "x" * (n % 17 + 1), temperature=n % 2) for n in range(50)] + [row("bad", "bad")]
    other = Job(tmp_path_factory.mktemp("undisturbed"))
    for where in (job, other):
        write_rows(where.input, rows)
    other.run()
    for steps in (3, 5, 9):
        with pytest.raises(EngineDeadError):
            job.run(dies_after(steps))
    with open(job.output, "ab") as file:
        file.write(b'{"id":"torn')
    job.run()
    assert sorted(job.output.read_bytes().splitlines()) == sorted(other.output.read_bytes().splitlines())


def test_a_finished_job_loads_no_model(job: Job) -> None:
    write_rows(job.input, [row("a")])
    job.run()
    assert job.run().exit_status == 0
    assert len(job.engines) == 1


def test_a_finished_output_is_repaired_without_a_model(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "bad"), row("c")])
    job.run()
    whole = job.output.read_bytes()
    first, *others = whole.splitlines(keepends=True)
    for broken in (whole + b'{"id":"torn', whole + first, first + b"\n" + b"".join(others), first + first + whole):
        job.output.write_bytes(broken)
        assert job.run().exit_status == 3
        assert job.output.read_bytes() == whole
    assert len(job.engines) == 1


@pytest.mark.parametrize("content", [b"", b"\n \r\n\n", b"\xef\xbb\xbf"], ids=["empty", "blank lines", "a mark alone"])
def test_an_input_without_a_row_is_a_mistake(content: bytes, job: Job) -> None:
    job.input.write_bytes(content)
    refused(job, r"input .*in\.jsonl: it has no row; whatever")
    write_rows(job.input, [row("a")])
    job.run()
    job.input.write_bytes(content)
    for options in ({}, {"overwrite": True}, {"retry_errors": True}):
        refused(job, "it has no row", **options)


def test_failed_rows_are_tried_again_only_when_asked_for(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error"), row("c")])
    assert job.run().exit_status == 3
    assert job.run().exit_status == 3
    assert len(job.engines) == 1

    class Mended(ScriptedEngine):
        def _output(self, request_id: str, text: str, params: Any) -> Any:
            return super()._output(request_id, text.replace("error", "mended"), params)

    summary = job.run(Mended, retry_errors=True)
    assert (summary.exit_status, summary.num_resumed, summary.tally.num_answered) == (0, 2, 1)
    assert sorted(job.names()) == ["a", "b", "c"]


def refused(job: Job, match: str, **options: Any) -> None:
    before = {path.name: path.read_bytes() for path in job.folder.iterdir() if path.is_file()}
    engines = len(job.engines)
    with pytest.raises(ConfigError, match=match):
        job.run(**options)
    assert {path.name: path.read_bytes() for path in job.folder.iterdir() if path.is_file()} == before
    assert len(job.engines) == engines, "nothing is loaded for it"


def test_another_model_is_refused_and_the_file_named(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error")])
    job.run()
    (job.model / "config.json").write_text('{"changed": true}')
    refused(job, r"another model.*config\.json: was .* is .*--overwrite", retry_errors=True)
    assert job.run(overwrite=True).tally.num_answered == 1


def test_other_settings_are_refused_and_named(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error")])
    job.run()
    refused(job, r'other settings.*seed: was "0", is "1"', retry_errors=True, seed=1)


def test_a_schema_that_is_missing_or_another_is_noticed_before_anything_is_loaded(job: Job) -> None:
    write_rows(job.input, [row("a", "engine error")])
    schema = job.folder / "schema.json"
    schema.write_text('{"type": "integer"}')
    job.run(response_schema=schema)
    refused(job, r"answers.structured_outputs: was .*integer.*, is .*not there", retry_errors=True)
    schema.write_text('{"type": "string"}')
    refused(job, r"answers.structured_outputs: was .*integer.*, is .*string", retry_errors=True, response_schema=schema)


def without_runs(manifest: Path) -> dict[str, Any]:
    return {name: value for name, value in json.loads(manifest.read_bytes()).items() if name != "runs"}


def test_failed_rows_that_are_refused_again_load_no_model(job: Job) -> None:
    """More of them than are prepared at a time. A row among them that is served now brings the model, for all."""
    names = numbered(80)
    write_rows(job.input, [row("good"), *(row(name, "bad") for name in names), b"not json"])
    errors = job.folder / "errors.jsonl"
    assert job.run(error_file=errors).tally.num_failed == 81
    manifest = job.output.with_name("out.jsonl.manifest.json")
    before = job.output.read_bytes(), without_runs(manifest), sorted(errors.read_bytes().splitlines())
    write_summary = job.folder / "s.json"
    summary = job.run(error_file=errors, retry_errors=True, ordered=True, summary=write_summary)
    assert len(job.engines) == 1, "that of the first run"
    assert (summary.exit_status, summary.num_resumed, summary.tally.num_failed) == (3, 1, 81)
    assert summary.tally.failures_by_code == {"scripted_bad": 80, "not_json": 1}
    assert [line.split()[0] for line in run_lines(summary)] == ["rows"], "no rates of a model that was not there"
    after = job.output.read_bytes(), without_runs(manifest), sorted(errors.read_bytes().splitlines())
    assert after == before
    assert [item["custom_id"] for item in read_rows(errors)] == [*names, None], "in order, each once"
    summary = job.run(error_file=errors, retry_errors=True, processor=Lenient())
    assert (len(job.engines), summary.tally.num_answered, summary.tally.num_failed) == (2, 80, 1)
    assert without_runs(manifest) == before[1]
    assert sorted(job.names()) == sorted(["good", *names])
    assert len(read_rows(errors)) == 1


class Lenient(ScriptedProcessor):
    def __call__(self, messages: list[dict[str, Any]], *arguments: Any, **options: Any) -> Any:
        return super().__call__([{"content": str(messages[-1]["content"]).replace("bad", "good")}])


def test_a_changed_input_is_refused_and_a_grown_one_is_served(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b")])
    job.run()
    first = job.output.read_bytes()
    write_rows(job.input, [row("a"), row("b"), row("c")])
    assert job.run().num_resumed == 2
    assert job.output.read_bytes().startswith(first)
    assert sorted(job.names()) == ["a", "b", "c"]
    write_rows(job.input, [row("a", "changed"), row("b"), row("c")])
    refused(job, "not the input that .* was begun with")
    write_rows(job.input, [row("a"), row("b")])
    refused(job, "not the input that .* was begun with")


def test_a_corrected_row_is_served_under_a_setting_that_was_accepted(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "bad"), row("c")])
    job.run()
    before = [item for item in read_rows(job.output) if item["error"] is None]
    write_rows(job.input, [row("a"), row("b", "good"), row("c"), row("d")])
    refused(job, r"row 2 \(custom_id 'b'\), line 2, was changed; it has no answer, so with --retry-errors it may be")
    refused(job, r"other settings.*--accept-changed seed", retry_errors=True, seed=1)
    summary = job.run(retry_errors=True, seed=1, accept_changed=["seed"])
    assert (summary.exit_status, summary.num_resumed, summary.tally.num_answered) == (0, 2, 2)
    found = {item["custom_id"]: item["response"]["body"] for item in read_rows(job.output)}
    assert found["b"]["choices"][0]["message"]["content"] == "doog"
    assert read_rows(job.output)[:2] == before
    assert found["a"]["system_fingerprint"] == found["c"]["system_fingerprint"] != found["b"]["system_fingerprint"]
    afresh = job.folder / "afresh.jsonl"
    job.run(output=str(afresh), seed=1)
    assert {item["response"]["body"]["system_fingerprint"] for item in read_rows(afresh)} == {
        found["b"]["system_fingerprint"], found["d"]["system_fingerprint"]}


def test_a_strangers_file_is_not_touched_without_overwrite(job: Job) -> None:
    write_rows(job.input, [row("a")])
    job.output.write_bytes(b"a letter\n")
    refused(job, "no out.jsonl.manifest.json")
    job.run(overwrite=True)
    assert job.names() == ["a"]


def test_overwriting_waits_until_the_model_stands_ready(job: Job) -> None:
    write_rows(job.input, [row("a")])
    job.run()
    before = job.output.read_bytes()

    def broken(config: RunnerConfig) -> ScriptedEngine:
        raise ModelError("model.safetensors: a tensor is missing")

    with pytest.raises(ModelError):
        job.run(broken, overwrite=True)
    assert job.output.read_bytes() == before
    assert job.run().num_resumed == 1


def test_rows_are_prepared_while_the_model_loads(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", f"text {n}") for n in range(100)])
    begun = job.folder / "begun.txt"

    def loads_slowly(config: RunnerConfig) -> ScriptedEngine:
        while not begun.exists() or len(begun.read_bytes().splitlines()) < 64:
            time.sleep(0.01)  # for ever, if nothing is prepared before the engine stands
        assert not job.output.exists()
        return ScriptedEngine(config)

    assert job.run(loads_slowly, processor=ScriptedProcessor(str(begun))).tally.num_answered == 100


def test_a_model_that_cannot_be_loaded_ends_the_workers(job: Job) -> None:
    write_rows(job.input, [row("a", "hang"), row("b")])

    def broken(config: RunnerConfig) -> ScriptedEngine:
        while not workers_of(os.getpid()):
            time.sleep(0.01)
        raise ModelError("model.safetensors: a tensor is missing")

    with pytest.raises(ModelError):
        job.run(broken)
    assert workers_of(os.getpid()) == []
    assert job.files() == set()


class BrokenProcessor(ScriptedProcessor):
    """No worker can read it back: each dies before its first row."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_workers_that_cannot_start_close_the_model_and_change_nothing(job: Job) -> None:
    write_rows(job.input, [row("a")])
    job.run()
    before = job.output.read_bytes()
    closed = []

    class Loads(ScriptedEngine):
        def __enter__(self) -> ScriptedEngine:
            while not any(thread.name == "preprocessing-pool" for thread in threading.enumerate()):
                time.sleep(0.01)
            for thread in threading.enumerate():
                if thread.name == "preprocessing-pool":
                    thread.join()
            return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            closed.append(self)

    with pytest.raises(JobError, match="die before their first row"):
        job.run(Loads, processor=BrokenProcessor(), overwrite=True)
    assert len(closed) == 1
    assert job.output.read_bytes() == before
    assert json.loads((job.folder / "out.jsonl.manifest.json").read_text())["input"]["num_bytes"] > 0


def test_duplicates_are_refused_before_any_work(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b"), row("a")])
    refused(job, r"'a' \(lines 1 and 3\)")
    assert job.engines == []


def test_paths_that_cannot_work_are_refused_before_any_work(job: Job) -> None:
    write_rows(job.input, [row("a")])
    missing = job.folder / "missing" / "x"
    refused(job, "does not exist", output=str(missing))
    refused(job, "is a folder", output=str(job.folder))
    refused(job, "no existing folder", report=missing)
    refused(job, "no existing folder", summary=missing)
    refused(job, "is the input as well", output=str(job.input))
    refused(job, "is the output as well", report=job.output)
    refused(job, "is the input as well", summary=job.input)
    refused(job, "cannot be read again", output="/dev/null", report=job.folder / "r.html")
    refused(job, "Operation not permitted|Permission denied|No such file", output="/proc/out.jsonl")
    refused(job, "No such file or directory", input=str(missing))
    refused(job, "is not a folder", allowed_media_dir=missing)


def test_a_link_stays_a_link_and_both_names_are_one_output(job: Job) -> None:
    write_rows(job.input, [row("a"), row("b", "engine error")])
    (job.folder / "elsewhere").mkdir()
    real, link = job.folder / "elsewhere" / "answers.jsonl", job.output
    link.symlink_to(real)
    job.run()
    assert link.is_symlink()
    assert job.run(output=str(real)).num_resumed == 2
    job.run(retry_errors=True)
    assert link.is_symlink()
    assert {path.name for path in real.parent.iterdir()} == {name.replace("out", "answers") for name in LEFT}


def test_rows_without_a_seed_draw_the_same_whatever_ran_before(job: Job) -> None:
    write_rows(job.input, [row("a", temperature=1), row("b", temperature=1), row("c", temperature=1, seed=5)])
    job.run()
    texts = {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in read_rows(job.output)
    }
    assert texts["c"] == "olleh 5"
    assert texts["a"] != texts["b"]
    job.output.write_bytes(job.output.read_bytes().splitlines(keepends=True)[0])
    job.run()
    again = {
        item["custom_id"]: item["response"]["body"]["choices"][0]["message"]["content"]
        for item in read_rows(job.output)
    }
    assert again == texts


def test_a_full_device_ends_the_job(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}") for n in range(3)])
    with pytest.raises(JobError, match="No space left on device"):
        job.run(output="/dev/full")


def test_expected_answers_are_counted(job: Job) -> None:
    rows = [("a", "olleh"), ("b", " OLLEH. "), ("c", "other"), ("d", None)]
    write_rows(job.input, [row(name, metadata={"expected": expected}) for name, expected in rows])
    answers = run_json(job.run())["expected_answers"]
    assert answers == {"rows": 3, "as_expected": 2, "accuracy": 0.6667}
