"""The record of runs: cut or killed at any moment, each run counts up to its last whole line, and none counts twice."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_runner.batch.files import run_record
from npu_runner.batch.files.answer_file import RowCounts
from npu_runner.batch.files.names import new_version_path, runs_path
from npu_runner.batch.files.run_record import RunRecord, read_runs
from npu_runner.batch.job.summary import JobRecord, Tally
from npu_runner.batch.job.totals import Totals, line_of
from npu_runner.errors import ConfigError, JobError
from tests.full_set import every

KILLED = 9
STEPS = ("open", "write", "fsync", "replace", "unlink", "close")
"""What a process may be killed before, beside each line that it writes."""


def line(run: str, count: int) -> dict[str, Any]:
    record = JobRecord(run_id=run, num_rows=9, platform="cpu", tally=Tally(num_answered=count))
    record.tally.failures_by_code["media_missing"] += 1
    return dict(line_of(record, None))


def counts(output: Path) -> dict[str, int]:
    return {found["run"]: found["tally"]["num_answered"] for found in read_runs(output)}


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Of two runs, the second killed."""
    output = tmp_path / "out.jsonl"
    record = RunRecord(output)
    record.begin()
    record.append(line("a", 1))
    record.append(line("a", 5), is_last=True)
    record = RunRecord(output)
    record.begin()
    for count in (0, 3, 4):
        record.append(line("b", count))
    return output


def test_the_last_line_of_each_run_counts_in_the_order_in_which_they_began(output: Path) -> None:
    assert list(counts(output).items()) == [("a", 5), ("b", 4)]
    RunRecord(output).append(line("a", 7))
    assert list(counts(output).items()) == [("a", 7), ("b", 4)]


def test_cut_anywhere_each_run_counts_up_to_its_last_whole_line_and_the_next_one_is_whole(output: Path) -> None:
    whole = runs_path(output).read_bytes()
    ends = [at for at, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in sorted({0, 1, *range(0, len(whole), 97), *(end + by for end in ends for by in (-2, -1, 0, 1))}):
        runs_path(output).write_bytes(whole[:cut])
        lines = [json.loads(found) for found in whole[: whole.rfind(b"\n", 0, cut) + 1].splitlines()]
        expected = {found["run"]: found["tally"]["num_answered"] for found in lines}
        assert counts(output) == expected
        record = RunRecord(output)
        record.begin()
        record.append(line("c", 2))
        assert counts(output) == {**expected, "c": 2}
        assert len(runs_path(output).read_bytes().splitlines()) == len(expected) + 1, "a line for each run"


def killed_before(step: int, do: Callable[[], None]) -> bool:
    """In a child that is gone before its `step`th call into the system; False: there are not so many."""
    child = os.fork()
    if child == 0:
        num_calls = 0

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def made(*arguments: Any, **options: Any) -> Any:
                nonlocal num_calls
                num_calls += 1
                if num_calls > step:
                    os._exit(KILLED)
                return call(*arguments, **options)

            return made

        try:
            for name in STEPS:
                setattr(os, name, counted(getattr(os, name)))
            run_record._encoded = counted(run_record._encoded)
            do()
            os._exit(0)
        finally:
            os._exit(1)  # an error is the parent's to see
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, KILLED)
    return status == KILLED


def next_run(output: Path) -> None:
    record = RunRecord(output)
    record.begin()
    record.append(line("c", 1))
    record.append(line("c", 2), is_last=True)


def test_killed_before_any_step_of_a_run_no_earlier_run_is_lost(output: Path) -> None:
    """The line torn by a full disk's half, the next version, its place, the last line."""
    before = runs_path(output).read_bytes() + b'{"run": "b", "ta'
    found = []
    for step in range(0, 100, every(2)):
        runs_path(output).write_bytes(before)
        new_version_path(runs_path(output)).unlink(missing_ok=True)
        if not killed_before(step, lambda: next_run(output)):
            break
        found.append(counts(output).pop("c", 0))
        assert {**counts(output), "c": 0} == {"a": 5, "b": 4, "c": 0}
        next_run(output)
        assert counts(output) == {"a": 5, "b": 4, "c": 2}
        assert not new_version_path(runs_path(output)).exists(), "what a killed run left is gone"
    assert found == sorted(found)
    assert set(found) == {0, 1, 2}, "killed before, between and behind its lines"


def test_what_a_full_disk_takes_of_a_line_does_not_stay(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write

    def full(descriptor: int, data: bytes) -> int:
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        return write(descriptor, data[:10])

    record = RunRecord(output)
    record.begin()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(JobError, match=r"record of runs .*: No space left on device"):
        record.append(line("c", 1))
    monkeypatch.setattr(os, "write", write)
    record.append(line("c", 2))
    assert counts(output) == {"a": 5, "b": 4, "c": 2}
    assert runs_path(output).read_bytes().count(b"\n") == 3


def test_what_a_power_cut_leaves_is_left_out(output: Path) -> None:
    with open(runs_path(output), "ab") as file:
        file.write(b"\0" * 600 + b"\n[1]\n7\n" + json.dumps(line("c", 1)).encode() + b"\n" + b"\0" * 40)
    assert counts(output) == {"a": 5, "b": 4, "c": 1}


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**400, 1 << 62]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4) | st.just("num_answered"), inner,
                                                               max_size=2),
    max_leaves=4,
)
FIELDS = [(name, inner) for name, value in line("x", 0).items()
          for inner in [None, *(value if isinstance(value, dict) else ())]]


@given(st.lists(st.tuples(st.sampled_from([*FIELDS, ("new", None), ("tally", "new"), ("seconds", "new")]),
                          st.just(...) | ANY_JSON), min_size=1, max_size=3))
@example([(("tally", None), ...)])
@example([(("run", None), ["a"])])
@example([(("seconds", "start"), ...)])
@example([(("tally", "num_prompt_tokens"), {"a": 1})])
@example([(("tally", "num_answered"), True)])
@example([(("tally", "failures_by_code"), 3)])
@example([(("started", None), 10**18)])
@example([(("seconds", "device"), float("inf"))])
@example([(("end", None), "\ud800")])
def test_an_edited_line_is_left_out_or_adds_up(changes: list[tuple[tuple[str, str | None], Any]]) -> None:
    """A change is of a field, or of one within it; `...` removes it."""
    edited: Any = line("b", 4)
    for (name, inner), value in changes:
        at, key = (edited, name) if inner is None else (edited.get(name), inner)
        if value is ... and isinstance(at, dict):
            at.pop(key, None)
        elif value is not ... and isinstance(at, dict):
            at[key] = value
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "out.jsonl")
        whole = line("a", 5)
        runs_path(output).write_text("".join(json.dumps(run) + "\n" for run in (whole, edited, whole)))
        runs = read_runs(output)
        totals = Totals(output="o", num_rows=9, rows=RowCounts(), runs=runs)
        assert whole in runs
        assert [run for run in runs if run != whole] in ([], [edited])
        json.dumps(totals.to_json(), allow_nan=False)
        "\n".join([*totals.to_lines(), totals.to_line()]).encode()
        next_run(output)
        assert read_runs(output)[:-1] == runs
        runs_path(output).write_text(json.dumps(edited) + "\n")
        if edited not in runs:
            with pytest.raises(ConfigError, match="no line of it can be read"):
                read_runs(output)


def test_what_is_no_record_is_named_and_stays(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    runs_path(output).write_text("somebody's notes\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.runs\.jsonl: no line of it can be read.*; move it away"):
        RunRecord(output)
    assert runs_path(output).read_text() == "somebody's notes\n"


def test_an_overwritten_output_has_no_earlier_runs(output: Path) -> None:
    record = RunRecord(output, overwrite=True)
    assert counts(output) == {"a": 5, "b": 4}, "nothing is changed before the model is ready"
    record.clear()
    record.begin()
    record.append(line("c", 1))
    assert counts(output) == {"c": 1}


def test_a_stream_has_no_record() -> None:
    record = RunRecord(None)
    record.clear()
    record.begin()
    record.append(line("a", 1), is_last=True)
    assert record.earlier == []
