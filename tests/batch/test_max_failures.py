"""--max-failures ends a job early, with exit status 4, and what is finished stays."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest

from npu_runner.batch.job.history import JobSummary
from npu_runner.batch.job.options import BatchOptions, FailureLimit
from npu_runner.errors import ConfigError, TooManyFailuresError
from tests.batch.job_folder import Job, numbered
from tests.batch.scripted import read_rows, row, write_rows
from tests.replicas.jobs import ended, start_scripted

pytestmark = pytest.mark.usefixtures("fixed_time")


def rows_of(job: Job, count: int, *, bad: range) -> None:
    """The long answers give the writer a thousand steps to put failures into the file, where they are counted."""
    write_rows(job.input, [row(text, "bad" if int(text) in bad else "x" * 60) for text in numbered(count)])


def told(job: Job) -> dict[str, object]:
    found: dict[str, object] = json.loads((job.folder / "s.json").read_text())["this_run"]
    return found


def test_too_many_end_it_early_and_keep_what_is_finished(job: Job) -> None:
    rows_of(job, 300, bad=range(30, 130))
    with pytest.raises(TooManyFailuresError, match=r"\d+ of \d+ finished rows have failed, more than --max-failures 5"):
        job.run(max_failures="5", summary=job.folder / "s.json")
    rows = read_rows(job.output)
    num_failed = sum(item["error"] is not None for item in rows)
    assert num_failed > 5
    assert len(rows) < 300
    summary = told(job)
    assert summary["exit_status"] == 4
    assert str(summary["error"]).endswith(
        "more than --max-failures 5 allows: ended early. Finished rows are kept; mend what fails and try it again with "
        "--retry errors, or raise the limit")
    assert (summary["rows"]["failed"], summary["rows"]["unfinished"]) == (num_failed, 300 - len(rows))  # type: ignore[index]

    # The same command loads no model for what the limit would not let be served.
    num_loads = len(job.engines)
    with pytest.raises(TooManyFailuresError, match=f"{num_failed} of {len(rows)} finished"):
        job.run(max_failures="5", summary=job.folder / "s.json")
    assert (len(job.engines), told(job)["exit_status"]) == (num_loads, 4)
    assert read_rows(job.output) == rows

    # It is no setting of the output: another limit goes on, and so do mended rows.
    rows_of(job, 300, bad=range(298, 300))
    resumed = job.run(max_failures="2", retry_errors=True)
    assert (resumed.exit_status, resumed.num_resumed) == (3, len(rows) - num_failed)
    assert len(read_rows(job.output)) == 300


@pytest.mark.parametrize(("limit", "is_early"), [("3", True), ("4", False), ("0", True)])
def test_as_many_as_the_limit_may_fail(job: Job, limit: str, is_early: bool) -> None:
    write_rows(job.input, [row(text, "bad" if int(text) < 4 else "x" * 40) for text in numbered(200)])
    if is_early:
        with pytest.raises(TooManyFailuresError):
            job.run(max_failures=limit)
        assert len(read_rows(job.output)) < 200
    else:
        assert job.run(max_failures=limit).exit_status == 3
        assert len(read_rows(job.output)) == 200


def test_a_job_that_is_over_has_not_ended_early(job: Job) -> None:
    write_rows(job.input, [row("a", "bad"), row("b", "bad")])
    summary: JobSummary = job.run(max_failures="0")
    assert (summary.exit_status, summary.num_unfinished) == (3, 0)
    assert job.run(max_failures="0").exit_status == 3


def test_a_share_counts_from_two_hundred_rows_and_with_those_under_way() -> None:
    limit = FailureLimit.parse("2.5%")
    assert limit == FailureLimit(None, Fraction(5, 2))
    assert not limit.is_exceeded(199, 199)
    assert not limit.is_exceeded(5, 200)
    assert limit.is_exceeded(6, 200)
    assert not limit.is_exceeded(6, 200, 40)
    assert not FailureLimit.parse("100%").is_exceeded(1000, 1000)
    assert FailureLimit.parse("0%").is_exceeded(1, 200)


def test_a_share_ends_a_job_whose_rows_all_fail(job: Job) -> None:
    rows_of(job, 1000, bad=range(1000))
    with pytest.raises(TooManyFailuresError, match="more than --max-failures 10% allows"):
        job.run(max_failures="10%")
    assert 200 <= len(read_rows(job.output)) < 1000


@pytest.mark.parametrize("text", ["", "-1", "1.5", "101%", "%", "5 %", "nan%", "1e3%", "٣", "5%%", " 5"])
def test_what_is_no_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="max_failures"):
        BatchOptions(input="a", output="b", max_failures=text)


@pytest.mark.full("two replicas; the status of a job of one stays")
def test_replicas_in_processes_end_with_that_status(job: Job) -> None:
    rows_of(job, 1000, bad=range(50, 1000))
    with start_scripted(job.folder, max_failures="20") as process:
        status, said = ended(process)
    assert status == 4, said
    assert "more than --max-failures 20 allows" in said
    assert len(read_rows(job.output)) < 1000
