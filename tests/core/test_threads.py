"""Threads do not spin for long, however the program starts: OpenMP itself is asked what it took when it was loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.full_set import only_full

pytestmark = pytest.mark.skipif("GNU" not in torch.__config__.show() and "GCC" not in torch.__config__.show(),
                                reason="this torch brings another OpenMP")
IMPORT = ["-c", "from npu_runner import LLM"]
# The same OpenMP without torch around it, which takes seconds to import.
OPENMP = ["-c", "import ctypes; from npu_runner import SamplingParams; "
          f"ctypes.CDLL({str(Path(torch.__file__).parent / 'lib/libgomp.so.1')!r})"]
COMMAND = ["-m", "npu_runner", "generate", "--platform", "cpu", "--max-tokens", "1", "Hello?"]


def spin_count(arguments: list[str], **variables: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True,
                          env={**inherited, "OMP_DISPLAY_ENV": "VERBOSE", **variables})
    assert done.returncode == 0, done.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    assert found, done.stderr
    return found[1]


@pytest.mark.parametrize("arguments", [OPENMP, *only_full(
    "with torch, which takes seconds to import; the same OpenMP without it stays", IMPORT, COMMAND)],
    ids=["OpenMP alone", "the api", "the command"])
def test_threads_that_wait_sleep_soon(arguments: list[str]) -> None:
    assert spin_count(arguments) == "1000"


def test_what_the_user_says_about_waiting_stays() -> None:
    assert spin_count(OPENMP, OMP_WAIT_POLICY="PASSIVE") == "0"
    assert spin_count(OPENMP, GOMP_SPINCOUNT="77") == "77"
