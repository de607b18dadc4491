"""Replicas that die with thousands of rows waiting in their engines: only the rows of one step are suspected."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from npu_runner.batch.files.names import manifest_path, status_path
from tests import zygote
from tests.batch.scripted import completion_row, read_rows, write_rows
from tests.replicas.jobs import REPLICA, ended, family, kill, processes, wait_until, wait_until_gone

NUM_ROWS, NUM_WAITING, MAX_NUM_SEQS = 6_000, 4_000, 8
OPTIONS = ["--platform", "cpu", "--max-model-len", "480", "--max-num-seqs", str(MAX_NUM_SEQS),
           "--kv-cache-bytes", "16M", "--max-num-batched-tokens", "16384", "--preprocessing-workers", "1",
           "--data-parallel-size", "2", "--max-replica-restarts", "0"]


def start(model: Path, folder: Path) -> Any:
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", "out.jsonl", "--model", str(model)]
    return zygote.Popen([*command, *OPTIONS], cwd=folder, stderr=-1)


def num_waiting(folder: Path) -> int:
    """In all engines, by the job's last report."""
    path = status_path(folder / "out.jsonl")
    return json.loads(path.read_text())["engines"]["waiting"] if path.exists() else 0


@pytest.mark.slow
@pytest.mark.full("6,000 rows of a real job; what is under way is compared with each step in runner/test_waiting.py")
@pytest.mark.usefixtures("one_thread_each")
def test_a_kill_with_thousands_waiting_leaves_the_rows_of_one_step_to_the_next_run(
        checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Some of the first rows are long, so that others wait behind them: for longer than a busy machine needs to prepare
    the others."""
    model = checkpoint("qwen3", num_hidden_layers=1)
    write_rows(tmp_path / "in.jsonl", [
        completion_row(f"r{number}", [number % 90 + 1, number // 90 + 1], ignore_eos=True,
                       max_tokens=400 if number < 1_000 and number % 8 == 0 else 1) for number in range(NUM_ROWS)])
    job = start(model, tmp_path)
    assert wait_until(lambda: num_waiting(tmp_path) > NUM_WAITING, job), ended(job)
    whole = family(job.pid)
    kill(processes(REPLICA, job.pid))
    status, said = ended(job)
    wait_until_gone(whole)
    assert status == 1, said
    suspects = json.loads(manifest_path(tmp_path / "out.jsonl").read_text())["suspects"]
    assert 1 <= len(suspects) <= MAX_NUM_SEQS
    answered = {item["custom_id"] for item in read_rows(tmp_path / "out.jsonl")}
    assert len(answered) < NUM_ROWS - NUM_WAITING
    assert not answered & suspects.keys()
    status, said = ended(start(model, tmp_path))
    assert status == 0, said
    names = [item["custom_id"] for item in read_rows(tmp_path / "out.jsonl")]
    assert sorted(names) == sorted(f"r{number}" for number in range(NUM_ROWS))
    assert "suspects" not in json.loads(manifest_path(tmp_path / "out.jsonl").read_text())
