"""bench.device at sizes that a CPU does in seconds: that it counts what it says. Times mean nothing here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from bench.common import ROOT, SHAPES_VL, start_child
from bench.profiler import idle_share
from bench.work import SIZES, write_images


@pytest.mark.slow
@pytest.mark.full("every part of a benchmark, a process each; nothing that serves depends on it")
def test_every_part_of_ours_at_tiny_sizes() -> None:
    command = [sys.executable, "-m", "bench.device", "--platform", "cpu", "--sizes", "tiny",
               "--dtype", "float32", "--repeats", "1", "--peer"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    results = json.loads(done.stdout.splitlines()[-1])["results"]

    assert len(results["text"]["npu_runner"]["output_tokens_per_second"]) == 1
    decode = results["decode"]["npu_runner"]
    # A tied head: every weight is read. Hidden size 64, 2 layers, 2 kv heads of 16, 2,048 tokens, MLP width 96.
    layer = 64 * (4 * 16 + 2 * 2 * 16) + 4 * 16 * 64 + 3 * 64 * 96 + 2 * 64 + 2 * 16
    weights = 4 * (2048 * 64 + 2 * layer + 64)
    assert decode["read_by"] in ("sum", "GEMM, batch 1", "GEMM, batch 8")
    for size in (1, 3):
        batch = decode["batches"][str(size)]
        assert batch["bytes"] == {"weight_bytes": weights, "expert_bytes": 0,
                                  "kv_bytes": size * 24 * (2 * 2 * 2 * 16 * 4), "state_bytes": 0}
        # `engine` is what the other phases leave of the step: below zero if they were booked twice.
        assert all(value > 0 for value in batch["parts"].values()), batch["parts"]
    for size, batch in results["moe-decode"]["npu_runner"]["batches"].items():
        # 4 layers of 8 experts of width 32, 2 of them a token; one attention layer of 2 heads of 32; 3 layers with
        # states of 4 heads of 16 x 16, read and written.
        expert = 3 * 64 * 32 * 4
        assert batch["bytes"]["expert_bytes"] % expert == 0
        assert 4 * 2 <= batch["bytes"]["expert_bytes"] // expert <= 4 * min(8, 2 * int(size))
        assert batch["bytes"]["kv_bytes"] == int(size) * 24 * (2 * 1 * 2 * 32 * 4)
        assert batch["bytes"]["state_bytes"] == 2 * int(size) * 3 * 4 * 16 * 16 * 4
    assert results["hybrid-decode"]["npu_runner"]["batches"]["1"]["bytes"]["expert_bytes"] == 0
    for part in ("moe-text", "hybrid-text"):
        assert len(results[part]["npu_runner"]["output_tokens_per_second"]) == 1
    for part in ("pictures", "mixed", "moe-pictures", "hybrid-pictures"):
        (images,) = results[part]["npu_runner"]
        assert images["output_tokens_per_second"] > 0
        assert images["seconds"]["head_start"] > 0


def test_idle_share_counts_overlapping_work_once() -> None:
    second = 1_000_000_000
    before, overlapping, last = (0, second), (10 * second, 12 * second), (11 * second, 13 * second)
    assert idle_share([last, before, overlapping, (15 * second, 16 * second)], 8.0) == pytest.approx(0.5)


def test_questions_have_the_tokens_that_they_are_said_to_have(tmp_path: Path) -> None:
    sizes = dataclasses.replace(SIZES["real"], num_pictures=3, image=(32, 32))
    rows = write_images(tmp_path, sizes).read_text().splitlines()
    tokenizer = Tokenizer.from_file(str(SHAPES_VL / "tokenizer.json"))
    for row in rows:
        text = json.loads(row)["body"]["messages"][0]["content"][1]["text"]
        assert len(tokenizer.encode(text, add_special_tokens=False).ids) == 32


def test_a_child_imports_no_file_of_the_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calendar.py").write_text("raise SystemExit('a file of somebody else')")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with start_child("calendar", "2026") as child:
        assert "November" in child.communicate()[0]
