"""The recipe by which workers, ranks and replicas are started: real processes, killed for real (6 s in all)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_runner.processes.child import Child, describe_exit, in_start_thread, is_ending
from tests.processes.child_programs import NAME

pytestmark = pytest.mark.from_nothing("the start is what is tested")
ROOT = Path(__file__).parents[2]


def until(is_so: Callable[[], bool]) -> None:
    """A minute at most, so that a child that outlives its parent fails the test and does not stop it."""
    for _ in range(12_000):
        if is_so():
            return
        time.sleep(0.005)
    raise AssertionError("it has not come about in a minute")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("how", ["plainly", "in a thread that ends", "after a fork", "holding the GIL"])
def test_a_child_lives_as_long_as_its_parent(how: str) -> None:
    parent = subprocess.Popen([sys.executable, "-m", NAME, how], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    starter, child = map(int, parent.stdout.readline().split())
    time.sleep(0.2)
    assert is_alive(child), "the thread that asked for it has ended, its process has not"
    os.kill(starter, signal.SIGKILL)
    until(lambda: not is_alive(child))
    parent.wait()


def test_how_a_child_ended_is_said(capfd: pytest.CaptureFixture[str]) -> None:
    ends = {"exit status 7": ("exit", 7), "killed by SIGSEGV": ("die", "SIGSEGV"), "exit status 0": ("print",)}
    children = {how: Child("npu test", NAME, *arguments) for how, arguments in ends.items()}
    for how, child in children.items():
        status = child.exit_status()
        assert status is not None
        assert describe_exit(status) == how
        assert not child.is_running
        assert child.kill() == status, "killed later, it keeps its own status"
    assert describe_exit(-70) == "killed by signal 70"
    assert capfd.readouterr() == ("", "on standard output\n"), "the parent's standard output may be a job's answers"


def test_one_that_does_not_end_is_killed_once_its_time_is_over() -> None:
    child = Child("npu test", NAME, "sleep")
    assert child.exit_status(0.01) is None
    assert child.kill(0.01) == -signal.SIGKILL


def test_a_stopped_child_is_noticed_and_a_continued_one_is_not_held_against_it() -> None:
    child = Child("npu test", NAME, "sleep")
    until(lambda: Path(f"/proc/{child.pid}/comm").read_text().strip() == "npu test")
    assert not child.is_stopped_for(0.0)
    os.kill(child.pid, signal.SIGSTOP)
    until(lambda: child.is_stopped)
    until(lambda: child.is_stopped_for(0.1))
    os.kill(child.pid, signal.SIGCONT)
    until(lambda: not child.is_stopped)
    assert not child.is_stopped_for(0.1)
    child.kill()


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_a_child_has_the_cores_of_the_thread_that_asks_for_it(capfd: pytest.CaptureFixture[str]) -> None:
    Child("npu test", NAME, "exit", 0).exit_status()  # the thread that starts children is there, with all cores
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        Child("npu test", NAME, "affinity").exit_status()
    finally:
        os.sched_setaffinity(0, before)
    assert capfd.readouterr().err == f"[{min(before)}]\n"


@pytest.mark.usefixtures("interruptible")
def test_what_an_interrupted_caller_never_sees_is_ended() -> None:
    is_asked, is_over = threading.Event(), threading.Event()
    ended: list[str] = []

    def start() -> str:
        is_asked.set()
        is_over.wait()
        return "started"

    def interrupt() -> None:
        is_asked.wait()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            in_start_thread(start, unclaimed=ended.append)
        assert ended == []
    finally:
        is_over.set()
    until(lambda: ended == ["started"])


def test_what_cannot_be_started_is_the_callers_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        in_start_thread(lambda: os.fstat(-1), unclaimed=print)


def test_a_process_that_was_killed_is_ending_before_it_is_reaped() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_ending(process.pid)
        process.kill()
        until(lambda: is_ending(process.pid))
    assert is_ending(process.pid), "reaped"
