"""Writes the files: two replicas, each killed once, so that rows are suspected; SIGTERM before the last row."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.replicas.jobs import REPLICA, processes

CREATED = 1_763_000_000
NUM_ROWS, NUM_BEFORE_DEATHS, NUM_AFTER_DEATHS = 24, 4, 2
FAILED, WITH_IMAGE = (3, 15, 23), (1, 20)
OPTIONS = ("--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "32M", "--preprocessing-workers", "1",
           "--error-file", "errors.jsonl", "--progress", "lines")


def request(number: int) -> dict[str, Any]:
    """Most are drawn with a seed, some show a small image, some fail."""
    content: Any = f"Which shape is number {number}?"
    settings: dict[str, Any] = {"temperature": 0.7, "seed": number, "max_tokens": 16, "min_tokens": 12}
    if number in WITH_IMAGE:
        example = draw_example(TEST_SEEDS[number])
        file = io.BytesIO()
        example.images[0].resize((96, 96)).quantize(16).save(file, "PNG", optimize=True)
        url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
        content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": example.question}]
        settings = {"temperature": 0, "max_tokens": 16}
    if number in FAILED:
        settings = {"max_tokens": -1}
    body = {"model": "shapes-vl", "messages": [{"role": "user", "content": content}], **settings}
    return {"custom_id": f"row-{number:02d}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    with open(folder / "in.jsonl", "w") as file:
        file.writelines(json.dumps(request(number)) + "\n" for number in range(NUM_ROWS))
    output, words = folder / "out.jsonl", folder / "stderr.txt"

    def num_answers() -> int:
        return output.read_bytes().count(b"\n") if output.exists() else 0

    with open(words, "w") as stderr:
        job = subprocess.Popen(
            [sys.executable, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", "out.jsonl",
             "--data-parallel-size", "2", "--max-num-seqs", "3", *OPTIONS],
            cwd=folder, stderr=stderr, env={**os.environ, "SOURCE_DATE_EPOCH": str(CREATED)})
    wait(job, lambda: num_answers() >= NUM_BEFORE_DEATHS)
    first, second = processes(REPLICA, job.pid)
    os.kill(second, signal.SIGKILL)
    wait(job, lambda: "died" in words.read_text())
    time.sleep(0.5)  # the rows that it had are under way in the other
    os.kill(first, signal.SIGKILL)
    wait(job, lambda: (folder / "out.jsonl.suspects.json").exists())
    num_there = num_answers()
    wait(job, lambda: num_answers() >= num_there + NUM_AFTER_DEATHS)
    job.send_signal(signal.SIGTERM)
    print(f"exit status {job.wait()}, {num_answers()} answers of {NUM_ROWS} rows")


def wait(job: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert job.poll() is None, "the job ended before"
        time.sleep(0.002)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
