"""What a report takes: seconds of `npu-runner report`, the bytes of its page, and the peak of memory of its processes.

The rows have different prompts of 100 characters and answers of 200; a twentieth of them failed. There is no model.

    python scripts/bench_report.py [--rows 10000] [--images] [--repeats 3]

`--images`: each row shows a photograph of its own of 800 x 600 pixels. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import commit, versions
from PIL import Image

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.manifest import Manifest
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row
from npu_runner.request.outputs import CompletionOutput, RequestOutput

PROMPT_CHARS, ANSWER_CHARS = 100, 200
WORDS = ("red", "blue", "the", "of", "large", "small", "circle", "square", "beside", "above", "three", "is", "not")
STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--images", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, arguments.rows, has_images=arguments.images)
        seconds = [make(folder, arguments.rows) for _ in range(arguments.repeats)]
        num_bytes = (folder / "page.html").stat().st_size
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = {
        "bench": "report", "rows": arguments.rows, "images": arguments.images,
        "seconds": round(statistics.median(seconds), 2), "spread": [round(min(seconds), 2), round(max(seconds), 2)],
        "megabytes": round(num_bytes / 1e6, 2),
        "processor_seconds": round((children.ru_utime + children.ru_stime) / arguments.repeats, 2),
        "peak_mib": round(children.ru_maxrss / 1024),
        "commit": commit(), **versions(),
    }  # fmt: skip
    print(f"{'rows':>8}{'seconds':>10}{'processor, s':>14}{'MB':>8}{'peak, MiB':>12}")
    print(f"{result['rows']:>8}{result['seconds']:>10}{result['processor_seconds']:>14}{result['megabytes']:>8}"
          f"{result['peak_mib']:>12}")
    print(json.dumps(result))


def write_rows(folder: Path, count: int, *, has_images: bool) -> None:
    choose, noise = random.Random(0), np.random.default_rng(0)
    with open(folder / "in.jsonl", "wb") as requests, open(folder / "out.jsonl", "wb") as results:
        for number in range(count):
            name = f"row-{number:06d}"
            content: list[dict[str, Any]] = [{"type": "text", "text": text(choose, PROMPT_CHARS)}]
            if has_images:
                photo = noise.normal(128, 40, (48, 64, 3)).clip(0, 255).astype(np.uint8)
                Image.fromarray(photo).resize((800, 600), Image.Resampling.BICUBIC).save(folder / f"{name}.jpg")
                content.append({"type": "image_url", "image_url": {"url": f"{name}.jpg"}})
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            row = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            requests.write(json.dumps(row).encode() + b"\n")
            results.write(result_of(choose, name, number))
    with InputFile(str(folder / "in.jsonl"), folder) as file:
        Manifest(created=1, model_name="m", model_files={}, settings={}, input=file.scan().identity).save(
            folder / "out.jsonl")


def result_of(choose: random.Random, name: str, number: int) -> bytes:
    said = text(choose, ANSWER_CHARS)
    if number % 20 == 19:
        return error_row(RowError(code="media_missing", message=said), custom_id=name, line=number + 1)
    output = RequestOutput(name, [CompletionOutput(0, said, [1] * 40, "stop")], 25)
    return answer_row(output, custom_id=name, form=ChatForm(), stamp=STAMP)


def text(choose: random.Random, num_chars: int) -> str:
    return " ".join(choose.choices(WORDS, k=num_chars // 2))[:num_chars]


def make(folder: Path, count: int) -> float:
    """Seconds of the whole command."""
    command = [sys.executable, "-m", "npu_runner", "report", "out.jsonl", "-i", "in.jsonl", "-o", "page.html",
               "--allowed-media-dir", ".", "--report-rows", str(count)]  # fmt: skip
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
