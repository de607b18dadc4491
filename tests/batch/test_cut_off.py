"""Answers that are none to work with: cut off at their limit, ended for repeating themselves, or not the JSON that was
asked for. All counts agree."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from npu_runner.batch.files.names import status_path
from npu_runner.batch.files.output_scan import counts_of, scan_output
from npu_runner.batch.job.job_status import status_of
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.summary import Tally
from npu_runner.reports.report import report_job
from npu_runner.request.outputs import REPETITION_DETECTED, CompletionOutput, RequestOutput
from npu_runner.request.sampling_params import SamplingParams
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, completion_row, row, write_rows
from tests.reports.report_pages import names

OBJECT, WORDS = '{"a": 1}', "no JSON"
SCHEMA: dict[str, Any] = {"type": "object"}
BY_ROW: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
DETECTION = {"max_pattern_size": 9, "min_count": 3}
# What the model says, the row's fields, whether that is cut off, whether unparsed without and with a schema of the job.
ROWS: dict[str, tuple[str, dict[str, Any], bool, bool, bool]] = {
    "words": (WORDS, {}, False, False, True),
    "object": (OBJECT, {}, False, False, False),
    "half of an object": (OBJECT, {"max_tokens": 3}, True, False, True),
    "by the row": (WORDS, {"response_format": BY_ROW}, False, True, True),
    "any object": (WORDS, {"response_format": {"type": "json_object"}}, False, True, True),
    "guided": (WORDS, {"guided_json": SCHEMA, "max_tokens": 2}, True, True, True),
    "vLLM's": (WORDS, {"structured_outputs": {"json": SCHEMA}}, False, True, True),
    "vLLM's object": (WORDS, {"structured_outputs": {"json_object": True}}, False, True, True),
    "fits": (OBJECT, {"response_format": BY_ROW}, False, False, False),
    "one of two fits": (OBJECT, {"response_format": BY_ROW, "n": 2, "temperature": 1}, False, True, True),
    "text": (WORDS, {"response_format": {"type": "text"}}, False, False, False),
    "a choice": (WORDS, {"guided_choice": [WORDS]}, False, False, False),
    "with tools": (WORDS, {"tools": TOOLS}, False, False, False),
    "without its tools": (WORDS, {"tools": TOOLS, "tool_choice": "none"}, False, False, True),
    "repeats": (WORDS, {"repetition_detection": DETECTION}, False, False, True),
    "repeats, and is none": (WORDS, {"repetition_detection": DETECTION, "response_format": BY_ROW}, False, True, True),
    "repeats, and is cut": (WORDS, {"repetition_detection": DETECTION, "max_tokens": 3, "n": 2, "temperature": 1},
                            True, False, True),
    "the engine's fault": ("rorre enigne", {}, False, False, False),
}


class Cutting(ScriptedEngine):
    """Keeps to max_tokens, one a character. The second of two completions is words. The first repeats itself where that
    is looked for."""

    def _output(self, request_id: str, text: str, params: SamplingParams) -> RequestOutput:
        if text == "engine error":
            return super()._output(request_id, text, params)
        answer = text[::-1]
        most = params.max_tokens or len(answer)
        reason = "stop" if len(answer) <= most else "length"
        texts = [answer[:most], *[WORDS] * (params.n - 1)]
        completions = [CompletionOutput(index, said, [1] * len(said), reason) for index, said in enumerate(texts)]
        if params.repetition_detection is not None:
            completions[0] = replace(completions[0], finish_reason="length", stop_reason=REPETITION_DETECTED)
        return RequestOutput(request_id, completions, len(text))


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
    counts = counts_of([scan_output(job.output)])
    assert (counts.num_cut_off, counts.num_repetition) == (len(cut_off), len(repetition)), "what a later run finds"
    assert (counts.num_unparsed, counts.num_answered - counts.num_not_whole) == (len(unparsed), num_whole)
    assert_status_agrees(job, cut_off, repetition, unparsed, num_whole)
    assert summary.to_lines()[0] == (f"rows      {len(ROWS)} answered, 1 failed (1 generation_failed), "
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
    assert Tally(num_answered=3).shortcomings() == ["0 failed"]
