"""The decode layer in every mode a platform can choose, the graph engine's operators, a graph loaded from a cache."""

import os
from pathlib import Path

import pytest

from .checks import assert_check, check_names
from .environment import run_python

pytestmark = pytest.mark.npu
NEEDS_A_FOLDER = "check_cached_graph"


@pytest.mark.full("a layer in every mode of the emulation; our own layers stay in each (npu/test_families.py)")
@pytest.mark.parametrize("name", [name for name in check_names("modes") if name != NEEDS_A_FOLDER])
def test_mode(name: str) -> None:
    assert_check("modes", name)


@pytest.mark.full("operators of the graph engine one by one; a model through it stays (npu/test_families.py)")
@pytest.mark.parametrize("name", check_names("ge_operators"))
def test_graph_engine(name: str) -> None:
    assert_check("ge_operators", name)


@pytest.mark.full("two processes compile and load; graphs that are compiled stay (npu/test_families.py)")
def test_a_cached_graph_is_loaded_by_the_next_process(tmp_path: Path) -> None:
    code = "from tests.cann.programs.modes import check_cached_graph; check_cached_graph()"
    files = []
    for _ in range(2):
        done = run_python(["-c", code], forked=True, CACHE_DIR=tmp_path)
        assert done.returncode == 0, done.stderr[-4000:]
        assert "Clear broken cache" not in done.stdout + done.stderr
        files.append({path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()})
    assert files[0]
    assert files[0] == files[1], "the second process compiled anew"
    assert all(os.stat(path).st_mode & 0o077 == 0 for path in files[0])
