"""Rows that come before their turn: what went in comes out, through files beyond a bound, which end with their rows."""

from __future__ import annotations

import gc
import os
import random

import pytest

from npu_runner.batch.job.delivery import EarlyRows
from npu_runner.serving.replica import FinishedRow
from tests.full_set import only_full


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("max_bytes_in_memory", [500, *only_full("no memory, and memory for all", 0, 10**6)])
def test_rows_come_out_as_they_went_in(max_bytes_in_memory: int) -> None:
    gc.collect()  # files of others, which nobody holds any more
    rng, before = random.Random(1), open_files()
    rows = [FinishedRow(number, f"outcome {number}", rng.randbytes(rng.randint(0, 200))) for number in range(400)]
    early, due, most_files = EarlyRows(max_bytes_in_memory, max_bytes_of_file=1000), [], 0
    window = list(rows)
    for start in range(0, len(window), 40):  # out of order within a window
        window[start : start + 40] = rng.sample(window[start : start + 40], 40)
    for row in window:
        early.add(row)
        most_files = max(most_files, open_files() - before)
        while (found := early.pop(len(due))) is not None:
            due.append(found)
    assert due == rows
    assert open_files() == before
    assert most_files == 0 if max_bytes_in_memory == 10**6 else 0 < most_files < 10
    early.close()
    assert open_files() == before


def test_what_still_waits_is_forgotten() -> None:
    before = open_files()
    early = EarlyRows(0)
    early.add(FinishedRow(5, None, b"five"))
    assert early.pop(4) is None
    early.close()
    assert open_files() == before
