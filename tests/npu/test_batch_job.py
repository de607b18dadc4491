"""The batch job on the npu platform: 64 images, killed and resumed, with the answers of the cpu platform."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.batch.scripted import row, write_rows
from tests.cann.environment import environment

pytestmark = [pytest.mark.npu, pytest.mark.slow]

NUM_IMAGES = 64
NUM_KILLS = 3
SETTINGS = ["--max-model-len", "1024", "--max-num-seqs", "16", "--vision-cache-bytes", "64M", "--progress", "off",
            "--allowed-media-dir", ".", "--preprocessing-workers", "1"]  # fmt: skip
GRAPHS = ["--graph-mode", "reduce-overhead", "--graph-batch-sizes", "4,16"]


def requests(folder: Path) -> list[dict[str, Any]]:
    """Examples with NUM_IMAGES images in all, and a row that fails."""
    rows, count = [], 0
    for number, seed in enumerate(TEST_SEEDS):
        example = draw_example(seed)
        parts: list[dict[str, Any]] = [{"type": "text", "text": example.question}]
        for index, image in enumerate(example.images):
            image.save(folder / f"{number}-{index}.png")
            parts.append({"type": "image_url", "image_url": {"url": f"{number}-{index}.png"}})
        rows.append(row(f"row {number}", messages=[{"role": "user", "content": parts}], max_tokens=48))
        count += len(example.images)
        if count >= NUM_IMAGES:
            break
    missing = [{"type": "image_url", "image_url": {"url": "no.png"}}]
    return [*rows, row("missing", messages=[{"role": "user", "content": missing}])]


def job(folder: Path, output: str, *arguments: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", output, *SETTINGS, *arguments]
    return subprocess.Popen(command, cwd=folder, env=env, stderr=subprocess.PIPE, text=True)


def answers(path: Path) -> dict[str, str]:
    """Each row's answer or error code, by custom_id; every row once."""
    found: dict[str, str] = {}
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        assert entry["custom_id"] not in found, "a row is there twice"
        error = entry.get("error")
        body = entry["response"]["body"]
        found[entry["custom_id"]] = error["code"] if error else body["choices"][0]["message"]["content"]
    return found


def wait_for_rows(path: Path, count: int, process: subprocess.Popen[str]) -> None:
    """Until the output has `count` whole rows or the job has ended."""
    while process.poll() is None and (not path.exists() or path.read_bytes().count(b"\n") < count):
        time.sleep(0.02)


@pytest.mark.full("jobs killed and resumed on the emulation take minutes; the same kills on the cpu platform stay")
def test_killed_jobs_are_resumed_and_answer_as_on_the_cpu(tmp_path: Path) -> None:
    rows = requests(tmp_path)
    write_rows(tmp_path / "in.jsonl", rows)
    on_cpu = job(tmp_path, "cpu.jsonl", "--platform", "cpu", "--dtype", "bfloat16")
    root = Path(__file__).resolve().parent.parent.parent
    env = environment(memory_bytes=2 << 30)  # the images of a step, and those of the next
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), env.get("PYTHONPATH")]))
    output = tmp_path / "npu.jsonl"
    num_killed = 0
    for kill in range(NUM_KILLS):
        process = job(tmp_path, output.name, "--platform", "npu", *GRAPHS, env=env)
        wait_for_rows(output, (kill + 1) * len(rows) // (NUM_KILLS + 1), process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        num_killed += process.returncode == -signal.SIGKILL
    assert num_killed == NUM_KILLS
    process = job(tmp_path, output.name, "--platform", "npu", *GRAPHS, env=env)
    _, log = process.communicate()
    assert process.returncode == 3, log
    assert on_cpu.wait() == 3
    found, expected = answers(output), answers(tmp_path / "cpu.jsonl")
    assert found.keys() == expected.keys() == {entry["custom_id"] for entry in rows}
    # 16-bit sums in another order: an image in a hundred may be described otherwise.
    different = [name for name in found if found[name] != expected[name]]
    assert len(different) <= 2, [(found[name], expected[name]) for name in different]
    assert found["missing"] == expected["missing"]
    assert {path.name for path in tmp_path.iterdir() if "npu.jsonl" in path.name} == {
        f"{output.name}{end}" for end in ("", ".manifest.json", ".rows", ".status.json")
    }
