"""A child process for its parent: running, stopped or ended. Also the start of the child (`main`). Knows no work.

One recipe for workers, ranks, replicas and probes. Nothing is imported from the working directory (commands.py). Ctrl-C
in a terminal does not reach it. Its standard output is the parent's standard error unless a file is given. It has a
name in `ps`, survives output that is not read, and dies with its parent.

For Linux, a child's parent is the thread that started it, and callers' threads end. So one thread, which lasts as long
as the process, starts all of them.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, Any, TypeVar

from npu_runner.processes import commands
from npu_runner.processes.log_level import show_log
from npu_runner.processes.patient_streams import make_standard_streams_patient
from npu_runner.processes.stopwatch import Stopwatch

Result = TypeVar("Result")

_POLL_SECONDS = 0.5
"""Python sees a signal that came just before a wait only once the wait is over; so no wait lasts longer than this."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_PF_EXITING = 4

_lock = threading.Lock()
_start_queue: tuple[int, queue.SimpleQueue[Callable[[], None]]] | None = None


class Child:
    """Runs `main(arguments)`, as text, of a module of this package.

    title: its name in `ps` and `top`; Linux keeps 15 bytes. descriptors: inherited, with the same numbers. variables:
    added to `environment`, by default this process's. output: a file for both of its streams.
    """

    def __init__(self, title: str, module: str, *arguments: object, descriptors: Sequence[int] = (),
                 variables: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None,
                 python: str = sys.executable, output: IO[str] | None = None):
        command = commands.module_command(__name__, os.getpid(), title, module, *arguments,
                                          python=python)
        own_environment = {**commands.environment(environment), **(variables or {})}

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command, pass_fds=descriptors, env=own_environment, start_new_session=True, stdin=subprocess.DEVNULL,
                stdout=2 if output is None else output,  # the parent's own may be a job's answers
                stderr=output,
            )

        self._process = in_start_thread(start, unclaimed=_end)
        self._stopped: Stopwatch | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def exit_status(self, timeout: float | None = None) -> int | None:
        """Once it has ended, negative for a signal; None: it has not, within `timeout` seconds (None: wait)."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def signal_end(self) -> None:
        """Kill it without waiting until it is gone: `kill` does that."""
        if self.is_running:
            self._process.kill()

    def kill(self, patience: float = 0.0) -> int:
        """Kill and reap it; returns its exit status. It may be dying by itself, and then its own status says why: it is
        given `patience` seconds for that."""
        if patience and self.is_running:
            self.exit_status(patience)
        return _end(self._process)

    @property
    def is_ending(self) -> bool:
        """Whether it has ended or is about to. The system may need seconds to take a device from a killed process."""
        return not self.is_running or is_ending(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether the process is stopped (the function `is_stopped`)."""
        return is_stopped(self.pid)

    def is_stopped_for(self, seconds: float) -> bool:
        """Whether it has been seen stopped for longer, by looks that come every second or so.

        The system's word for it, and no heartbeat: a compiler may hold the GIL for minutes.
        """
        if not self.is_stopped:
            self._stopped = None
            return False
        self._stopped = self._stopped or Stopwatch()
        return self._stopped.exceeds(seconds)


def is_stopped(pid: int) -> bool:
    """As SIGSTOP leaves a process. False where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] == "T"


def is_ending(pid: int) -> bool:
    """Whether the system is about to end a process, or has done so."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    state, *numbers = text.rpartition(")")[2].split()
    return state in "ZX" or bool(int(numbers[5]) & _PF_EXITING)


def describe_exit(status: int) -> str:
    """The end of a process in words. `status`: as returned by `Child.exit_status`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _end(process: subprocess.Popen[bytes]) -> int:
    if process.poll() is None:
        process.kill()
    return process.wait()


def in_start_thread(start: Callable[[], Result], *, unclaimed: Callable[[Result], object]) -> Result:
    """Call `start` in that thread, with the CPU affinity of the calling thread, and return or raise its result.

    If the wait is interrupted (Ctrl-C), the interrupt is raised, and `unclaimed` receives what is started later.
    """
    cores = os.sched_getaffinity(0)
    future: Future[Result] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            os.sched_setaffinity(0, cores)
            future.set_result(start())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            future.set_exception(error)

    _queue().put(work)
    try:
        while not future.done():
            wait([future], timeout=_POLL_SECONDS)
        return future.result()
    except BaseException:
        future.add_done_callback(lambda done: None if done.exception() else unclaimed(done.result()))
        raise


def _queue() -> queue.SimpleQueue[Callable[[], None]]:
    """The queue of this process's thread; a forked process starts without one."""
    global _start_queue
    with _lock:
        if _start_queue is None or _start_queue[0] != os.getpid():
            found: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
            # A daemon: at the interpreter's end it must not go before children that end in good order.
            threading.Thread(target=_work, args=(found,), name="start-children", daemon=True).start()
            _start_queue = os.getpid(), found
        return _start_queue[1]


def _work(todo: queue.SimpleQueue[Any]) -> None:
    while True:
        todo.get()()


def _forget_lock() -> None:
    """In a forked process: another thread may have held it."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forget_lock)


def main(arguments: list[str]) -> None:
    """PARENT TITLE MODULE ARGUMENT...: in the child, before it calls `main(arguments)` of that module."""
    parent, title, module, *own = arguments
    follow_parent(int(parent), title)
    make_standard_streams_patient()
    show_log()
    importlib.import_module(module).main(own)


def follow_parent(parent: int, title: str) -> None:
    """Give this process a name, and let it die with its parent: after a SIGKILL no child may go on computing, loading
    or decoding.

    The kernel sends the signal when the thread that started this process ends: `in_start_thread` has one that lasts.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title.encode())
