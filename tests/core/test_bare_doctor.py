"""`npu-runner doctor` on a Python that has none of our packages: it lists them. Knows nothing of its other checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
