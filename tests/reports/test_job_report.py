"""The report of a job: made when the job has ended, or beside it, and never at its expense."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.joined import Joined
from npu_runner.batch.job.options import BatchOptions
from npu_runner.batch.job.run import run_batch
from npu_runner.config import RunnerConfig
from npu_runner.errors import ConfigError, JobError
from npu_runner.reports import report
from tests.batch.job_folder import Job
from tests.batch.scripted import ScriptedEngine, row, write_rows
from tests.reports.report_pages import answer, names


@pytest.fixture
def job(tmp_path: Path) -> Job:
    found = Job(tmp_path)
    write_rows(found.input, [row(f"r{number}", f"ask {number}") for number in range(5)])
    return found


def options(job: Job) -> BatchOptions:
    return BatchOptions(input=str(job.input), output=str(job.output), report=job.folder / "page.html")


def test_a_job_without_anything_to_do_makes_its_report(job: Job) -> None:
    job.run()
    assert job.run(report=job.folder / "page.html").num_resumed == 5
    assert names((job.folder / "page.html").read_text()) == [f"r{number}" for number in range(5)]


def test_a_job_that_was_cut_short_makes_none(job: Job) -> None:
    def interrupt(engine: ScriptedEngine) -> None:
        if engine.num_steps == 1:
            os.kill(os.getpid(), signal.SIGINT)

    stopped = job.run(lambda config: ScriptedEngine(config, on_step=interrupt), report=job.folder / "page.html")
    assert stopped.is_interrupted
    assert not (job.folder / "page.html").exists()


def test_an_input_that_can_be_read_once_is_shown_with_its_questions(job: Job) -> None:
    reader, writer = os.pipe()
    os.write(writer, job.input.read_bytes())
    os.close(writer)
    job.run(input=f"/dev/fd/{reader}", report=job.folder / "page.html")
    os.close(reader)
    assert "ask 3" in (job.folder / "page.html").read_text()


def test_a_report_that_fails_late_says_that_the_answers_are_there(job: Job) -> None:
    class Blocks(ScriptedEngine):
        def __exit__(self, *error: Any) -> None:
            (job.folder / ".page.html.new").mkdir(exist_ok=True)

    with pytest.raises(JobError, match=r"Is a directory.*No answer in .*out\.jsonl is affected"):
        job.run(Blocks, report=job.folder / "page.html")
    assert len(job.names()) == 5


@pytest.mark.parametrize("name", ["report", "summary", "metrics_file"])
def test_run_batch_refuses_files_of_the_command_by_name(job: Job, name: str) -> None:
    named = BatchOptions.from_keywords(input=str(job.input), output=str(job.output), **{name: job.folder / "x"})
    with pytest.raises(ConfigError, match=rf"{name}: run_batch writes none; call .*run_batch_and_report"):
        run_batch(RunnerConfig(model=str(job.model)), named)


def test_a_report_reads_the_files_as_they_were_when_it_began(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running job adds lines, the last of them torn, and puts a sorted file in the place of its output."""
    write_rows(job.input, [row(f"r{number}", f"ask {number}") for number in range(7)])
    job.run()
    lines = job.output.read_bytes().splitlines(keepends=True)
    job.output.write_bytes(b"".join(lines[:5]) + lines[5][:20])

    def joined_late(*arguments: Any) -> Joined:
        with open(job.output, "ab") as file:
            file.write(lines[5][20:] + lines[6])
        found = Joined(*arguments)
        job.output.unlink()
        job.output.write_bytes(answer("other", "x"))
        return found

    monkeypatch.setattr(report, "Joined", joined_late)
    report.report_job(options(job))
    page = (job.folder / "page.html").read_text()
    assert names(page) == [f"r{number}" for number in range(5)]
    assert "Shown: 5 of 7 rows" in page


STATE = """
import os
session = open("/proc/self/autogroup").read().split()[-1:]  # empty in the first session of a host
print(os.nice(0), *session, os.getsid(0) == os.getpid(), os.sched_getscheduler(0) == os.SCHED_IDLE, flush=True)
"""


@pytest.mark.parametrize("is_leader", [False, True], ids=["of a program", "of a shell"])
def test_a_report_beside_a_job_has_the_lowest_priority(tmp_path: Path, is_leader: bool) -> None:
    """Also among sessions, which Linux gives equal shares whatever the priorities of their processes."""
    code = (f"import os, sys\nif {is_leader}: os.setpgid(0, 0)\n"
            "from npu_runner.reports.priority import give_way_to_job\n"
            f"give_way_to_job({str(tmp_path / 'out.jsonl')!r})\n"
            f"assert 'numpy' not in sys.modules\n{STATE}\nsys.exit(7)")
    with open(tmp_path / "out.jsonl.lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert done.stdout.split() == [b"19", b"19", b"True", b"True"]
    assert done.returncode == 7
    alone = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert alone.stdout.split()[-1] == b"False", "nobody holds the lock any more"
