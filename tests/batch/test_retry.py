"""--retry: which rows are tried again, once, whatever is killed meanwhile, and what becomes of their old answers."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.files.names import lock_path, manifest_path, replaced_path
from npu_runner.batch.files.output_lock import job_at_work
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, EngineDeadError, TooManyFailuresError
from npu_runner.tables.merge_outputs import merge
from npu_runner.tables.options import MergeOptions
from tests.batch.cut_off_rows import ROWS, Cutting
from tests.batch.job_folder import LEFT, Job
from tests.batch.killed_runs import killed_before
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.full_set import every, only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
KINDS = {
    "errors": {"the engine's fault"},
    "cut_off": {name for name, (_, _, is_cut, *_) in ROWS.items() if is_cut},
    "repetition": {name for name, (_, body, *_) in ROWS.items() if "repetition_detection" in body},
    "unparsed": {name for name, (_, _, _, is_unparsed, _) in ROWS.items() if is_unparsed},
}


def rows_of_kinds() -> list[Any]:
    return [row(name, text[::-1] if text != "rorre enigne" else "engine error", **{"max_tokens": 50, **body})
            for name, (text, body, *_) in ROWS.items()]


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.exists() else []


def names(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in lines(path)]


class Recorded(Cutting):
    """Keeps the names of the rows that it was asked, in `asked`, over all runs."""

    asked: Counter[str]

    def add_request(self, request_id: str, prompt: Any, params: Any) -> list[int]:
        self.asked[request_id] += 1
        return super().add_request(request_id, prompt, params)


def recorded(asked: Counter[str], **options: Any) -> Any:
    def make(config: RunnerConfig) -> Recorded:
        engine = Recorded(config, **options)
        engine.asked = asked
        return engine

    return make


@pytest.mark.parametrize("has_error_file", [False, *only_full("with an error file; one file stays", True)])
@pytest.mark.parametrize("kinds", ["errors", "cut_off", "repetition,unparsed", *only_full(
    "other kinds; each is in one of those that stay", "repetition", "unparsed", "errors,cut_off",
    "errors,cut_off,repetition,unparsed")])
def test_rows_of_these_kinds_are_tried_again_and_no_others(job: Job, kinds: str, has_error_file: bool) -> None:
    write_rows(job.input, rows_of_kinds())
    options = {"error_file": job.folder / "errors.jsonl"} if has_error_file else {}
    job.run(Cutting, **options)
    before = {json.loads(line)["custom_id"]: line for line in lines(job.output)}
    asked: Counter[str] = Counter()
    job.run(recorded(asked), retry=kinds, **options)
    expected = set().union(*(KINDS[kind] for kind in kinds.split(",")))
    assert asked == dict.fromkeys(expected, 1)
    now = names(job.output) + names(job.folder / "errors.jsonl")
    assert sorted(now) == sorted(ROWS)
    new = [name for name in names(job.output) if name in expected]
    assert names(job.output)[len(names(job.output)) - len(new) :] == new, "new lines are appended"
    assert sorted(lines(replaced_path(job.output))) == sorted(before[name] for name in expected - KINDS["errors"])
    assert "retry" not in json.loads(manifest_path(job.output).read_text()), "it is over"
    left = LEFT | ({"errors.jsonl"} if has_error_file else set())
    assert job.files() - {replaced_path(job.output).name} == left
    job.run(Cutting, ordered=True, **options)
    assert names(job.output) == [name for name in ROWS if name in names(job.output)]


def test_answers_of_an_earlier_version_are_unparsed_by_what_was_asked(job: Job) -> None:
    """Their lines do not say it themselves."""
    write_rows(job.input, rows_of_kinds())
    job.run(Cutting)
    job.output.write_bytes(job.output.read_bytes().replace(b',"unparsed":true', b""))
    asked: Counter[str] = Counter()
    job.run(recorded(asked), retry="unparsed")
    assert asked == dict.fromkeys(KINDS["unparsed"], 1)


def test_rows_that_are_tried_again_may_have_changed_and_others_may_not(job: Job) -> None:
    """A row is cut off; the same row with more tokens is answered whole."""
    write_rows(job.input, [row("a", "abcdefgh", max_tokens=3), row("b", "fine")])
    job.run(Cutting)
    old = lines(job.output)
    corrected = [row("a", "abcdefgh", max_tokens=30), row("b", "fine")]
    write_rows(job.input, corrected)
    with pytest.raises(ConfigError, match=r"row 1 \(custom_id 'a'\), line 1, was changed, and its answer is not whole; "
                                          r"with --retry cut_off it may be"):
        job.run(Cutting, retry_errors=True)
    write_rows(job.input, [corrected[0], row("b", "other")])
    with pytest.raises(ConfigError, match=r"row 2 \(custom_id 'b'\), line 2, was changed and has an answer"):
        job.run(Cutting, retry="cut_off")
    assert lines(job.output) == old
    write_rows(job.input, corrected)
    assert job.run(Cutting, retry="cut_off").tally.num_whole == 1
    assert {item["custom_id"]: item["response"]["body"]["choices"][0]["finish_reason"] for item in read_rows(job.output)
            } == {"a": "stop", "b": "stop"}
    assert lines(replaced_path(job.output)) == [line for line in old if json.loads(line)["custom_id"] == "a"]


def test_where_the_second_try_fails_the_old_answer_is_not_lost(job: Job) -> None:
    write_rows(job.input, [row("a", "abcdefgh", max_tokens=3)])
    job.run(Cutting)
    (old,) = lines(job.output)
    write_rows(job.input, [row("a", "bad")])
    assert job.run(Cutting, retry="cut_off").tally.num_failed == 1
    assert lines(replaced_path(job.output)) == [old]
    merged = MergeOptions(output=str(job.folder / "all.jsonl"))
    merge(str(job.output), str(replaced_path(job.output)), merged)
    assert lines(job.folder / "all.jsonl") == [old], "the documented way back"
    write_rows(job.input, [row("a", "abcdefgh", max_tokens=3)])
    for _ in range(2):
        job.run(Cutting, retry="errors,cut_off")
    assert lines(replaced_path(job.output)) == [old], "each line is there once"


def test_nothing_leaves_before_the_model_is_ready(job: Job) -> None:
    write_rows(job.input, [row("a", "abcdefgh", max_tokens=3)])
    job.run(Cutting)
    before = {name: (job.folder / name).read_bytes() for name in ("out.jsonl", "out.jsonl.manifest.json")}

    def dies(config: RunnerConfig) -> ScriptedEngine:
        raise EngineDeadError("rank 1 died in load")

    with pytest.raises(EngineDeadError):
        job.run(dies, retry="cut_off")
    assert {name: (job.folder / name).read_bytes() for name in before} == before
    assert not replaced_path(job.output).exists()


def test_overwriting_removes_what_was_replaced(job: Job) -> None:
    write_rows(job.input, [row("a", "abcdefgh", max_tokens=3)])
    job.run(Cutting)
    job.run(Cutting, retry="cut_off")
    assert replaced_path(job.output).exists()
    job.run(Cutting, overwrite=True, retry="cut_off")
    assert not replaced_path(job.output).exists()
    assert job.files() == LEFT


@pytest.mark.parametrize("kinds", ["cutoff", "errors,", "ERRORS", "whole"])
def test_an_unknown_kind_is_refused(job: Job, kinds: str) -> None:
    write_rows(job.input, [row("a")])
    with pytest.raises(ConfigError, match=r"retry: .* is none of errors, cut_off, repetition, unparsed"):
        job.run(retry=kinds)


# -- decided once ------------------------------------------------------------------------------------------------------

MANY = [row(f"r{n:02d}", f"text {n:02d}", max_tokens=3) for n in range(12)]


def dying_after(steps: int, asked: Counter[str]) -> Any:
    def step(engine: ScriptedEngine) -> None:
        if engine.num_steps > steps:
            raise EngineDeadError("rank 1 died in decode")

    return recorded(asked, on_step=step, latency=lambda text: int(text[-2:]) % 5 + 1, max_running=3)


@pytest.fixture
def many(job: Job) -> Job:
    write_rows(job.input, MANY)
    job.run(Cutting)
    return job


def test_a_retry_that_died_repeats_only_rows_without_a_new_line(many: Job) -> None:
    """All are cut off again. A job that decided anew would ask them again after each death."""
    asked: Counter[str] = Counter()
    with pytest.raises(EngineDeadError):
        many.run(dying_after(7, asked), retry="cut_off")
    there = names(many.output)
    assert 0 < len(there) < len(MANY)
    for kinds in ("cut_off", "errors,cut_off"):
        again: Counter[str] = Counter()
        with pytest.raises(EngineDeadError):
            many.run(dying_after(1, again), retry=kinds)
        assert not again.keys() & set(there)
        there = names(many.output)
    manifest = Manifest.load(many.output)
    assert manifest is not None
    assert manifest.retry.names == ["errors", "cut_off"]
    again = Counter()
    many.run(recorded(again), retry="cut_off")
    assert again == dict.fromkeys({item["custom_id"] for item in MANY} - set(there), 1)
    assert sorted(names(many.output)) == [item["custom_id"] for item in MANY]
    assert sorted(names(replaced_path(many.output))) == sorted(names(many.output))
    again = Counter()
    many.run(recorded(again), retry="cut_off")
    assert len(again) == len(MANY), "the next retry decides anew"


def test_a_run_without_the_option_finishes_the_retry(many: Job) -> None:
    with pytest.raises(EngineDeadError):
        many.run(dying_after(7, Counter()), retry="cut_off")
    again: Counter[str] = Counter()
    there = set(names(many.output))
    many.run(recorded(again))
    assert again.keys() == {item["custom_id"] for item in MANY} - there
    manifest = Manifest.load(many.output)
    assert manifest is not None
    assert not manifest.retry


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_input_that_has_grown_is_the_same_and_one_that_was_changed_decides_anew(many: Job, is_changed: bool) -> None:
    with pytest.raises(EngineDeadError):
        many.run(dying_after(7, Counter()), retry="cut_off")
    there = set(names(many.output))
    rows = [{**item, "body": {**item["body"], "max_tokens": 50}} if is_changed else item for item in MANY]
    write_rows(many.input, [*rows, row("more", "more", max_tokens=3)])
    again: Counter[str] = Counter()
    many.run(recorded(again), retry="cut_off")
    assert len(again) == len(MANY) + 1 - (0 if is_changed else len(there))
    assert sorted(names(many.output)) == sorted(item["custom_id"] for item in [*MANY, row("more")])


def test_a_retry_that_was_ended_by_its_failures_tries_them_again(job: Job) -> None:
    """Else the limit would end the same command before its first row, whatever was mended beside the input."""
    # The long answers give the writer a thousand steps to put the failures into the file, where they are counted.
    write_rows(job.input, [row(f"r{n:03d}", "bad" if n < 100 else "x" * 60) for n in range(300)])
    for num_loads, options in enumerate(({}, {"retry": "errors"}, {"retry": "errors"}), 1):
        with pytest.raises(TooManyFailuresError):
            job.run(max_failures="5", **options)
        assert len(job.engines) == num_loads
        assert len(names(job.output)) < 300


# -- a kill at every step ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_apart", [False, *only_full("failed rows in a file of their own", True)])
def test_killed_before_any_step_of_a_retry_every_row_is_there_once_and_every_old_answer(
    is_apart: bool, tmp_path: Path
) -> None:
    """The same command ends with each row once. In between no row has two lines, and no answer is nowhere."""
    found = Counter[bool]()
    for step in range(0, 1000, every(25)):
        job = Job(tmp_path / str(step))
        options: dict[str, Any] = {"error_file": job.folder / "errors.jsonl"} if is_apart else {}
        write_rows(job.input, [row("a", "abcdefgh", max_tokens=3), row("b", "fine"), row("c", "bad"),
                               row("d", "ijklmnop", max_tokens=3)])
        job.run(Cutting, **options)
        old = set(lines(job.output))
        paid = {line for line in old if b'"length"' in line}
        assert len(paid) == 2
        write_rows(job.input, [row("a", "abcdefgh", max_tokens=5), row("b", "fine"), row("c", "good"),
                               row("d", "ijklmnop", max_tokens=30)])
        retry = {**options, "retry": "errors,cut_off"}
        was_killed = killed_before(step, lambda job=job, retry=retry: job.run(Cutting, **retry))
        found[was_killed] += 1
        while job_at_work(job.output) is not None:
            time.sleep(0.01)
        now = [line for path in (job.output, job.folder / "errors.jsonl") for line in whole_lines(path)]
        assert max(Counter(json.loads(line)["custom_id"] for line in now).values()) == 1
        assert paid <= {*now, *whole_lines(replaced_path(job.output))}
        there = [line for line in now if line not in old and json.loads(line)["error"] is None]
        if was_killed and is_over(job):
            paid |= {line for line in there if b'"length"' in line}  # the same command is the next retry
        if was_killed:
            job.run(Cutting, **retry)
            assert set(there) <= set(lines(job.output)), "a new line that was there is not made again"
        assert sorted(names(job.output)) == ["a", "b", "c", "d"]
        assert sorted(lines(replaced_path(job.output))) == sorted(paid)
        assert job.files() - {"errors.jsonl", lock_path(job.output).name} == {*LEFT, "out.jsonl.replaced.jsonl"}
        manifest = Manifest.load(job.output)
        assert manifest is not None
        assert not manifest.retry
        if not was_killed:
            break
    assert found[False] == 1, "all steps were gone through"
    assert found[True] * every(25) > 50


def is_over(job: Job) -> bool:
    """The retry has ended, and its process was killed after that: the manifest has its settings and no mark of it."""
    manifest = Manifest.load(job.output)
    assert manifest is not None
    return not manifest.retry and b"good" in job.input.read_bytes() and "ijklmnop"[::-1] in job.output.read_text()


def whole_lines(path: Path) -> list[bytes]:
    data = path.read_bytes() if path.exists() else b""
    return data[: data.rfind(b"\n") + 1].splitlines()
