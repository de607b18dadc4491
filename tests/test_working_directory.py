"""No child process imports a file of the working directory, whatever it is called. Commands and processes are real.

Its files are called like modules that every child imports. Each notes which process has imported it, and is then the
real module, so that a process that may import it (the user's own) goes on.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from npu_runner.assets import EMBEDDED
from npu_runner.processes import commands
from tests.full_set import only_full

ROOT = Path(__file__).parents[1]
NAMES = ["mmap", "socket", "struct", "pickle", "typing", "numpy", "torch", "linecache", "runpy", "json", "traceback",
         "sitecustomize", "usercustomize"]  # fmt: skip
IMPOSTOR = """
import posix, sys
noted = posix.open({marks!r}, posix.O_WRONLY | posix.O_APPEND | posix.O_CREAT)
posix.write(noted, f"{{posix.getpid()}} {{__name__}}\\n".encode())
posix.close(noted)
here, kept, me = __file__.rpartition("/")[0], sys.path[:], sys.modules.pop(__name__)
sys.path[:] = [entry for entry in sys.path if entry not in ("", ".", here)]
try:
    sys.modules[__name__] = __import__(__name__)
except ModuleNotFoundError:
    sys.modules[__name__] = me
finally:
    sys.path[:] = kept
"""
COMMAND = "import sys\nfrom npu_runner.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
SCRIPT = """
import sys
from npu_runner import LLM, SamplingParams
if __name__ == "__main__":
    with LLM({model!r}, platform="cpu", kv_cache_bytes=16 << 20, max_model_len=256, preprocessing_workers=1,
             tensor_parallel_size=int(sys.argv[1])) as llm:
        print(llm.generate(["a circle"], SamplingParams(max_tokens=2))[0].text)
"""
JOB = ["batch", "-i", "in.jsonl", "-o", "out.jsonl", "--platform", "cpu", "--max-model-len", "256",
       "--kv-cache-bytes", "16M", "--progress", "off", "--preprocessing-workers", "1"]  # fmt: skip
WAYS = {
    "job": JOB,
    "replicas": [*JOB, "--data-parallel-size", "2"],
    "ranks": [*JOB, "--tensor-parallel-size", "2"],
    "doctor": ["doctor", "--skip-generation"],
    "generation": ["doctor"],
}
SCRIPTS = {"llm": "1", "llm of ranks": "2"}
WORKER = """
from npu_runner.serving.workers.pool import PoolLimits, WorkerPool
if __name__ == "__main__":
    with WorkerPool(abs, PoolLimits(num_workers=1, task_timeout_seconds=600.0)) as pool:
        pool.submit(-1)
        while (done := pool.get(1.0)) is None:
            pass
        assert done.result == 1
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory of impostors, in its subfolder `lib` as well."""
    found = tmp_path / "pictures"
    for place in (found, found / "lib"):
        place.mkdir()
        for name in NAMES:
            (place / f"{name}.py").write_text(IMPOSTOR.format(marks=str(tmp_path / "marks")))
    rows = [{"custom_id": str(n), "method": "POST", "url": "/v1/completions",
             "body": {"model": "shapes-vl", "prompt": "circle", "max_tokens": 2}} for n in range(4)]
    (found / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "command.py").write_text(COMMAND)
    (tmp_path / "script.py").write_text(SCRIPT.format(model=str(EMBEDDED["shapes-vl"])))
    return found


def importers(folder: Path, way: str, pythonpath: str, *options: str) -> tuple[int, set[str]]:
    """Run it; the exit status, and impostors that processes other than the first have imported."""
    name, arguments = ("script", [SCRIPTS[way]]) if way in SCRIPTS else ("command", WAYS[way])
    program = [str(folder.parent / f"{name}.py"), *arguments]
    with subprocess.Popen([sys.executable, *options, *program], cwd=folder, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": pythonpath}) as process:
        process.wait()
    marks = folder.parent / "marks"
    lines = [line.split() for line in marks.read_text().splitlines()] if marks.exists() else []
    return process.returncode, {name for pid, name in lines if int(pid) != process.pid}


def check(folder: Path, way: str, pythonpath: str) -> None:
    status, imported = importers(folder, way, pythonpath)
    assert not imported
    assert status == 0
    if way in ("job", "replicas", "ranks"):
        rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
        assert [row["error"] for row in rows] == [None] * 4


CLEAN, EMPTY_ENTRY, RELATIVE = str(ROOT), f"/x:{ROOT}:", f"lib:{ROOT}:."


@pytest.mark.parametrize("pythonpath", [RELATIVE, *only_full("each PYTHONPATH; relative entries stay",
                                                             CLEAN, EMPTY_ENTRY)])
def test_no_child_imports_a_file_of_the_working_directory(folder: Path, pythonpath: str) -> None:
    """A worker, which starts in a second; ranks, replicas and probes start by the same recipe (processes/child.py)."""
    (folder.parent / "command.py").write_text(WORKER)
    assert importers(folder, "job", pythonpath) == (0, set())


@pytest.mark.slow
@pytest.mark.full("each way to start a child with each PYTHONPATH; a worker stays, whose recipe all of them have")
@pytest.mark.parametrize("pythonpath", [CLEAN, EMPTY_ENTRY, RELATIVE])
@pytest.mark.parametrize("way", [*WAYS, *SCRIPTS])
def test_no_way_to_start_one_does(folder: Path, way: str, pythonpath: str) -> None:
    check(folder, way, pythonpath)


def test_without_the_option_of_later_pythons_it_is_not_imported_either(folder: Path,
                                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.10 has none, and puts the working directory first for what is started with -c."""
    monkeypatch.setattr(commands, "_SAFE_PATH", [])
    names = [name for name in NAMES[:-2] if name != "torch"]  # which takes seconds
    code = f"import sys; print(sys.path); import {', '.join(names)}"
    done = subprocess.run(commands.code_command(code), cwd=folder, env=commands.environment(), capture_output=True,
                          text=True, check=True)
    assert str(folder) not in done.stdout
    assert not (folder.parent / "marks").exists()


@pytest.mark.full("imports torch in two processes; a worker stays, which starts by the same recipe")
def test_a_probe_of_devices_does_not_either(folder: Path) -> None:
    """As `--data-parallel-size auto` asks: through a child of its own."""
    code = "from npu_runner.serving.replicas.placement import count_devices; print(count_devices('cpu'))"
    (folder.parent / "command.py").write_text(code)
    status, imported = importers(folder, "job", EMPTY_ENTRY)
    assert (status, imported) == (0, set())


def test_the_first_process_is_the_users_and_does(folder: Path) -> None:
    """An empty entry of PYTHONPATH works before our first line: what is found above is not found for want of files."""
    (folder.parent / "command.py").write_text("import struct")
    importers(folder, "job", EMPTY_ENTRY)
    assert "struct" in (folder.parent / "marks").read_text()


def test_a_checkout_that_is_not_installed_runs_from_its_own_folder(tmp_path: Path) -> None:
    """With -m, as its user does it. Another one, which is installed, is not taken by its children."""
    unread = shutil.ignore_patterns("__pycache__", "assets")
    shutil.copytree(ROOT / "npu_runner", tmp_path / "npu_runner", ignore=unread)
    (tmp_path / "npu_runner" / "ask.py").write_text(
        "import subprocess\nfrom npu_runner.processes import commands\n"
        "code = 'import npu_runner; print(npu_runner.__file__)'\n"
        "subprocess.run(commands.code_command(code), env=commands.environment(), check=True)\n")
    done = subprocess.run([sys.executable, "-m", "npu_runner.ask"], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": "/usr/bin:/bin"}, check=True)
    assert done.stdout.strip() == str(tmp_path / "npu_runner" / "__init__.py")


@pytest.mark.parametrize(("given", "kept"), [
    ("", None), (":", None), ("/x:", "/x"), ("/x::lib:/y", "/x:/y"), (".:/y", "/y"),
])  # fmt: skip
def test_grandchildren_have_no_relative_entry(given: str, kept: str | None) -> None:
    assert commands.environment({"PYTHONPATH": given, "HOME": "/"}) == {
        "HOME": "/", **({} if kept is None else {"PYTHONPATH": kept})}


def test_an_absolute_entry_that_is_the_working_directory_is_kept(tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has named it; only what the place of the start makes of an entry is dropped."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "/x:")
    assert str(tmp_path) not in commands.passed_path()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert str(tmp_path) in commands.passed_path()
