"""The job as a process of its own: signals, a sudden end, standard input and output."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from npu_runner.batch.files import durable
from tests.batch.job_folder import Job, numbered, overtaken
from tests.batch.scripted import OvertakingEngine, row, workers_of, write_rows

pytestmark = pytest.mark.usefixtures("fixed_time")

SCRIPT = """
import os
import sys
from pathlib import Path
from npu_runner.batch.job.run import run_batch
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from npu_runner.errors import NpuRunnerError
from tests.batch.scripted import OvertakingEngine, ScriptedEngine, ScriptedModel
import time

def announce(engine):
    if engine.num_steps == 5:
        print("five steps", file=sys.stderr, flush=True)
    time.sleep(0.01)

options = BatchOptions.from_keywords(input=sys.argv[1], output=sys.argv[2], preprocessing_workers=1,
                                      progress="off", ordered=True)
model = lambda config: ScriptedModel(config, lambda config: ScriptedEngine(config, on_step=announce))
print("an import that chats", flush=True)
try:
    sys.exit(run_batch(RunnerConfig(model=sys.argv[3]), options, open_model=model).exit_status)
except NpuRunnerError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


LOADS_FOR_EVER = """
def loads_for_ever(config):
    from tests.batch.scripted import workers_of
    while not workers_of(os.getpid()):
        time.sleep(0.01)
    print("loading", file=sys.stderr, flush=True)
    time.sleep(3600)

"""


INTERRUPTED_WHEN_LOCKED = """
import fcntl, signal
lock = fcntl.flock
def lock_and_interrupt(*arguments):
    lock(*arguments)
    os.kill(os.getpid(), signal.SIGINT)
fcntl.flock = lock_and_interrupt

"""


def start(job: Job, *, input: str | None = None, output: str | None = None, **settings: Any) -> subprocess.Popen[bytes]:
    arguments = [input or str(job.input), output or str(job.output), str(job.model)]
    return subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stderr=subprocess.PIPE, **settings)


@pytest.mark.parametrize("num_rows", [6, 33])
def test_a_process_that_vanished_leaves_what_it_finished_whole_and_the_order_is_made_up_for(
    job: Job, num_rows: int
) -> None:
    texts = numbered(45)
    write_rows(job.input, [row(text, text) for text in texts])
    vanishes = SCRIPT.replace(
        "ScriptedEngine(config, on_step=announce)",
        f"OvertakingEngine(config, crash_after={num_rows}, crash=lambda: os._exit(9))",
    )
    done = subprocess.run([sys.executable, "-c", vanishes, str(job.input), str(job.output), str(job.model)])
    assert done.returncode == 9
    names = job.names()
    # What was queued for the file at that moment may be lost, from the end.
    assert names == overtaken(texts)[: len(names)]
    assert len(names) <= num_rows
    assert job.run(ordered=True).num_resumed == len(names)
    assert job.names() == texts


@pytest.mark.parametrize("moment", ["os.fsync(file.fileno())", "os.replace(new, path)", "sync_folder(path.parent)"])
def test_a_process_that_vanishes_while_it_orders_the_output_leaves_every_row_once(job: Job, moment: str) -> None:
    texts = numbered(48)
    write_rows(job.input, [row(text, text) for text in texts])
    job.run(OvertakingEngine)
    assert job.names() == overtaken(texts)
    source = inspect.getsource(durable.replacing)
    assert moment in source
    # Everything else is imported by then, so that it is the output's new version, and nothing before it, which is cut.
    vanishes = "import npu_runner.batch.job.run, npu_runner.batch.files.durable as durable\n"
    vanishes += f"exec({source.replace(moment, 'os._exit(9)')!r}, durable.__dict__)\n"
    vanishes += "npu_runner.batch.files.output_file.replacing = durable.replacing\n" + SCRIPT
    done = subprocess.run([sys.executable, "-c", vanishes, str(job.input), str(job.output), str(job.model)])
    assert done.returncode == 9
    assert sorted(job.names()) == texts
    assert (".out.jsonl.new" in job.files()) == (moment != "sync_folder(path.parent)")
    job.run()
    assert job.files() == {"out.jsonl", "out.jsonl.manifest.json"}, "the torn copy is not left for ever"
    assert job.run(ordered=True).num_resumed == 48
    assert job.names() == texts
    assert job.files() == {"out.jsonl", "out.jsonl.manifest.json"}
    assert len(job.engines) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_job_in_good_order_and_it_can_be_resumed(job: Job, number: signal.Signals) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 20) for n in range(400)])
    with start(job, stdout=subprocess.DEVNULL) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"five steps\n"
        process.send_signal(number)
        errors = process.stderr.read().decode()
    assert process.returncode == 1, errors
    assert f"{number.name}: stopping" in errors
    assert "Traceback" not in errors
    assert job.files() <= {"out.jsonl", "out.jsonl.manifest.json"}
    done = len(job.names())
    assert done < 400
    assert job.run().num_resumed == done
    assert sorted(job.names()) == sorted(f"r{n}" for n in range(400))


def test_a_signal_while_the_model_loads_ends_the_workers_too(job: Job) -> None:
    write_rows(job.input, [row("a", "hang"), row("b", "x" * 20)])
    loading = SCRIPT.replace("lambda config: ScriptedEngine(config, on_step=announce)", "loads_for_ever").replace(
        "options =", LOADS_FOR_EVER + "options ="
    ).replace("output=sys.argv[2],", "output=sys.argv[2], summary=Path(sys.argv[2]).with_name('summary.json'),")
    arguments = [str(job.input), str(job.output), str(job.model)]
    with subprocess.Popen([sys.executable, "-c", loading, *arguments], stderr=subprocess.PIPE) as process:
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
    assert job.files() == {"summary.json"}
    summary = json.loads((job.folder / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["error"] == "interrupted by SIGINT before the first row; the same command starts again"
    assert summary["rows"]["unfinished"] == summary["rows"]["total"] == 2


def test_a_second_signal_ends_the_job_at_once(job: Job) -> None:
    write_rows(job.input, [row(f"r{n}", "x" * 20) for n in range(400)])
    slow = SCRIPT.replace("time.sleep(0.01)", "time.sleep(0.01 if engine.num_steps < 6 else 3600)")
    arguments = [str(job.input), str(job.output), str(job.model)]
    with subprocess.Popen([sys.executable, "-c", slow, *arguments], stderr=subprocess.PIPE) as process:
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
    interrupted = SCRIPT.replace("options =", INTERRUPTED_WHEN_LOCKED + "options =")
    arguments = [str(job.input), str(job.output), str(job.model)]
    done = subprocess.run([sys.executable, "-c", interrupted, *arguments], capture_output=True)
    assert done.returncode == 1
    assert b"interrupted by SIGINT before the first row" in done.stderr
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
    assert [json.loads(line)["custom_id"] for line in lines] == [f"r{n}" for n in range(20)]
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
