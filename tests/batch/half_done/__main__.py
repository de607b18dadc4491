"""Writes the outputs that lie here: `python -m tests.batch.half_done CASE FOLDER [PYTHON]` from the top of a checkout.

PYTHON is the interpreter of the version that begins the output. format_1, format_2 and format_3_suspects: two replicas,
each killed once, so that rows are suspected; SIGTERM before the last row. The other cases are killed while they serve.
"""

from __future__ import annotations

import base64
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.replicas.jobs import REPLICA, processes

CREATED = 1_763_000_000
NUM_ROWS, NUM_BEFORE_DEATHS, NUM_AFTER_DEATHS = 24, 4, 2
FAILED, WITH_IMAGE = (3, 15, 23), (1, 20)
OPTIONS = ("--platform", "cpu", "--max-model-len", "512", "--kv-cache-bytes", "32M", "--preprocessing-workers", "1",
           "--error-file", "errors.jsonl", "--progress", "lines")
SHORT_OPTIONS = ("--platform", "cpu", "--max-model-len", "256", "--kv-cache-bytes", "32M", "--preprocessing-workers",
                 "1", "--max-num-seqs", "1", "--progress", "lines")


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
    return _row(number, content, settings)


def short_request(number: int) -> dict[str, Any]:
    """Answers take long enough for a status in between; every third one is cut off, some fail."""
    max_tokens = -1 if number in FAILED else 120 if number % 3 else 4
    settings = {"temperature": 0.7, "seed": number, "max_tokens": max_tokens, "min_tokens": max(0, max_tokens - 60)}
    return _row(number, f"Which shape is number {number}?", settings)


def _row(number: int, content: Any, settings: dict[str, Any]) -> dict[str, Any]:
    body = {"model": "shapes-vl", "messages": [{"role": "user", "content": content}], **settings}
    return {"custom_id": f"row-{number:02d}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def suspects(job: Begun) -> None:
    """With an error file."""
    job.write_input(map(request, range(NUM_ROWS)))
    process = job.start("--data-parallel-size", "2", "--max-num-seqs", "3", *OPTIONS)
    wait(process, lambda: job.num_answers() >= NUM_BEFORE_DEATHS)
    first, second = processes(REPLICA, process.pid)
    os.kill(second, signal.SIGKILL)
    wait(process, lambda: "died" in job.words.read_text())
    time.sleep(0.5)  # the rows that it had are under way in the other
    os.kill(first, signal.SIGKILL)
    wait(process, lambda: job.beside("suspects.json").exists())
    num_there = job.num_answers()
    wait(process, lambda: job.num_answers() >= num_there + NUM_AFTER_DEATHS)
    process.send_signal(signal.SIGTERM)
    process.wait()


def killed(job: Begun) -> None:
    """In the midst of a line, after a run that loaded and was killed."""
    job.write_input(map(short_request, range(NUM_ROWS)))
    process = job.start(*SHORT_OPTIONS)
    wait(process, lambda: '"loading"' in job.status())
    process.kill()
    process.wait()
    job.kill_while_serving(*SHORT_OPTIONS)
    with open(job.output, "ab") as file:
        file.write(job.output.read_bytes().splitlines()[-1][:50].replace(b"row-", b"row-9"))


def retry(job: Begun) -> None:
    """All rows have lines, and --retry replaces failed and cut-off ones."""
    job.write_input(map(short_request, range(NUM_ROWS)))
    assert job.start(*SHORT_OPTIONS).wait() == 3
    job.kill_while_serving(*SHORT_OPTIONS, "--retry", "errors,cut_off")


def changes(job: Begun) -> None:
    """Failed rows are in a file of their own, and another seed was accepted on the way."""
    job.write_input(map(short_request, range(NUM_ROWS)))
    job.kill_while_serving(*SHORT_OPTIONS, "--error-file", "errors.jsonl")
    job.kill_while_serving(*SHORT_OPTIONS, "--error-file", "errors.jsonl", "--seed", "1", "--accept-changed", "seed")


CASES = {case.__name__: case for case in (suspects, killed, retry, changes)}


@dataclass(frozen=True)
class Begun:
    """The job in a folder, and the interpreter of its version."""

    folder: Path
    python: str

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def words(self) -> Path:
        return self.folder / "stderr.txt"

    def beside(self, ending: str) -> Path:
        return self.folder / f"out.jsonl.{ending}"

    def write_input(self, rows: Iterable[dict[str, Any]]) -> None:
        self.folder.mkdir(parents=True)
        with open(self.folder / "in.jsonl", "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        with open(self.words, "a") as stderr:
            return subprocess.Popen(
                [self.python, "-m", "npu_runner", "batch", "-i", "in.jsonl", "-o", "out.jsonl", *options],
                cwd=self.folder, stderr=stderr, env={**os.environ, "SOURCE_DATE_EPOCH": str(CREATED)})

    def num_answers(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def status(self) -> str:
        return self.beside("status.json").read_text() if self.beside("status.json").exists() else ""

    def kill_while_serving(self, *options: str) -> None:
        """Once the status has counted answers of this run."""
        process = self.start(*options)
        begun_by = f'"pid": {process.pid},'
        wait(process, lambda: begun_by in (status := self.status()) and json.loads(status)["pace"]["rows"] > 1)
        process.kill()
        process.wait()


def main(case: str, folder: Path, python: str = sys.executable) -> None:
    job = Begun(folder, python)
    CASES[case](job)
    for path in (job.words, *folder.glob("*.lock"), *folder.glob(".*")):
        path.unlink()
    if job.beside("status.json").exists():  # of whichever host
        job.beside("status.json").write_text(re.sub(r'"(host|boot)": "[^"]*"', r'"\1": "a"', job.status()))
    print(f"{job.num_answers()} answers of {NUM_ROWS} rows")


def wait(job: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    while not is_so():
        assert job.poll() is None, "the job ended before"
        time.sleep(0.002)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
