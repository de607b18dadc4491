"""A fork of tests/zygote.py is to a program what a start from nothing is: the oracle is the real start. 3 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests import zygote

PROGRAM = """
import json, os, signal, sys
def words(name):
    return sorted(open(f"/proc/self/{name}").read().rstrip("\\0").split("\\0"))
print(json.dumps({
    "arguments": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "parent": os.getppid(), "name": __name__,
    "variables": dict(os.environ), "shown": [words("cmdline"), [w for w in words("environ") if w.startswith("OF_THE")]],
    "descriptors": sorted(int(n) for n in os.listdir("/proc/self/fd"))[:4], "has_session": os.getsid(0) == os.getpid(),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler, "read": sys.stdin.read(),
    "cores": sorted(os.sched_getaffinity(0))}))
print("an error", file=sys.stderr)
"""


def seen_by(module: ModuleType, command: list[str], folder: Path, **options: Any) -> tuple[Any, ...]:
    environment = {**os.environ, "OF_THE_TEST": "one two"}
    done = module.run([sys.executable, *command], cwd=folder, env=environment, input="rows", capture_output=True,
                      text=True, **options)
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("options", [{}, {"start_new_session": True}])
def test_a_fork_is_like_a_start_from_nothing(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    for command in (["-c", PROGRAM, "an argument"], ["-m", "program", "a", "b"], [str(tmp_path / "program.py")]):
        forked, started = (seen_by(module, command, tmp_path, **options) for module in (zygote, subprocess))
        for _, seen, _ in (forked, started):
            seen["variables"].pop("LC_CTYPE", None)  # Python's own, where no locale is set
            seen["descriptors"] = seen["descriptors"][:3]
        assert forked == started


@pytest.mark.parametrize("code", [
    "pass", "import sys; sys.exit(7)", "import sys; sys.exit('words')", "1 / 0", "raise KeyboardInterrupt",
    "import os; os.kill(os.getpid(), 9)", "import threading, time; threading.Timer(0.1, lambda: print('late')).start()",
    "import atexit; atexit.register(print, 'at the end')",
])
def test_it_ends_like_one(code: str, interruptible: None) -> None:
    forked, started = (module.run([sys.executable, "-c", code], capture_output=True, text=True)
                       for module in (zygote, subprocess))
    assert (forked.returncode, forked.stdout) == (started.returncode, started.stdout)
    assert forked.stderr.splitlines()[-1:] == started.stderr.splitlines()[-1:]


def test_a_fork_starts_others_and_they_end_with_it() -> None:
    inner = "import os, sys; print(os.getppid(), flush=True); sys.stdin.read()"
    code = ("import subprocess, sys, time; from tests import zygote\n"
            f"inner = zygote.Popen([sys.executable, '-c', {inner!r}], stdin=-1, stdout=-1)\n"
            "print(inner.stdout.readline().decode(), flush=True); time.sleep(600)")
    with zygote.Popen([sys.executable, "-c", code], cwd=zygote.ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert int(process.stdout.readline()) == process.pid
        process.kill()
        assert process.stdout.read() == "\n", "nobody holds it open"


def test_many_threads_start_forks_at_once() -> None:
    found: list[str] = []

    def ask(number: int) -> None:
        found.append(zygote.run([sys.executable, "-c", f"print({number})"], stdout=subprocess.PIPE, text=True).stdout)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [f"{number}\n" for number in range(8)]
