"""The state and the status of an output: killed before any step of any run, each run counts once, with what was seen of
it from outside."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from npu_runner.batch.files import runs
from npu_runner.batch.files.input_identity import InputIdentity
from npu_runner.batch.files.manifest import Manifest, StateFile, Suspicion, read_state
from npu_runner.batch.files.names import (
    manifest_path,
    new_version_path,
    rows_path,
    runs_path,
    status_path,
    suspects_path,
)
from npu_runner.batch.files.runs import Run, Runs
from npu_runner.batch.job import live
from npu_runner.batch.job.history import JobHistory, JobSummary
from npu_runner.batch.job.live import Live
from npu_runner.batch.rows.counts import Counts
from npu_runner.cli.main import main
from npu_runner.errors import ConfigError
from npu_runner.reports.summary import PastJob, Totals
from tests.batch.killed_runs import STEPS, killed_before
from tests.full_set import every, only_full

MANIFEST = Manifest(created=1, model_name="m", model_files={}, settings={"seed": "0"},
                    input=InputIdentity(num_bytes=9, blake2b="b", rows=bytes(48)))
SUSPECTS = {"r1": Suspicion(num_deaths=1)}


def run_of(name: str, num_answered: int, **changes: Any) -> dict[str, Any]:
    summary = JobSummary(run_id=name, num_rows=3, platform="cpu", tally=Counts(num_answered=num_answered), **changes)
    summary.tally.failures_by_code["media_missing"] = 1
    return dict(summary.to_run())


def one_run(output: Path, name: str, error: Exception | None = None) -> None:
    """As `npu_runner.batch.job.run` does it; an `error` ends it before its first row."""
    summary = JobSummary(run_id=name, num_rows=3)
    history, state = JobHistory(summary, print), StateFile(output)
    status = Live(summary, history, print)
    history.read(state, output, overwrite=False)
    try:
        with status.writing(output, {}), history.ending():
            history.start()
            status.enter("loading")
            if error is not None:
                raise error
            manifest = state.manifest or MANIFEST
            state.save(replace(manifest, runs=history.runs))
            summary.serve_began = summary.started
            for num_answered in (1, 2, 3):
                summary.tally.num_answered = num_answered
                status.beat()
                if num_answered == 2:
                    state.update(suspects={**manifest.suspects, "r2": Suspicion()})
            history.is_complete = True
    except ConfigError:
        pass


def told(output: Path) -> dict[str, tuple[int, str | None]]:
    """What is told of each run from outside: its answers and its end."""
    found = Runs()
    with contextlib.suppress(ConfigError):  # there is no such file
        found = PastJob(str(output)).runs
    return {run["run"]: (run["tally"]["num_answered"], run["end"]) for run in found.last}


def nothing(output: Path) -> None: ...


def one_that_ended(output: Path) -> None:
    one_run(output, "earlier")


def of_format_3(output: Path) -> None:
    """With a record of two runs, the second torn, and a row under suspicion."""
    MANIFEST.save(output)
    fields = json.loads(manifest_path(output).read_text())
    del fields["runs"]
    manifest_path(output).write_text(json.dumps({**fields, "format": 3}))
    lines = [run_of("a", 1), run_of("a", 5, end="finished"), run_of("b", 0), run_of("b", 4)]
    runs_path(output).write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"run": "b", "ta')
    suspects_path(output).write_text(json.dumps({"format": 1, "rows": {"r1": asdict(SUSPECTS["r1"])}}))


@pytest.fixture(autouse=True)
def without_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "BEAT_SECONDS", 0.0)


@pytest.mark.parametrize(("begin", "error"), [
    (one_that_ended, None), (of_format_3, None),
    *only_full("runs that go on behind another, and behind files of the format before, stay",
               (nothing, None), (nothing, ConfigError("refused")), (one_that_ended, ConfigError("refused")),
               (of_format_3, ConfigError("refused")))])
def test_killed_before_any_step_each_run_counts_once(tmp_path: Path, begin: Callable[[Path], None],
                                                     error: Exception | None) -> None:
    seen: list[int | None] = []
    (tmp_path / "begun").mkdir()
    begin(tmp_path / "begun" / "out.jsonl")
    for step in range(0, 400, every(6)):
        output = shutil.copytree(tmp_path / "begun", tmp_path / str(step)) / "out.jsonl"
        earlier = told(output)
        was_killed = killed_before(step, partial(one_run, output, "new", error))
        now = told(output)
        assert {**now, **earlier} == now, "what earlier runs did stays"
        assert list(now) in ([*earlier], [*earlier, "new"])
        seen.append(now["new"][0] if "new" in now else None)
        loaded = StateFile(output)
        loaded.load()
        if begin is of_format_3 and loaded.manifest is not None and now.get("new", (0, None))[1] != "finished":
            assert loaded.manifest.suspects.keys() >= SUSPECTS.keys()
        one_run(output, "next")
        assert told(output) == {**now, "next": (3, "finished")}
        _, recorded = read_state(output)
        assert recorded.sums("tally")["num_answered"] == sum(answers for answers, _ in told(output).values())
        assert {path for path in output.parent.iterdir()} == {
            manifest_path(output), rows_path(output), status_path(output)}
        if not was_killed:
            break
    assert len(seen) * every(6) > len(STEPS)
    counted = [count for count in seen if count is not None]
    if error is None:
        assert counted == sorted(counted)
        assert counted[0] == 0
        assert counted[-1] == 3
        assert set(counted) == {0, 1, 2, 3} or every(6) > 1
    else:
        assert seen[0] is seen[-1] is None, "a refused run is gone"
        assert set(counted) <= {0}


def test_a_torn_status_costs_the_last_figures_and_no_run(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    one_run(output, "earlier")
    for step in range(200):
        assert killed_before(step, lambda: one_run(output, "new")), "it would have ended"
        if told(output).get("new", (0, None))[0] == 2:
            break
    data, state = status_path(output).read_bytes(), manifest_path(output).read_bytes()
    for keep in (0, len(data) // 3, len(data) - 2):
        manifest_path(output).write_bytes(state)
        status_path(output).write_bytes(data[:keep])
        assert told(output) == {"earlier": (3, "finished"), "new": (0, None)}
        one_run(output, "next")
        assert told(output) == {"earlier": (3, "finished"), "new": (0, None), "next": (3, "finished")}


def test_a_status_of_another_output_is_none_of_its_runs(tmp_path: Path) -> None:
    output, other = tmp_path / "out.jsonl", tmp_path / "other.jsonl"
    one_run(output, "a")
    one_run(other, "b")
    status_path(output).write_bytes(status_path(other).read_bytes())
    assert list(told(output)) == ["a"]
    one_run(output, "next")
    assert list(told(output)) == ["a", "next"]


def test_runs_that_are_killed_while_they_load_are_all_in_the_state_of_the_first_that_writes(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for number in range(3):
        step = 0
        while f"k{number}" not in told(output):
            killed_before(step, partial(one_run, output, f"k{number}"))
            step += 1
        assert not manifest_path(output).exists()
    one_run(output, "next")
    assert list(told(output)) == ["k0", "k1", "k2", "next"]


# -- the list of runs -------------------------------------------------------------------------------------------------


def test_older_runs_are_summed_and_none_is_lost(tmp_path: Path) -> None:
    found = Runs()
    for number in range(2 * runs.MAX_RUNS + 7):
        found = found.with_runs([run_of(f"r{number}", 2)])
        found = found.with_runs([run_of(f"r{number}", 3, end="finished")])
        found = found.with_runs([run_of(f"r{number}", 2)])  # a status that is older than the end
    assert len(found) == 2 * runs.MAX_RUNS + 7
    assert len(found.last) == runs.MAX_RUNS
    assert found.sums("tally")["num_answered"] == 3 * len(found)
    assert found.sums("tally")["failures_by_code"] == {"media_missing": len(found)}
    output = tmp_path / "out.jsonl"
    replace(MANIFEST, runs=found).save(output)
    assert read_state(output)[1] == found
    told = Totals(output="o", num_rows=3, rows=Counts(num_answered=3), runs=found).to_json()
    assert told["older_runs"]["runs"] == runs.MAX_RUNS + 7
    assert (len(told["runs"]), told["rows"]["answered"]) == (runs.MAX_RUNS, 3)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([10**400, 1 << 62]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4) | st.just("num_answered"), inner,
                                                                max_size=2),
    max_leaves=4,
)
FIELDS = [(name, inner) for name, value in run_of("x", 0).items()
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
@example([(("run", None), float("inf"))])
@example([(("new", None), [float("nan")])])
def test_an_edited_run_is_left_out_or_adds_up(changes: list[tuple[tuple[str, str | None], Any]]) -> None:
    """A change is of a field, or of one within it; `...` removes it."""
    edited: Any = run_of("b", 4)
    for (name, inner), value in changes:
        at, key = (edited, name) if inner is None else (edited.get(name), inner)
        if value is ... and isinstance(at, dict):
            at.pop(key, None)
        elif value is not ... and isinstance(at, dict):
            at[key] = value
    whole = run_of("a", 5)
    found = Runs.from_json([whole, edited], {**edited, "runs": 1})
    assert [run for run in found.last if run != whole] in ([], [edited])
    assert found.older in ({}, {**edited, "runs": 1})
    totals = Totals(output="o", num_rows=9, rows=Counts(), runs=found)
    json.dumps([totals.to_json(), *found.last, found.older], allow_nan=False)
    "\n".join([*totals.to_lines(), totals.to_line()]).encode()


# -- files of earlier versions ----------------------------------------------------------------------------------------


def test_the_record_of_an_earlier_version_counts_up_to_its_last_whole_lines(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    of_format_3(output)
    whole = runs_path(output).read_bytes()
    ends = [at for at, byte in enumerate(whole, 1) if byte == ord("\n")]
    for cut in sorted({0, 1, *range(0, len(whole), 97), *(end + by for end in ends for by in (-2, -1, 0, 1))}):
        runs_path(output).write_bytes(whole[:cut])
        lines: list[Run] = [json.loads(line) for line in whole[: whole.rfind(b"\n", 0, cut) + 1].splitlines()]
        expected = {line["run"]: line["tally"]["num_answered"] for line in lines}
        assert {run["run"]: run["tally"]["num_answered"] for run in read_state(output)[1].last} == expected
    runs_path(output).write_bytes(whole + b"\0" * 600 + b"\n[1]\n7\n" + json.dumps(run_of("c", 1)).encode() + b"\n")
    assert [run["run"] for run in read_state(output)[1].last] == ["a", "b", "c"]


def test_what_is_no_record_of_an_earlier_version_is_named_and_stays(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    of_format_3(output)
    runs_path(output).write_text("somebody's notes\n")
    with pytest.raises(ConfigError, match=r"out\.jsonl\.runs\.jsonl: no line of it can be read.*; move it away"):
        read_state(output)
    assert runs_path(output).read_text() == "somebody's notes\n"


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 2, "rows": {}}', '{"format": 1, "rows": {"a": {"b": 1}}}'])
def test_suspects_of_another_version_are_refused(text: str, tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    of_format_3(output)
    suspects_path(output).write_text(text)
    with pytest.raises(ConfigError, match=r"out.jsonl.suspects.json: cannot be read"):
        read_state(output)


@pytest.mark.parametrize("command", ["status", "summary", "report", "table"])
def test_a_format_that_is_not_known_is_refused_by_name(command: str, tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out.jsonl"
    one_run(output, "a")
    output.write_text("")
    fields = {**json.loads(manifest_path(output).read_text()), "format": 5, "npu_runner": "9.9"}
    manifest_path(output).write_text(json.dumps(fields))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = {"report": ["-o", str(tmp_path / "page.html")], "table": ["-o", str(tmp_path / "t.csv")]}
    assert main([command, str(output), *arguments.get(command, [])]) == 2
    assert "out.jsonl.manifest.json: cannot be read (it is of npu-runner 9.9, this is" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_stream_has_no_state(tmp_path: Path) -> None:
    state = StateFile(None)
    state.load()
    state.save(MANIFEST)
    state.update(suspects=SUSPECTS)
    assert state.manifest == replace(MANIFEST, suspects=SUSPECTS)
    assert not new_version_path(manifest_path(tmp_path / "x")).exists()
