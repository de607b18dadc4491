"""Runs programs over the emulated CANN as forks of one process that has imported torch, torch_npu and our own modules.

A start from nothing takes seconds for the imports alone. Before a fork no device is opened and nothing is computed.
Each program has its own environment variables; those that are read while modules load are the same for all of them.
Knows nothing of what the programs do.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

# The longest imports of the programs. What is not among them is imported by each.
_IMPORTED = ("torch", "torch_npu", "torch_npu.dynamo", "torch._dynamo", "torch._inductor.compile_fx", "npu_runner.llm",
             "npu_runner.platforms.npu.platform", "scripts.shapes.drawing")


class Zygote:
    """The forking process, as its user sees it. One program at a time."""

    def __init__(self, env: dict[str, str], cwd: Path):
        command = [sys.executable, "-m", "tests.cann.zygote"]
        self._process = subprocess.Popen(command, env=env, cwd=cwd, text=True, stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE)
        atexit.register(self.close)

    def run(self, module: str, arguments: list[str], *, env: dict[str, str], cwd: Path,
            timeout: float) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run` of `python -m module arguments...` with its output captured."""
        with tempfile.TemporaryDirectory() as folder:
            streams = [str(Path(folder) / name) for name in ("stdout", "stderr")]
            pid = int(self._ask(json.dumps([module, arguments, env, str(cwd), *streams])))
            alarm = _Alarm(pid, timeout)
            with alarm:
                status = int(self._ask(""))
            stdout, stderr = (Path(path).read_text(errors="replace") for path in streams)
        command = [sys.executable, "-m", module, *arguments]
        if alarm.has_rung:
            raise subprocess.TimeoutExpired(command, timeout, stdout, stderr)
        return subprocess.CompletedProcess(command, status, stdout, stderr)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the zygote ended with {self._process.wait()}"
        return answer


class _Alarm:
    """Kills a process after a while, unless it is left before."""

    def __init__(self, pid: int, seconds: float):
        self.has_rung = False
        self._timer = threading.Timer(seconds, self._ring, [pid])

    def _ring(self, pid: int) -> None:
        self.has_rung = True
        os.kill(pid, signal.SIGKILL)  # not reaped before its status is asked for: no other process has its number

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._timer.join()


def _serve() -> None:
    """Each line: a program. Answers its pid, and after the next line its exit status (negative: the signal)."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # torch_npu prints while it is imported
    for name in _IMPORTED:
        importlib.import_module(name)
    while line := sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            answers.close()
            _become(*json.loads(line))
        print(pid, file=answers, flush=True)
        sys.stdin.readline()
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def _become(module: str, arguments: list[str], env: dict[str, str], cwd: str, stdout: str, stderr: str) -> NoReturn:
    """This process, a fork, runs the program and ends as Python ends one."""
    for descriptor, path in ((1, stdout), (2, stderr)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _serve()
