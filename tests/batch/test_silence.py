"""A job outlives its terminal: words that nobody takes cost no row and no exit status, and the summary says so."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from npu_runner.processes.patient_streams import PatientStream
from tests import zygote
from tests.batch.job_folder import numbered
from tests.batch.mounts import mounted
from tests.batch.scripted import read_rows, row, write_rows
from tests.replicas.jobs import PYTHONPATH

NUM_ROWS = 60
# Progress at every turn, a library that prints and warns, and a logger whose handler was made before the job.
CHATTY = """
import json, logging, os, sys, warnings
from npu_runner.cli import main as cli
from npu_runner.batch.job import progress, run
from npu_runner.errors import EngineDeadError
from tests.batch.scripted import ScriptedEngine, ScriptedModel
progress._LINE_SECONDS = progress._BAR_SECONDS = 0.0
logging.basicConfig()
def talk(engine):
    print("a library prints", flush=True)
    print("a library complains", file=sys.stderr, flush=True)
    warnings.warn(f"step {engine.num_steps}")
    logging.warning("a logger warns")
    os.environ.get("NATIVE") and os.system("echo native words >&2")
    if engine.num_steps == int(os.environ.get("DIES", 0)):
        raise EngineDeadError("rank 1 died")
open_model = lambda config: ScriptedModel(config, lambda config: ScriptedEngine(config, on_step=talk, max_running=1))
run.run_batch.__kwdefaults__["open_model"] = open_model
sys.exit(cli.main(sys.argv[1:]))
"""


@contextlib.contextmanager
def opened(shell: str, folder: Path) -> Iterator[dict[str, Any]]:
    """What bash opens for "JOB" in this line, under Popen's names."""
    job, _, reader = shell.partition(" | ")
    with contextlib.ExitStack() as stack:
        if reader:
            ends: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL}
            pipe = stack.enter_context(subprocess.Popen(reader.split(), **ends))
            yield {"stdout": pipe.stdin, "stderr": pipe.stdin}
            return
        found = {{"": "stdout", "2": "stderr"}[number]: stack.enter_context(open(folder / name, "wb"))
                 for number, name in re.findall(r"(2?)> (\S+)", job)}
        both = subprocess.STDOUT if "2>&1" in job else subprocess.DEVNULL
        yield {"stdout": subprocess.DEVNULL, "stderr": both, **found}


def run(folder: Path, shell: str, *options: str, start: Any = zygote, **environment: str) -> int:
    """The command; "JOB" in `shell` stands for it. Returns the job's own exit status.

    start: `subprocess` where Python's own end is looked at, whose last flush can change the status. Where a descriptor
    is closed bash starts it: Python looks for its streams while it starts.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    rows = [row(text, "bad" if text == "007" else "x", user=text) for text in numbered(NUM_ROWS)]
    write_rows(folder / "in.jsonl", rows)
    arguments = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", "model", "--summary", "s.json",
                 "--preprocessing-workers", "1", "--platform", "cpu", *options]  # fmt: skip
    (folder / "chatty.py").write_text(CHATTY)
    given: dict[str, Any] = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": PYTHONPATH, **environment}}
    command = [sys.executable, "chatty.py", *arguments]
    if "&-" in shell:
        bash = ["bash", "-c", shell.replace("JOB", '"$0" "$@"'), *command]
        return subprocess.run(bash, stdout=subprocess.DEVNULL, **given).returncode
    with opened(shell, folder) as streams:
        return int(start.run(command, **streams, **given).returncode)


def told(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "s.json").read_text())["this_run"])


@pytest.mark.parametrize(("shell", "reason", "style"), [
    ("JOB 2>&1 | head -5", "Broken pipe", "lines"),
    ("JOB > /dev/full 2>&1", "No space left on device", "bar"),
])
def test_progress_that_nobody_reads_goes_quiet(tmp_path: Path, shell: str, reason: str, style: str) -> None:
    """A second each."""
    assert run(tmp_path, shell, "--progress", style, NATIVE="1") == 3
    assert len({item["custom_id"] for item in read_rows(tmp_path / "out.jsonl")}) == NUM_ROWS
    assert len(read_rows(tmp_path / "out.jsonl")) == NUM_ROWS
    assert told(tmp_path)["progress"] == {"quiet": True, "reason": reason}
    assert told(tmp_path)["rows"]["unfinished"] == 0


def test_progress_that_is_read_is_not_quiet(tmp_path: Path) -> None:
    assert run(tmp_path, "JOB 2> log", "--progress", "lines") == 3
    assert told(tmp_path)["progress"] == {"quiet": False, "reason": None}
    assert "a logger warns" in (tmp_path / "log").read_text()


def test_a_log_that_fills_its_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    with mounted(disk, "size=8k"):
        assert run(tmp_path, "JOB 2> disk/log", "--progress", "lines") == 3
        assert (disk / "log").stat().st_size > 0
    assert len(read_rows(tmp_path / "out.jsonl")) == NUM_ROWS
    assert told(tmp_path)["progress"] == {"quiet": True, "reason": "No space left on device"}


def test_words_that_are_no_progress_end_nothing_either(tmp_path: Path) -> None:
    assert run(tmp_path, "JOB 2>&1 | true", "--progress", "off") == 3
    assert len(read_rows(tmp_path / "out.jsonl")) == NUM_ROWS
    assert told(tmp_path)["progress"]["quiet"], "the last lines were to be read"


def test_what_ends_the_job_keeps_its_exit_status(tmp_path: Path) -> None:
    assert run(tmp_path, "JOB 2>&-", "--progress", "lines", start=subprocess, DIES="9") == 1
    assert told(tmp_path)["error"] == "rank 1 died"
    assert told(tmp_path)["progress"]["quiet"]


def test_a_refusal_that_nobody_reads_is_still_2(tmp_path: Path) -> None:
    assert run(tmp_path, "JOB 2>&1 | true", "--allowed-media-dir", "nowhere", start=subprocess) == 2


def test_answers_on_standard_output_are_clean_beside_a_silent_terminal(tmp_path: Path) -> None:
    assert run(tmp_path, "JOB > answers 2> /dev/full", "--progress", "lines", "-o", "-") == 3
    assert len(read_rows(tmp_path / "answers")) == NUM_ROWS
    assert told(tmp_path)["progress"]["quiet"]


def test_a_patient_stream_raises_what_is_no_fault_of_the_stream() -> None:
    stream = PatientStream(io.TextIOWrapper(io.BytesIO(), "ascii"))
    with pytest.raises(UnicodeEncodeError):
        stream.write("\N{SNOWMAN}")
    assert stream.silence is None
    stream._stream.close()
    assert stream.write("words") == 5
    assert stream.silence is not None


def test_words_in_the_midst_of_a_write_are_not_lost() -> None:
    """As a signal's handler speaks while the job does."""
    reader, writer = os.pipe()

    class Interrupted(io.RawIOBase):
        handler: ClassVar = [lambda: stream.write("stopping\n")]

        def writable(self) -> bool:
            return True

        def fileno(self) -> int:
            return writer

        def write(self, data: Any) -> int:
            if self.handler:
                self.handler.pop()()
            return os.write(writer, data)

    stream = PatientStream(io.TextIOWrapper(io.BufferedWriter(Interrupted()), line_buffering=True))
    with open(reader, "rb") as read:
        stream.write("five steps\n")
        os.close(writer)
        assert sorted(read.read().splitlines()) == [b"five steps", b"stopping"]
    assert stream.silence is None
