"""What is logged can be seen: from the command and from `LLM`, in the process itself and in its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from npu_runner.processes.log_level import VARIABLE

ROOT = Path(__file__).parents[2]
CHILD = """\
from npu_runner.processes.child import Child
assert Child("a-child", "tests.processes.logging_child").exit_status(60) == 0
"""
OWN = """\
import logging
logging.basicConfig(level=logging.INFO, format="the program's own: %(message)s")
from npu_runner.processes.log_level import show_log
show_log(); show_log()
logging.getLogger("npu_runner.somewhere").info("once")
logging.getLogger("elsewhere").info("another's")
"""


def run(*command: str, level: str | None) -> subprocess.CompletedProcess[str]:
    others = {name: value for name, value in os.environ.items() if name != VARIABLE}
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True,
                          env=others | ({} if level is None else {VARIABLE: level}))


@pytest.mark.parametrize(("level", "said"), [
    ("info", ["INFO", "WARNING"]), ("WARNING", ["WARNING"]), (None, ["a warning"]), ("", ["a warning"]),
])  # fmt: skip
def test_a_child_shows_what_the_variable_asks_for(level: str | None, said: list[str]) -> None:
    done = run("-c", CHILD, level=level)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(said), done.stderr
    assert all(line.startswith(word) for line, word in zip(lines, said, strict=True))


def test_a_line_is_said_once_where_the_program_has_a_log_of_its_own() -> None:
    lines = run("-c", OWN, level="info").stderr.splitlines()
    assert [line for line in lines if line.endswith("once")] == [lines[0]]
    assert lines[0].startswith("INFO")
    assert lines[1:] == ["the program's own: another's"]
    assert run("-c", OWN, level=None).stderr.splitlines()[0] == "the program's own: once"


def test_a_level_that_is_none_is_refused_by_name() -> None:
    done = run("-m", "npu_runner", "models", level="loud")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"npu-runner: {VARIABLE}: 'loud' is not one of debug, info, warning, error\n"


@pytest.mark.full("loads a model for two lines; what a child shows of a level stays")
@pytest.mark.parametrize("way", ["LLM", "generate"])
def test_the_lines_that_documents_promise_are_shown(way: str) -> None:
    """That of the start, with what attention computes."""
    if way == "LLM":
        done = run("-c", "from npu_runner import LLM; LLM('shapes-vl', preprocessing_workers=0).close()", level="info")
    else:
        done = run("-m", "npu_runner", "generate", "--max-tokens", "1", "--log-level", "info", "Hello", level=None)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("INFO") and ": attention: " in line]
    assert [line for line in done.stderr.splitlines() if line.startswith("INFO") and ": ready: " in line]
