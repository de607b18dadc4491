"""Programs that do with an LLM what programs do: pools, forks, event loops, ends in the middle, one LLM after another.

None hangs, none leaves a process behind, and each ends with its own exit status.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import zygote

ROOT = Path(__file__).parents[2]
_MARK = "NPU_RUNNER_TEST_PROGRAM"
_HANGS_SECONDS = 300
_MOST_KIB_EACH = 4 << 10
"""That each further LLM may leave in the process."""
REFUSED = "npu_runner.errors."


def run(*arguments: str, expected_status: int = 0, start: Any = subprocess) -> list[dict[str, Any]]:
    """What the program says; all that it has started is gone when it has ended.

    start: `subprocess` where Python's own end is looked at, else `zygote`.
    """
    mark = uuid.uuid4().hex
    environment = {**os.environ, _MARK: mark, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    done = start.run([sys.executable, "-m", "tests.faults.programs", *arguments], env=environment,
                     capture_output=True, text=True, timeout=_HANGS_SECONDS)
    assert done.returncode == expected_status, done.stderr
    while left := processes_with(mark):  # the test's own timeout ends this if one stays
        time.sleep(0.01)
    assert not left
    return [json.loads(line) for line in done.stdout.splitlines()]


def processes_with(mark: str) -> list[int]:
    """Whatever has this in its environment and has not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{_MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            continue
    return found


@pytest.mark.full("six processes import torch, two of them load a model; an LLM beside threads stays")
@pytest.mark.slow
def test_pools_of_every_kind_beside_an_llm() -> None:
    found = run("pools")
    assert [pool["method"] for pool in found] == ["fork", "spawn", "forkserver"]
    for pool in found:
        assert (pool["computed"], pool["after"]) == ([1, 2, 3], True), pool
        assert pool["own"] == (pool["method"] != "fork"), pool


def test_an_llm_made_before_a_fork_is_its_parents() -> None:
    assert_is_its_parents(1)


@pytest.mark.full("two replicas start; one stays")
@pytest.mark.slow
def test_replicas_made_before_a_fork_are_their_parents() -> None:
    assert_is_its_parents(2)


def assert_is_its_parents(num_replicas: int) -> None:
    asked, closed, counted, left = run("forked", str(num_replicas), start=zygote.unless_full())
    assert asked["child"] == "answered" or asked["child"].startswith(REFUSED), asked
    for found in (closed, counted):
        assert found["child"] == "answered" or found["child"].startswith(REFUSED), found
    assert left["child"] == "answered"
    for found in (asked, closed, counted, left):
        assert (found["members"], found["after"]) == (True, True), found


@pytest.mark.full("programs of their own; calls from threads stay (tests/runner/test_calls_at_once.py)")
@pytest.mark.parametrize("num_replicas", ["1", "2"])
def test_an_event_loop(num_replicas: str) -> None:
    assert run("event_loop", num_replicas) == [{"in_a_thread": True, "goes_on": True, "in_the_loop": True}]


def test_a_program_that_ends_inside_a_call() -> None:
    assert run("exit_under_a_thread", "1", expected_status=7) == []


@pytest.mark.full("programs of their own, with two replicas each; an end under a thread stays")
@pytest.mark.slow
@pytest.mark.parametrize(("program", "num_replicas"), [
    ("exit_in_an_iterator", "1"), ("exit_in_a_stream", "1"), ("exit_without_closing", "1"),
    ("exit_in_an_iterator", "2"), ("exit_in_a_stream", "2"), ("exit_without_closing", "2"),
    ("exit_under_a_thread", "2"),
])  # fmt: skip
def test_other_programs_that_end_inside_a_call(program: str, num_replicas: str) -> None:
    assert run(program, num_replicas, expected_status=7) == []


@pytest.mark.full("eight LLMs are loaded, with workers, and three pairs of replicas; two in a process stay everywhere")
@pytest.mark.slow
@pytest.mark.parametrize(("num_llms", "num_replicas"), [(8, 1), (3, 2)])
def test_llms_one_after_the_other_leave_nothing(num_llms: int, num_replicas: int) -> None:
    """The first two bring what stays in any process: libraries, pools of threads, buffers."""
    found = run("one_after_the_other", str(num_llms), str(num_replicas))
    assert len({json.dumps(each["answers"]) for each in found}) == 1
    assert all(each["children"] == [] for each in found)
    second, last = found[1], found[-1]
    assert (last["fds"], last["threads"]) == (second["fds"], second["threads"])
    assert last["rss_kib"] - second["rss_kib"] <= _MOST_KIB_EACH * (num_llms - 2)
