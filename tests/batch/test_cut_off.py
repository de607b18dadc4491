"""Answers that are none to work with: cut off at their limit, ended for repeating themselves, or not the JSON that was
asked for. All counts agree."""

from __future__ import annotations

import json
import re

import pytest

from npu_runner.batch.files.answer_file import AnswerFile
from npu_runner.batch.files.names import status_path
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.rows.counts import Counts
from npu_runner.reports.report import report_job
from npu_runner.reports.run_summary import run_lines
from npu_runner.reports.status import status_of
from tests.batch.cut_off_rows import ROWS, SCHEMA, Cutting
from tests.batch.job_folder import Job
from tests.batch.scripted import completion_row, row, write_rows
from tests.reports.report_pages import names


def shown(page: str) -> dict[str, int]:
    """The figures in the page's head."""
    return {name: int(count) for name, count in re.findall(r"<dt>([a-z ]+)</dt><dd[^>]*>(\d+)<", page)}


@pytest.mark.parametrize("has_schema", [False, True], ids=["no schema of the job", "a schema of the job"])
def test_all_who_count_agree(has_schema: bool, job: Job) -> None:
    write_rows(job.input, [
        *(row(name, text[::-1] if text != "rorre enigne" else "engine error", **{"max_tokens": 50, **body})
          for name, (text, body, *_) in ROWS.items()),
        completion_row("echo", "}{", echo=True, guided_json=SCHEMA),
    ])  # fmt: skip
    (job.folder / "schema.json").write_text(json.dumps(SCHEMA))
    options = {"response_schema": job.folder / "schema.json"} if has_schema else {}
    summary = job.run(Cutting, report=job.folder / "page.html", summary=job.folder / "sums.json", **options)
    cut_off = {name for name, (_, _, is_cut, *_) in ROWS.items() if is_cut}
    repetition = {name for name, (_, body, *_) in ROWS.items() if "repetition_detection" in body}
    unparsed = {name for name, (*_, of_row, of_both) in ROWS.items() if (of_both if has_schema else of_row)}

    num_whole = len(ROWS) - len(cut_off | repetition | unparsed)  # the echo is whole, and one row has failed

    tally = summary.tally
    assert tally.num_whole == num_whole
    assert (tally.num_failed, tally.num_cut_off, tally.num_unparsed) == (1, len(cut_off), len(unparsed))
    assert tally.num_repetition == len(repetition)
    sums = json.loads((job.folder / "sums.json").read_text())
    for rows in (sums["rows"], sums["this_run"]["rows"]):
        assert (rows["cut_off"], rows["repetition"], rows["unparsed"]) == tuple(
            map(len, (cut_off, repetition, unparsed)))
        assert rows["whole"] == num_whole
    with AnswerFile([job.output]) as rows:
        counts = rows.scan().counts()
    assert (counts.num_cut_off, counts.num_repetition) == (len(cut_off), len(repetition)), "what a later run finds"
    assert (counts.num_unparsed, counts.num_answered - counts.num_not_whole) == (len(unparsed), num_whole)
    assert_status_agrees(job, cut_off, repetition, unparsed, num_whole)
    assert run_lines(summary)[0] == (f"rows      {len(ROWS)} answered, 1 failed (1 generation_failed), "
                                     f"cut off {len(cut_off)}, repetition {len(repetition)}, unparsed {len(unparsed)}, "
                                     f"whole {num_whole}")
    page = (job.folder / "page.html").read_text()
    first = names(page)
    ranked = [{"the engine's fault"}, cut_off, repetition, unparsed, set(first)]
    ranks = [next(rank for rank, names in enumerate(ranked) if name in names) for name in first]
    assert (len(first), ranks) == (len(ROWS) + 1, sorted(ranks))
    assert {name: count for name, count in shown(page).items() if name in ("cut off", "repetition", "unparsed")} == {
        "cut off": len(cut_off), "repetition": len(repetition), "unparsed": len(unparsed)}  # fmt: skip
    for name, flaw in (("cut_off", cut_off), ("repetition", repetition), ("unparsed", unparsed)):
        found = re.findall(rf'<article id="[^"]*" data-is="[a-z_ ]*\b{name}\b[^"]*">.*?</article>', page, re.DOTALL)
        assert set(names("".join(found))) == flaw
        assert f'<option value="{name}">' in page
    later = BatchOptions(input=str(job.input), output=str(job.output), report=job.folder / "later.html")
    report_job(later)
    assert (job.folder / "later.html").read_text() == page, "the manifest knows of the job's schema"


def assert_status_agrees(job: Job, cut_off: set[str], repetition: set[str], unparsed: set[str], num_whole: int
                         ) -> None:
    told = status_of(str(job.output))
    rows = told.to_json()["rows"]
    assert (rows["cut_off"], rows["repetition"], rows["unparsed"], rows["whole"]) == (
        len(cut_off), len(repetition), len(unparsed), num_whole)
    assert f", unparsed {len(unparsed)}, whole {num_whole}" in told.to_lines()[1]
    status_path(job.output).unlink()
    counted = status_of(str(job.output)).to_json()["rows"]
    assert {name: rows[name] for name in ("answered", "failed", "cut_off", "repetition", "unparsed", "whole")}.items() \
        <= counted.items(), "counted in the rows, without the status"


def test_of_no_flaws_nobody_says_a_word() -> None:
    assert Counts(num_answered=3).shortcomings() == ["0 failed"]
