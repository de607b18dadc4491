"""An input that changes under the job: nothing is answered under another row's name, and it is said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.input_file import InputFile
from npu_runner.config import RunnerConfig
from npu_runner.errors import JobError
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, read_rows, row, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
ROWS = [row(f"r{n:04d}", f"text {n:04d}") for n in range(400)]


def rewritten(path: Path, changed: list[Any]) -> None:
    """In place: the same inode, as an editor that does not rename would write it."""
    before = path.stat().st_ino
    write_rows(path, changed)
    assert path.stat().st_ino == before


def swap_names(rows: list[Any]) -> list[Any]:
    """Every text stands under the name of its neighbour; no byte count changes."""
    return [{**item, "custom_id": other["custom_id"]} for item, other in zip(rows, [*rows[1:], rows[0]], strict=True)]


CHANGES: dict[str, Callable[[Path], None]] = {
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "one row reads otherwise": lambda path: rewritten(path, [*ROWS[:-1], row("r0399", "text 9999")]),
    "names swapped": lambda path: rewritten(path, swap_names(ROWS)),
    "rows moved": lambda path: rewritten(path, ROWS[::-1]),
    "a line added in front": lambda path: rewritten(path, [row("new", "text"), *ROWS]),
    "a row is blank": lambda path: rewritten(path, [*ROWS[:-1], b" " * 20, b" "]),
}


@pytest.mark.parametrize("name", ["cut", "one row reads otherwise", *only_full(
    "more changes; a file that is cut and a row stay",
    "names swapped", "emptied", "rows moved", "a line added in front", "a row is blank")])
def test_a_changed_input_ends_the_job_and_no_answer_stands_under_another_name(job: Job, name: str) -> None:
    write_rows(job.input, ROWS)

    def change_at(engine: ScriptedEngine) -> None:
        if engine.num_steps == 3:
            CHANGES[name](job.input)

    with pytest.raises(JobError, match=r"in\.jsonl: was changed while the job ran"):
        job.run(lambda config: ScriptedEngine(config, latency=lambda text: 1, on_step=change_at))
    for item in read_rows(job.output):
        content = item["response"]["body"]["choices"][0]["message"]["content"]
        assert content[::-1] == f"text {item['custom_id'][1:]}"
    write_rows(job.input, ROWS)
    assert job.run().exit_status == 0
    assert sorted(job.names()) == [item["custom_id"] for item in ROWS]


def test_a_row_that_changes_after_it_was_answered_is_noticed_at_the_end(job: Job) -> None:
    write_rows(job.input, ROWS[:5])

    class ChangesInTheLastStep(ScriptedEngine):
        num_finished = 0

        def step(self) -> list[Any]:
            outputs = super().step()
            self.num_finished += len(outputs)
            if outputs and self.num_finished == 5:
                rewritten(job.input, [row("r0000", "text 9999"), *ROWS[1:5]])
            return outputs

    with pytest.raises(JobError, match="rows that are answered read otherwise now"):
        job.run(ChangesInTheLastStep)


def test_rows_added_and_a_file_put_in_its_place_are_left_for_the_next_job(job: Job) -> None:
    write_rows(job.input, ROWS[:20])

    def add(engine: ScriptedEngine) -> None:
        if engine.num_steps == 1:
            write_rows(job.folder / "more", [*ROWS[:20], row("new")])
            with open(job.input, "ab") as file:
                file.write((job.folder / "more").read_bytes().splitlines(keepends=True)[-1])
        if engine.num_steps == 2:
            (job.folder / "more").replace(job.input)

    assert job.run(lambda config: ScriptedEngine(config, on_step=add)).tally.num_answered == 20
    assert job.run().tally.num_answered == 1


def test_the_report_does_not_show_another_question_with_an_answer(job: Job) -> None:
    write_rows(job.input, ROWS[:5])

    class ChangesAtTheEnd(ScriptedEngine):
        def __exit__(self, *error: Any) -> None:
            rewritten(job.input, [row("r0000", "text 9999"), *ROWS[1:5]])

    def open_engine(config: RunnerConfig) -> ScriptedEngine:
        return ChangesAtTheEnd(config)

    with pytest.raises(JobError, match="was changed while the job ran"):
        job.run(open_engine, report=job.folder / "r.html")
    assert not (job.folder / "r.html").exists()


def test_an_input_nobody_wrote_to_is_not_read_once_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "in.jsonl", ROWS)
    with InputFile(str(path), tmp_path) as file:
        file.scan()
        monkeypatch.setattr(file, "_pieces", lambda: pytest.fail("read again"))
        file.refuse_changes()
