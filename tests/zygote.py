"""Starts of Python in tests are forks of a process that has imported torch and this package, but computed nothing.

A start from nothing takes seconds of imports. A fork is a process of its own in all else: a child of the process that
starts it, with its own environment, descriptors, directory, signals and session, its name and variables in /proc, and
Python's own end. Forks start others in the same way.
Tests whose subject is the start itself take real ones (the mark `from_nothing`). Knows nothing of what the programs do.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from npu_runner.platforms import host
from npu_runner.processes import child
from npu_runner.serving.replicas import placement

ROOT = Path(__file__).parents[1]
_PR_SET_CHILD_SUBREAPER = 36
_ROOM = 32 << 10
"""Bytes of arguments, and of variables, that /proc can show of a fork."""
_WORKER = "npu_runner.serving.workers.worker"
# What ends without starting another process of ours.
_STARTS_NONE = {_WORKER, "npu_runner.engine.executors.worker"}
# Where that import is refused (refuse_transformers.py), no program does it.
_ORACLE = () if "refuse_transformers" in sys.modules else ("transformers", "transformers.models.auto")
_CPU = ("torch", *_ORACLE, "npu_runner.llm", "npu_runner.cli.main",
        "npu_runner.batch.job.run", "npu_runner.platforms.cpu.platform", "npu_runner.runner.model_runner",
        "npu_runner.serving.replicas.process_main", "npu_runner.strategies", "tests.batch.scripted")
# A worker needs no torch, and a fork of a process with a tenth of the memory takes a fifth of the time.
_OF_WORKERS = (_WORKER, "npu_runner.prompts.processor", "tests.batch.scripted")
# What captures and compiles graphs takes the longest.
_NPU = ("torch", "torch_npu", "torch_npu.dynamo", "torch._dynamo", "torch._inductor.compile_fx", "npu_runner.llm",
        "npu_runner.platforms.npu.platform", "scripts.shapes.drawing")


class Zygote:
    """The forking process, as its user sees it."""

    def __init__(self, ours: socket.socket):
        self._socket = ours
        self._lock = threading.Lock()
        self._owner = os.getpid()

    process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, modules: Sequence[str], env: Mapping[str, str]) -> Zygote:
        """One that has imported these."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "tests.zygote", str(theirs.fileno()), ",".join(modules), "x" * _ROOM]
        with theirs:
            process = subprocess.Popen(
                command, env={**env, "ROOM": "x" * _ROOM, "OPENBLAS_NUM_THREADS": "1"}, cwd=ROOT,
                stdin=subprocess.DEVNULL, stdout=2, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        found = cls(ours)
        found.process = process
        return found

    def close(self) -> None:
        self._socket.close()
        if self.process is not None:
            self.process.wait()

    @property
    def is_ours(self) -> bool:
        """A process that was forked otherwise has no zygote."""
        return self._owner == os.getpid()

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """The pid of a new child of this process; `descriptors` are its, under the numbers of the request."""
        body = json.dumps(request).encode()
        with self._lock, _orphans_are_ours():
            socket.send_fds(self._socket, [len(body).to_bytes(8, "little")], list(descriptors))
            self._socket.sendall(body)
            answer = self._socket.recv(8)
        assert answer, "the zygote has ended; what it printed stands above"
        return int.from_bytes(answer, "little")


class Popen(subprocess.Popen[Any]):
    """As subprocess.Popen: Python's `-c` and `-m` are forked, and everything else is started as ever."""

    def _execute_child(self, *given: Any) -> None:
        start = inspect.signature(subprocess.Popen._execute_child).bind(self, *given).arguments  # type: ignore[attr-defined]
        program = _program(start["args"])
        zygote = zygote_for(os.environ if start["env"] is None else start["env"], program or ())
        if program is None or zygote is None or start["preexec_fn"] or start["shell"]:
            super()._execute_child(*given)  # type: ignore[misc]
            return
        streams = [start[name] if start[name] >= 0 else number
                   for number, name in enumerate(("p2cread", "c2pwrite", "errwrite"))]
        request = {
            "program": program, "env": dict(start["env"] or os.environ), "cwd": os.fspath(start["cwd"] or os.getcwd()),
            "numbers": [0, 1, 2, *start["pass_fds"]], "has_session": bool(start["start_new_session"]),
            "cores": list(os.sched_getaffinity(0)), "command": list(map(os.fspath, start["args"])),
            "ignores_interrupts": signal.getsignal(signal.SIGINT) == signal.SIG_IGN,
            "may_start_others": not _STARTS_NONE & set(program),
        }  # fmt: skip
        self.pid = zygote.fork(request, [*streams, *start["pass_fds"]])
        self._child_created = True
        self._close_pipe_fds(*(start[name] for name in (  # type: ignore[attr-defined]
            "p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def run(command: Sequence[Any], *, input: Any = None, timeout: float | None = None, check: bool = False,
        capture_output: bool = False, **options: Any) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(command, **options) as process:
        try:
            out, err = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


def unless_full() -> Any:
    """What starts a program whose own start others prove: forks in the fast set, `subprocess` in the full one."""
    from tests import full_set  # whose imports no fork needs

    return sys.modules[__name__] if full_set.is_fast else subprocess


_FORKING = types.SimpleNamespace(**{**vars(subprocess), "Popen": Popen, "run": run})
_Kind = tuple[bool, str, bool]
_found: dict[_Kind, Zygote] = {}
"""Of this process, by `_kind` of what it forks."""
_making = threading.Lock()
_is_fork = False
_VARIABLES = dict(os.environ)
start_from_nothing = False
"""Set by tests whose subject is the start."""


def fork_children() -> None:
    """From now on workers, ranks and replicas that this process starts are forks."""
    child.subprocess = placement.subprocess = _FORKING  # type: ignore[assignment]


def close_all() -> None:
    while _found:
        _found.popitem()[1].close()


def zygote_for(env: Mapping[str, str], program: Sequence[str] = ()) -> Zygote | None:
    """The zygote of such programs with such an environment; None: they are started from nothing."""
    if start_from_nothing:
        return None
    is_npu, version, is_worker = kind = _kind(env, () if _is_fork else program)
    with _making:
        if kind not in _found and not _is_fork:
            from tests.cann.environment import environment

            switches = {"cann_version": version} if version else {}
            modules = _OF_WORKERS if is_worker else _NPU if is_npu else _CPU
            _found[kind] = Zygote.start(modules, environment(**switches) if is_npu else _VARIABLES)
        zygote = _found.get(kind)
    return zygote if zygote is not None and zygote.is_ours else None


def _kind(env: Mapping[str, str], program: Sequence[str] = ()) -> _Kind:
    """Whether it is over the emulated CANN, and the version if that is a CANN 8: torch_npu asks for it while it is
    imported, and calls other functions there. Whether it is a worker; those of a fork are forks of that one."""
    version, is_npu = env.get("CANN_EMU_CANN_VERSION", ""), "CANN_EMU" in env
    return is_npu, version if version.startswith("8.") else "", not is_npu and _WORKER in program


def _program(command: Any) -> list[str] | None:
    """["-c", code, ...], ["-m", module, ...] or [file, ...] of this Python; None: another command."""
    words = [os.fspath(word) for word in command] if isinstance(command, (list, tuple)) else []
    if words[:1] != [sys.executable]:
        return None
    program = words[2:] if words[1:2] == ["-P"] else words[1:]
    return program if program and (program[0] in ("-c", "-m") or program[0].endswith(".py")) else None


@contextlib.contextmanager
def _orphans_are_ours() -> Iterator[None]:
    """A fork of the zygote's fork becomes a child of this process, as its nearest ancestor that asks for orphans."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _serve(theirs: socket.socket) -> None:
    """Fork what is asked for until the other side has ended."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(theirs, 8, 250)
        if not head:
            return
        body = theirs.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL)
        readable, writable = os.pipe()
        between = os.fork()
        if between == 0:
            between = os.getpid()
            if pid := os.fork():
                os.write(writable, pid.to_bytes(8, "little"))
                os._exit(0)
            theirs.detach()
            _end(_become(json.loads(body), descriptors, between))
        os.waitpid(between, 0)
        pid_bytes = os.read(readable, 8)
        for descriptor in (*descriptors, readable, writable):
            os.close(descriptor)
        theirs.sendall(pid_bytes)


def _become(request: dict[str, Any], descriptors: list[int], between: int) -> int:
    """Run the program in this process, a fork; its exit status, negative for a signal."""
    while os.getppid() == between:  # until that one has ended; then the one that asked is the parent
        time.sleep(0.0001)
    _take(descriptors, request["numbers"])
    _found.clear()
    if request["may_start_others"]:
        _found[_kind(request["env"])] = _zygote_of_a_fork()
    _surround(request)
    if "torch_npu" in sys.modules:  # the emulated CANN may have read its table of failures before
        ctypes.CDLL("libascendcl.so").cann_emu_set_failures(os.environ.get("CANN_EMU_FAIL", "").encode())
    else:
        atexit._clear()
    try:
        _run(*request["program"])
    except SystemExit as end:
        if not isinstance(end.code, str):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - as Python does with what nobody catches
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _surround(request: dict[str, Any]) -> None:
    """What a start of Python has around it."""
    if request["has_session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(request["env"])
    _show(request["command"], request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)  # type: ignore[misc]
    signal.signal(signal.SIGINT, signal.SIG_IGN if request["ignores_interrupts"] else signal.default_int_handler)
    os.sched_setaffinity(0, request["cores"])
    if torch := sys.modules.get("torch"):
        # What OpenMP read as it was loaded. By themselves tests compute with one thread (conftest.py).
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


def _end(status: int) -> NoReturn:
    """As Python ends, without taking modules and libraries down: it copies a fork's pages for a quarter of a second.

    The emulated CANN says then what it counted, where it was asked to.
    """
    if "CANN_EMU_COUNTERS" in os.environ:
        sys.exit(status)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _take(descriptors: list[int], numbers: list[int]) -> None:
    """These under those numbers, and no other one open."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 1 + max(numbers)) for descriptor in descriptors]
    for descriptor, number in zip(above, numbers, strict=True):
        os.dup2(descriptor, number)
    _close_all_but(numbers)


def _close_all_but(numbers: Sequence[int]) -> None:
    for number in map(int, os.listdir("/proc/self/fd")):
        if number not in numbers:
            with contextlib.suppress(OSError):  # the one that lists them
                os.close(number)


def _zygote_of_a_fork() -> Zygote:
    """Forked before anything was computed here. It ends with this process."""
    ours, theirs = socket.socketpair()
    if os.fork():
        theirs.close()
        return Zygote(ours)
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    ours.detach()
    _close_all_but([0, 1, 2, theirs.fileno()])
    _show(["zygote"], {})  # else it would look like one of those that it can start
    _serve(theirs)
    os._exit(0)


def _show(command: list[str], env: Mapping[str, str]) -> None:
    """In /proc, where replicas and tests look for processes. The environment itself lies elsewhere by now."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    for address, end, texts in (
        (int(fields[45]), int(fields[46]), command),
        (int(fields[47]), int(fields[48]), [f"{name}={value}" for name, value in env.items()]),
    ):
        text = b"".join(os.fsencode(one) + b"\0" for one in texts)
        assert len(text) <= end - address, f"{len(text)} bytes of arguments or variables are too many"
        ctypes.memset(address, 0, end - address)
        ctypes.memmove(address, text, len(text))


def _run(how: str, *arguments: str) -> None:
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    first = {"-c": "", "-m": os.getcwd()}.get(how, os.path.dirname(how))
    sys.path[:] = [first, *filter(None, given), *(entry for entry in sys.path[1:] if entry not in given)]
    sys.argv = ["-c" if how == "-c" else arguments[0] if how == "-m" else how, *arguments[how in ("-c", "-m"):]]
    if how == "-m":
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        runpy.run_path(how, run_name="__main__")


def main(descriptor: str, modules: str, _: str) -> None:
    global _is_fork
    _is_fork = True
    fork_children()
    host.subprocess = _FORKING  # type: ignore[assignment] - the doctor's
    for name in modules.split(","):
        importlib.import_module(name)
    _show(["zygote"], {})
    gc.collect()
    gc.freeze()  # a fork shares what stays untouched
    _serve(socket.socket(fileno=int(descriptor)))


if __name__ == "__main__":
    from tests import zygote  # by its name, as its forks find it

    zygote.main(*sys.argv[1:])
