"""The job as a process of its own: signals, a sudden end, standard input and output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import zygote
from tests.batch import job_program
from tests.batch.job_folder import LEFT, Job, numbered, overtaken
from tests.batch.scripted import OvertakingEngine, row, workers_of, write_rows
from tests.full_set import only_full

pytestmark = pytest.mark.usefixtures("fixed_time")
ROOT = Path(__file__).parents[2]


def start(job: Job, at: str = "", *, input: str | None = None, output: str | None = None, **settings: Any
          ) -> subprocess.Popen[bytes]:
    """at: what happens to it (job_program.py)."""
    arguments = [input or str(job.input), output or str(job.output), str(job.model), at]
    return zygote.Popen([sys.executable, "-m", job_program.__name__, *arguments], stderr=subprocess.PIPE, cwd=ROOT,
                        **settings)


def assert_it_vanishes(job: Job, at: str) -> None:
    with start(job, at) as process:
        _, errors = process.communicate()
    assert process.returncode == job_program.VANISHED, errors


@pytest.mark.parametrize("num_rows", [33, *only_full("fewer rows; more of them stay", 6)])
def test_a_process_that_vanished_leaves_what_it_finished_whole_and_the_order_is_made_up_for(
    job: Job, num_rows: int
) -> None:
    texts = numbered(45)
    write_rows(job.input, [row(text, text) for text in texts])
    assert_it_vanishes(job, f"vanish after {num_rows}")
    names = job.names()
    # What was queued for the file at that moment may be lost, from the end.
    assert names == overtaken(texts)[: len(names)]
    assert len(names) <= num_rows
    assert job.run(ordered=True).num_resumed == len(names)
    assert job.names() == texts


@pytest.mark.parametrize("moment", ["replace", "sync_folder", *only_full(
    "before what stays: it is replaced", "fsync")])
def test_a_process_that_vanishes_while_it_orders_the_output_leaves_every_row_once(job: Job, moment: str) -> None:
    texts = numbered(48)
    write_rows(job.input, [row(text, text) for text in texts])
    job.run(OvertakingEngine)
    assert job.names() == overtaken(texts)
    assert_it_vanishes(job, f"vanish at {moment}")
    assert sorted(job.names()) == texts
    assert (".out.jsonl.new" in job.files()) == (moment != "sync_folder")
    job.run()
    assert job.files() == LEFT, "the torn copy is not left for ever"
    assert job.run(ordered=True).num_resumed == 48
    assert job.names() == texts
    assert job.files() == LEFT
    assert len(job.engines) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, *only_full("the other signal", signal.SIGINT)])
def test_a_signal_stops_the_job_in_good_order_and_it_can_be_resumed(job: Job, number: signal.Signals) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 20) for n in range(150)])
    with start(job, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"five steps\n"
        process.send_signal(number)
        errors = process.stderr.read().decode()
    assert process.returncode == 1, errors
    assert f"{number.name}: stopping" in errors
    assert "Traceback" not in errors
    assert job.files() <= LEFT
    done = len(job.names())
    assert done < 150
    assert job.run().num_resumed == done
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(150))


def test_a_signal_while_the_model_loads_ends_the_workers_too(job: Job) -> None:
    write_rows(job.input, [row("a", "hang"), row("b", "x" * 20)])
    with start(job, "load for ever") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"loading\n"
        workers = workers_of(process.pid)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert len(workers) == 1
    assert "interrupted by SIGINT before the first row" in errors
    assert "Traceback" not in errors
    assert workers_of(process.pid) == []
    assert job.files() == {"out.jsonl.status.json"}, "the time of the device counts"
    summary = json.loads((job.model / "summary.json").read_text())
    assert summary["this_run"]["interrupted"] is True
    assert summary["this_run"]["error"] == "interrupted by SIGINT before the first row; the same command starts again"
    assert summary["rows"]["unfinished"] == summary["rows"]["total"] == 2


def test_a_second_signal_ends_the_job_at_once(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 20) for n in range(150)])
    with start(job, "hang after six steps") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"five steps\n"
        process.send_signal(signal.SIGTERM)
        assert b"stopping" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert b"ending at once" in process.stderr.read()
    assert process.returncode == 1


def test_a_signal_before_the_first_row_leaves_no_rows(job: Job) -> None:
    with start(job, input="-", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"an import that chats\n"
        while "out.jsonl.lock" not in job.files():  # it waits for its input now
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert "interrupted by SIGINT before the first row" in errors
    assert job.files() == set()


def test_a_signal_right_after_locking_leaves_no_lock(job: Job) -> None:
    write_rows(job.input, [row("a")])
    with start(job, "interrupt after locking") as process:
        _, errors = process.communicate()
    assert process.returncode == 1
    assert b"interrupted by SIGINT before the first row" in errors
    assert job.files() == set()


def test_standard_input_and_output_carry_rows_and_nothing_else(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", f"text {n}") for n in range(20)])
    with open(job.input, "rb") as rows:
        process = start(job, input="-", output="-", stdin=rows, stdout=subprocess.PIPE)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    lines = output.splitlines()
    # Printed before the job began; what is printed while it runs goes to stderr.
    assert lines.pop(0) == b"an import that chats"
    assert sorted(json.loads(line)["custom_id"] for line in lines) == sorted(f"r{n}" for n in range(20))
    assert job.files() == set()


def test_a_reader_that_goes_away_ends_the_job(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 20) for n in range(3000)])
    with start(job, output="-", stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.readline()
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert process.returncode == 1
    assert "standard output: its reader has gone" in errors
    assert "Traceback" not in errors
