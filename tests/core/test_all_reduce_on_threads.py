"""The source of our all-reduce for GPUs, run on threads of the host, for more ranks than most hosts have GPUs.

tests/cuda/test_all_reduce.py runs it on GPUs.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.full_set import only_full

PROGRAM = Path(__file__).with_name("all_reduce_on_threads.cpp")
SOURCE = Path(__file__).parents[2] / "npu_runner" / "platforms" / "cuda" / "all_reduce.cu"
# One warp a block: the threads of a host take turns.
SIZES = {"THREADS": 32, "BLOCKS": 2, "CHUNK": 256, "CALLS": 40}


@pytest.mark.parametrize(("num_ranks", "batch"),
                         [(3, 2), *only_full("three ranks have all ways", (2, 4), (4, 2), (8, 1))])
def test_sums_are_those_of_float32_in_rank_order(num_ranks: int, batch: int, tmp_path: Path) -> None:
    """One shot, two shots and normed sums, one behind the other; no word is left in staging memory."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    sizes = {**SIZES, "RANKS": num_ranks, "BATCH": batch, "SOURCE": f'"{SOURCE}"'}
    program = tmp_path / "program"
    given = [f"-D{name}={value}" for name, value in sizes.items()]
    subprocess.run(["g++", "-std=c++17", "-w", "-pthread", *given, str(PROGRAM), "-o", str(program)], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout == "0 wrong, 0 left\n"
