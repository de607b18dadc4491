"""A process that loads the workers' function once, and forks each worker from itself. Knows nothing of the function.

For functions whose imports cost seconds and hundreds of megabytes in each process. The forker has one thread, or it
forks nothing. It reaps its workers and reports the exit status of each. All of them end with it, and it with its
parent.
"""

from __future__ import annotations

import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from npu_runner.errors import NpuRunnerError
from npu_runner.processes.channel import Channel, ChannelClosed
from npu_runner.processes.child import Child, follow_parent
from npu_runner.processes.stopwatch import Stopwatch
from npu_runner.request.limits import MIB
from npu_runner.serving.workers.worker import NICENESS, serve

# To the forker: what to do with which worker. FORK comes with the worker's end of its channel.
_ORDER = struct.Struct("<cI")
_FORK, _KILL = b"f", b"k"
# From the forker: a worker, its process id, and its exit status or _RUNS. First comes number 0, with the KiB of private
# memory of the forker itself.
_REPORT = struct.Struct("<Iii")
_RUNS = 1 << 30
_ANSWER_SECONDS = 5.0
# Private memory of the forker and of each worker. Where workers take more, fewer of them run.
_FORKER_BYTES, _WORKER_BYTES = 400 * MIB, 80 * MIB


class ForkedWorker:
    """A worker as `Child` shows it to its pool."""

    def __init__(self, forker: Forker, number: int):
        self.forker, self.number = forker, number

    @property
    def pid(self) -> int:
        """0 until the forker has forked it."""
        return self.forker.pids.get(self.number, 0)

    def kill(self, patience: float = 0.0) -> int:
        """As `Child.kill`. A forker that does not answer is killed, too, and with it all of its workers. So is one that
        still loads: it has forked none."""
        self.forker.read()
        if not self.forker.pids:
            return self.forker.kill()
        if (status := self.forker.status_of(self.number, patience)) is None:
            self.forker.order(_KILL, self.number)
            status = self.forker.status_of(self.number, _ANSWER_SECONDS)
        return self.forker.kill() if status is None else status


class Forker:
    """The parent's end. All methods are one thread's. `variables`: the environment's, for all workers."""

    def __init__(self, function: Callable[[Any], Any], *, memory_bytes: int, inherited: Sequence[int],
                 variables: Mapping[str, str], timeout_seconds: float):
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._child = Child("npu forker", __name__, theirs.fileno(), memory_bytes,
                                descriptors=[theirs.fileno(), *inherited], variables=variables)
        self.is_running = True
        self._num_forked = 0
        self.pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._unread = b""
        try:
            Channel(self._socket, timeout_seconds).send(function)
        except ChannelClosed:
            self.is_running = False
        self._socket.setblocking(False)

    @property
    def pid(self) -> int:
        return self._child.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def fork(self, end: socket.socket) -> ForkedWorker:
        """A worker that serves the other side of `end`, as soon as the function is loaded."""
        self._num_forked += 1
        self.order(_FORK, self._num_forked, end.fileno())
        return ForkedWorker(self, self._num_forked)

    def order(self, what: bytes, number: int, *descriptors: int) -> None:
        try:
            socket.send_fds(self._socket, [_ORDER.pack(what, number)], list(descriptors))
        except OSError:  # it is dead, or has left a socket full of orders unread
            self.is_running = False

    def read(self) -> None:
        """Read the reports that have come."""
        try:
            data = self._socket.recv(1 << 16)
            self.is_running = self.is_running and bool(data)
        except BlockingIOError:
            return
        except OSError:
            self.is_running = False
            return
        self._unread += data
        while len(self._unread) >= _REPORT.size:
            number, pid, status = _REPORT.unpack_from(self._unread)
            self._unread = self._unread[_REPORT.size :]
            self.pids[number] = pid
            if status != _RUNS:
                self._statuses[number] = status

    def status_of(self, number: int, timeout_seconds: float) -> int | None:
        """The exit status of a worker that has ended. A dead forker's own stands for all that it has not reported."""
        watch = Stopwatch()
        while True:
            self.read()
            if number in self._statuses:
                return self._statuses.pop(number)
            if not self.is_running:
                return self.kill()
            if watch.exceeds(timeout_seconds):
                return None
            select.select([self._socket], [], [], watch.poll_seconds(timeout_seconds))

    def kill(self) -> int:
        """Kill and reap it; returns its exit status. The kernel kills its workers."""
        self.is_running = False
        return self._child.kill(0.05)

    def close(self) -> None:
        self.kill()
        self._socket.close()

    def num_affordable(self, num_workers: int, worker: ForkedWorker) -> int:
        """The most workers, up to `num_workers`, in 400 MiB and 80 MiB for each of these, if each takes as much private
        memory as `worker` does."""
        left = _FORKER_BYTES + num_workers * _WORKER_BYTES - (self.pids[0] << 10)
        return max(1, min(num_workers, left // max(1, private_bytes(worker.pid))))


def private_bytes(pid: int) -> int:
    """Memory that a process shares with no other; 0 where it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            lines = [line.split() for line in file]
    except OSError:
        return 0
    return sum(int(words[1]) << 10 for words in lines if words[0].startswith("Private_"))


# -- in the forker -----------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Fork workers for the parent on the other end of this socket. Returns when the parent closes it or dies.

    `arguments`: the socket's descriptor; the address space of a worker's tasks, as for worker.py.
    """
    descriptor, memory_bytes = map(int, arguments)
    os.nice(NICENESS)
    control = socket.socket(fileno=descriptor)
    function: Callable[[Any], Any] | NpuRunnerError
    try:
        function, _ = Channel(control).receive()
    except ChannelClosed:
        return
    except NpuRunnerError as error:  # every worker says so
        function = error
    gc.collect()
    gc.freeze()  # a collection in a worker would write to every object, and so copy all shared memory
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"the forker has {threads} threads: an import started them, and a fork would lose them"
    control.sendall(_REPORT.pack(0, private_bytes(os.getpid()) >> 10, _RUNS))
    woken, wakes = os.pipe()
    for end in (woken, wakes):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    numbers: dict[int, int] = {}
    """Workers by process id."""
    while True:
        ready, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in ready:
            os.read(woken, 1 << 16)
            _report_ended(control, numbers)
        if control.fileno() not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(control, _ORDER.size, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        what, number = _ORDER.unpack(data)
        if what == _KILL:
            for pid in [pid for pid, its in numbers.items() if its == number]:
                os.kill(pid, signal.SIGKILL)
            continue
        parent, (end,) = os.getpid(), descriptors
        if (pid := os.fork()) == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for each in (woken, wakes):
                os.close(each)
            control.close()
            _work(parent, end, function, memory_bytes)
        os.close(end)
        numbers[pid] = number
        control.sendall(_REPORT.pack(number, pid, _RUNS))


def _report_ended(control: socket.socket, numbers: dict[int, int]) -> None:
    while numbers:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        if pid in numbers:
            control.sendall(_REPORT.pack(numbers.pop(pid), pid, os.waitstatus_to_exitcode(status)))


def _work(parent: int, end: int, function: Callable[[Any], Any] | NpuRunnerError, memory_bytes: int) -> None:
    """The whole life of a worker; it does not return."""
    status = 1
    try:
        follow_parent(parent, "npu worker")
        os.setsid()
        serve(function, Channel(socket.socket(fileno=end)), memory_bytes)
        status = 0
    except BaseException:  # noqa: BLE001 - the border of the process; its parent sees the status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
