"""scripts/changed_tests.py: what it follows from a changed file to tests, in files written for this."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import changed_tests
from scripts.changed_tests import Reach

FILES = {
    "npu_runner/__init__.py": '_HOMES = {"LLM": "npu_runner.llm"}',
    "npu_runner/__main__.py": "from npu_runner.cli import main",
    "npu_runner/cli.py": "def main():\n    from npu_runner.batch import job\n    job.run()",
    "npu_runner/batch/__init__.py": "",
    "npu_runner/batch/job.py": '"""Imported in tests/test_docs.py."""\nSTARTS = ["-m", "npu_runner.worker"]',
    "npu_runner/worker.py": "",
    "npu_runner/llm.py": "from npu_runner.strategies import pick",
    "npu_runner/formats/__init__.py": "",
    "npu_runner/formats/reader.py": "import_module(f'npu_runner.formats.{name}')",
    "npu_runner/formats/int8.py": "",
    "strategies/__init__.py": "def pick():\n    return iter_modules(__path__)",
    "strategies/olmo2.py": "from npu_runner.strategies.base import Base",
    "strategies/base.py": "",
    "scripts/serve.py": "",
    "tests/zygote.py": "from npu_runner import cli",
    "tests/conftest.py": """
from tests import zygote
@pytest.fixture
def checkpoint():
    from tests.checkpoints import make
@pytest.fixture(autouse=True)
def always():
    import tests.threads
""",
    "tests/checkpoints.py": "",
    "tests/threads.py": "",
    "tests/batch/conftest.py": "from tests.batch.folder import Job",
    "tests/batch/folder.py": "",
    "tests/batch/test_command.py": 'run([sys.executable, "-m", "npu_runner", "batch"])',
    "tests/batch/test_job.py": "from npu_runner.batch.job import run",
    "tests/core/test_string.py": 'PROGRAM = "import sys\\nfrom npu_runner import LLM"',
    "tests/core/test_near.py": "from .near import helper",
    "tests/core/near.py": "from npu_runner.formats import reader",
    "tests/core/test_fixture.py": "def test_it(checkpoint): ...",
    "tests/core/test_script.py": 'run(["bash", "scripts/serve.sh"])',
    "tests/core/test_pages.py": 'PAGES = [*Path("docs").glob("*.md")]',
    "tests/core/test_alone.py": '"""No test of npu_runner.batch.job, docs.md or tests.checkpoints."""',
    "tests/core/preload.py": "",
}
ALL = sorted(name for name in FILES if "/test_" in name)
COMMAND = ["tests/batch/test_command.py", "tests/core/test_script.py"]


@pytest.mark.parametrize(("changed", "reached"), [
    ("npu_runner/batch/job.py", ["tests/batch/test_job.py", *COMMAND]),
    ("npu_runner/batch/__init__.py", ["tests/batch/test_job.py", *COMMAND]),
    ("npu_runner/worker.py", ["tests/batch/test_job.py", *COMMAND]),
    ("npu_runner/cli.py", COMMAND),
    ("strategies/olmo2.py", ["tests/core/test_string.py"]),
    ("strategies/base.py", ["tests/core/test_string.py"]),
    ("npu_runner/formats/int8.py", ["tests/core/test_near.py"]),
    ("npu_runner/gone.py", []),
    ("scripts/serve.py", ["tests/core/test_script.py"]),
    ("tests/checkpoints.py", ["tests/core/test_fixture.py"]),
    ("tests/batch/folder.py", ["tests/batch/test_command.py", "tests/batch/test_job.py"]),
    ("tests/batch/conftest.py", ["tests/batch/test_command.py", "tests/batch/test_job.py"]),
    ("tests/core/test_alone.py", ["tests/core/test_alone.py"]),
    ("docs/rows.md", ["tests/core/test_pages.py"]),
    ("tests/zygote.py", ALL), ("tests/threads.py", ALL), ("tests/conftest.py", ALL),
    ("tests/core/preload.py", ["tests"]), ("npu_runner/kernel.cu", ["tests"]), ("pyproject.toml", ["tests"]),
])
def test_a_change_reaches(changed: str, reached: list[str], tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert sorted(Reach(tmp_path, gone=[changed]).tests_of([changed])) == sorted(reached)


def test_the_nearest_tests_come_first(tmp_path: Path) -> None:
    from_a, from_b = "from tests.a import x", "from tests.b import x"
    texts = {"a": "", "b": from_a, "test_a": from_b, "test_b": from_b, "test_c": from_a}
    (tmp_path / "tests").mkdir()
    for name, text in texts.items():
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    assert Reach(tmp_path).tests_of(["tests/a.py"]) == ["tests/test_c.py", "tests/test_a.py", "tests/test_b.py"]


def test_changes_are_those_of_the_branch_and_of_the_working_tree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*arguments: str) -> None:
        names = ["-c", "user.name=n", "-c", "user.email=e"]
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    git("init", "-b", "main")
    for branch, file in (("main", "first"), ("other", "second")):
        git("checkout", "-B", branch)
        (tmp_path / file).write_text(file)
        git("add", file)
        git("commit", "-m", file)
    (tmp_path / "third").write_text("")
    (tmp_path / "first").unlink()
    assert changed_tests.changed_since("HEAD") == ["first", "third"]
    assert changed_tests.changed_since("main") == ["first", "second", "third"]


@pytest.mark.parametrize(("listed", "ran"), [
    ("tests/test_a.py\\ntests/test_b.py", ["not full tests/test_a.py tests/test_b.py -x"]), ("", []),
])
def test_the_test_command_runs_the_listed_tests(listed: str, ran: list[str], tmp_path: Path) -> None:
    programs = {
        "scripts/setup_env.sh": "", ".venv/bin/ruff": "", ".venv/bin/mypy": "",
        ".venv/bin/python": f"""case "$*" in
            *changed_tests*) [ "$3" = HEAD ] && printf '{listed}' ;;
            *pytest*) echo "ran ${{*: -4}}" ;;
        esac""",
    }
    for name, text in programs.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    shutil.copy(changed_tests.ROOT / "scripts/test.sh", tmp_path / "scripts")
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TEST_")}
    done = subprocess.run(["bash", "scripts/test.sh", "--changed", "-x"], cwd=tmp_path, env=variables,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.removeprefix("ran ") for line in done.stdout.splitlines() if line.startswith("ran ")] == ran
