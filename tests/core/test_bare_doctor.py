"""`npu-runner doctor` on a Python that has few or none of our packages: it lists the others, and so do other commands.

Knows nothing of the doctor's other checks.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.full_set import only_full

ROOT = Path(__file__).parents[2]
BARE = "import sys; sys.path.insert(0, sys.argv.pop(1)); from npu_runner.cli.main import main; sys.exit(main())"
# The Python that this environment was made of; -I keeps PYTHONPATH out.
BASE = getattr(sys, "_base_executable", sys.executable)


def base_has(package: str) -> bool:
    return subprocess.run([BASE, "-I", "-c", f"import {package}"], capture_output=True).returncode == 0


def test_it_runs_where_nothing_is_installed_and_lists_what_is_missing(tmp_path: Path) -> None:
    if base_has("PIL"):
        pytest.skip(f"{BASE} has packages of ours itself")
    command = [BASE, "-I", "-c", BARE, ROOT, "doctor", "--platform", "npu", "--skip-generation", "--json"]
    done = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["Python packages"]["status"] == "failed"
    assert all(name in checks["Python packages"]["found"] for name in ("pillow", "safetensors", "llguidance"))


@pytest.fixture
def few(tmp_path: Path) -> dict[str, str]:
    """The environment of a Python that has torch, numpy and what torch needs: an image's."""
    if base_has("PIL"):
        pytest.skip(f"{BASE} has packages of ours itself")
    (tmp_path / "packages").mkdir()
    waiting, seen = ["torch", "numpy"], set()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        distribution = importlib.metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            link = tmp_path / "packages" / part
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(part))))
        needed = [Requirement(each) for each in distribution.requires or []]
        waiting += [each.name for each in needed if (each.marker is None or each.marker.evaluate({"extra": ""}))
                    and each.name not in seen]  # fmt: skip
    return {"PYTHONPATH": os.pathsep.join([str(tmp_path / "packages"), str(ROOT)])}


@pytest.mark.full("imports torch; a Python without any package stays, and an image with torch and another command")
def test_with_torch_and_numpy_alone_it_lists_the_others_and_advises_no_torch_npu(few: dict[str, str]) -> None:
    command = [BASE, "-s", "-m", "npu_runner", "doctor", "--platform", "npu", "--skip-generation", "--json"]
    done = subprocess.run(command, env=few, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    packages = checks["Python packages"]
    assert "npu-runner and torchair import huggingface_hub, safetensors, pillow, " in packages["found"]
    assert "pip list --format=freeze >image.txt; pip install -c image.txt huggingface_hub " in packages["remedy"]
    assert checks["torch and torch_npu"]["remedy"].startswith("CANN first: without it torch_npu spoils `import torch`")
    assert "pip install --no-deps torch_npu" not in done.stdout, "CANN is missing"


@pytest.mark.parametrize("command", [["batch", "-i", "in.jsonl", "-o", "out.jsonl"], *only_full(
    "other commands of the same front", ["generate", "a"], ["summary", "out.jsonl"])], ids=lambda command: command[0])
def test_another_command_names_the_doctor(command: list[str], few: dict[str, str], tmp_path: Path) -> None:
    command = [BASE, "-s", "-m", "npu_runner", *command]
    done = subprocess.run(command, cwd=tmp_path, env=few, capture_output=True, text=True)
    assert done.returncode == 2
    line = done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert line.startswith("npu-runner: No module named '")
    assert line.endswith("; npu-runner doctor lists every package that is missing")
