"""What a job says while its model loads: one line of a terminal, lines now and then elsewhere."""

from __future__ import annotations

import io

import pytest

from npu_runner.batch.job import progress
from npu_runner.batch.job.progress import Progress
from npu_runner.batch.rows.counts import Counts
from npu_runner.request.outputs import EngineStats
from tests.batch.job_folder import Job
from tests.batch.scripted import row, write_rows

PHASES = ["opening model", "loading weights: 1 of 2", "compiling bucket 4 (graph 1 of 3)"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(style: str, stream: io.StringIO) -> str:
    shown = Progress(style, stream)
    for phase in PHASES:
        shown.loading(phase)
    shown.start(2, 0)
    shown.update(Counts(), EngineStats, is_last=True)
    shown.close()
    return stream.getvalue()


def test_a_terminal_shows_each_phase_in_one_line_that_rows_take_over() -> None:
    text = said("auto", Terminal())
    assert [text.count(phase) for phase in PHASES] == [1, 1, 1]
    assert "\n" not in text[: text.index("0/2")], "the phases leave no line behind"
    assert all(text.index(phase) < text.index("0/2") for phase in PHASES)


def test_lines_are_said_now_and_then_and_none_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "loading" not in said("lines", io.StringIO()), "all was there at once"
    assert said("off", Terminal()) == ""
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    assert said("auto", io.StringIO()).splitlines()[:3] == PHASES


def test_a_job_hands_on_what_its_model_does(
    job: Job, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.0)
    write_rows(job.input, [row("a")])
    job.run(progress="lines")
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == [f"opening {job.model.name}", "learning the script"]
    assert lines[2].startswith(f"model {job.model}: ")
