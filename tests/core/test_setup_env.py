"""setup_env.sh takes the newest Python that is supported, and says what is missing, in a copy of the checkout."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# A Python that says which it is, and does not make environments: installing is not the point here.
PYTHON = """#!/bin/sh
case "$*" in
    *"ensurepip, venv"*) exit {venv_status} ;;
    "-m venv"*) echo "made by {name}"; exit 7 ;;
    *"%d.%d"*) echo 3.13 ;;
    *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "setup_env.sh", tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name in ("bash", "dirname", "cat"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    return tmp_path


def add_python(checkout: Path, name: str, *, venv_status: int = 0) -> None:
    path = checkout / "bin" / name
    path.write_text(PYTHON.format(name=name, venv_status=venv_status, python=sys.executable))
    path.chmod(0o755)


def setup_env(checkout: Path, *names: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(checkout / "bin" / "bash"), "scripts/setup_env.sh", *names]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True,
                          env={"PATH": str(checkout / "bin"), **variables})


def test_the_newest_python_is_taken_unless_another_is_named(checkout: Path) -> None:
    for name in ("python3", "python3.11", "python3.13"):
        add_python(checkout, name)
    assert "made by python3.13\n" in setup_env(checkout).stdout
    assert "made by python3.11\n" in setup_env(checkout, PYTHON="python3.11").stdout


def test_without_a_python_that_is_supported_it_says_which_are(checkout: Path) -> None:
    done = setup_env(checkout)
    assert done.returncode == 1
    assert "Python 3.10 to 3.14 is needed" in done.stderr
    assert "PYTHON=/no/python does not run" in setup_env(checkout, PYTHON="/no/python").stderr


def test_where_venv_is_missing_it_names_the_package(checkout: Path) -> None:
    add_python(checkout, "python3.13", venv_status=1)
    done = setup_env(checkout)
    assert done.returncode == 1
    assert "apt install python3.13-venv" in done.stderr
    assert not (checkout / ".venv").exists()


def test_the_development_environment_is_the_plain_one_too(checkout: Path) -> None:
    """scripts/demo.sh, which CI runs behind the tests, installs nothing once more."""
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-tests.txt", "pyproject.toml"):
        (checkout / name).write_text(name)
    (checkout / ".venv" / "bin").mkdir(parents=True)
    python = checkout / ".venv" / "bin" / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    says = "installing {} into .venv (minutes on the first run)\n"
    assert setup_env(checkout, "dev").stdout == says.format("requirements-dev.txt")
    assert setup_env(checkout).stdout == setup_env(checkout, "dev").stdout == ""
    (checkout / "requirements.txt").write_text("another torch")
    assert setup_env(checkout).stdout == says.format("requirements.txt")


def test_every_place_says_the_same_versions() -> None:
    script, project, readme = ((ROOT / name).read_text() for name in ("scripts/setup_env.sh", "pyproject.toml",
                                                                      "README.md"))
    assert "(3, 10) <= sys.version_info[:2] <= (3, 14)" in script
    assert 'requires-python = ">=3.10,<3.15"' in project
    assert "Python 3.10 to 3.14" in readme


def test_every_transformers_that_is_asked_for_is_one_that_the_oracle_was_run_with() -> None:
    """`dev` and the extra have one range, pins lie in it, docs/testing.md names both, and where it begins."""
    project, pins, testing = ((ROOT / name).read_text() for name in ("pyproject.toml", "requirements-dev.txt",
                                                                     "docs/testing.md"))
    ranges = [Requirement(found).specifier for found in re.findall(r'"(transformers>[^"]*)"', project)]
    assert len(ranges) == 2
    assert ranges[0] == ranges[1]
    versions = re.findall(r"^transformers==([\d.]+)", pins, flags=re.MULTILINE)
    (oldest,) = [clause.version for clause in ranges[0] if clause.operator == ">="]
    assert versions
    assert all(version in ranges[0] for version in versions)
    assert all(version in testing for version in (f"{oldest}.0", *versions))
