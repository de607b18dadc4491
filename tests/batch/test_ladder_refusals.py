"""Ladders and rows of a job with a ladder that are refused, each with what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.rows.ladder import read_ladder
from npu_runner.cli import main as cli
from npu_runner.errors import ConfigError
from tests.batch.job_folder import Job
from tests.batch.ladder_steps import STEPS, Tried, ladder
from tests.batch.scripted import read_rows, row, write_rows


@pytest.mark.parametrize(("request_", "param"), [
    (row("two", n=2, temperature=1), "n"),
    ({"custom_id": "v", "method": "POST", "url": "/v1/embeddings", "body": {"input": "a"}}, "url")])
def test_rows_with_several_answers_or_none_of_text_are_refused(job: Job, request_: Any, param: str) -> None:
    write_rows(job.input, [request_])
    job.run(Tried, ladder=ladder(job.folder, STEPS))
    error = read_rows(job.output)[0]["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", param)
    assert "ladder" in error["message"]


@pytest.mark.parametrize(("steps", "said"), [
    ([{"when": ["cut_off"], "change": {}}], "step 1: changes nothing; temperature, top_p"),
    ([STEPS[0], {"when": ["cut_of"], "change": {"top_p": 0.5}}], r"step 2: when\.0: .*'cut_of'"),
    ([{"when": [], "change": {"top_p": 0.5}}], "step 1: when: "),
    ([{"when": ["empty"], "change": {"n": 2}}], r"step 1: change\.n: Extra inputs"),
    ([{"when": ["empty"], "change": {"temperature": -1}}], "step 1: .*temperature"),
    ([{"when": ["empty"], "change": {"longest": 0}}], r"step 1: .*longest: a number of pixels from 1 to 65500"),
    ([{"when": ["empty"], "change": {"rotate": 45}}], "step 1: .*rotate: 90, 180 or 270"),
    ([{"when": ["empty"], "change": {"max_pixels": -5}}], "step 1: .*max_pixels: -5 is not above 0"),
    ([{"when": ["empty"], "change": {"repetition_detection": {"min_count": "x"}}}], "step 1: .*repetition_detection"),
    ([{"when": ["empty"], "change": {"append_prompt": "\ud800"}}], "step 1: .* half a surrogate pair"),
    ([{"when": ["empty"], "change": {"rotate": "as_said"}}], "step 1: rotated and as_said .* --ladder-reader"),
    ([{"when": ["rotated"], "change": {"top_p": 0.5}}], "step 1: rotated and as_said"),
    ([{"when": ["empty", "error:prompt_to_long"], "change": {"top_p": 0.5}}],
     "step 1: when: error:prompt_to_long: no row fails with this code; prompt_too_long"),
    ([{"when": ["error:zzz"], "change": {"top_p": 0.5}}], "error:zzz: .*; docs/errors.md lists all"),
    ([{"when": ["empty"], "change": {"append_prompt": ""}}], "step 1: changes nothing"),
    ([{"when": ["empty"], "change": {"min_pixels": 900, "max_pixels": 100}}],
     "step 1: min_pixels 900 is more than max_pixels 100; lower it"),
    ([], "it has no step"), ("[{", "cannot be read as JSON"), ("{}", "steps.json': name: Field required"),
])  # fmt: skip
def test_a_wrong_step_is_refused_when_the_file_is_read(steps: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        read_ladder(ladder(tmp_path, steps), None)


def test_a_ladder_that_is_no_file_and_no_reader_is_refused_by_the_commands(job: Job, capsys: Any) -> None:
    write_rows(job.input, [row("a")])
    with pytest.raises(ConfigError, match=r"'olmocr-3': is no shipped reader and no file; did you mean olmocr-2"):
        job.run(Tried, ladder="olmocr-3")
    with pytest.raises(ConfigError, match="ladder 'glm-ocr': it has no step"):
        job.run(Tried, ladder="glm-ocr")
    assert not job.output.exists()
    bad = ladder(job.folder, [{"when": ["empty"], "change": {}}])
    assert cli.main(["check", "-i", str(job.input), "--ladder", bad, "--platform", "cpu"]) == 2
    assert "step 1: changes nothing" in capsys.readouterr().err
