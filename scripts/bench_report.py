"""What a report of many rows takes: seconds to make it, and its bytes.

2,000 rows with prompts of 100 characters, all different, and answers of 200, a twentieth of them failed; no model and
no pictures. Prints a table, then a JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_common import commit, versions

from npu_runner.batch.files.input_file import InputFile
from npu_runner.batch.files.place import find_place
from npu_runner.batch.rows.chat import ChatForm
from npu_runner.batch.rows.openai_response import JobStamp, RowError, answer_row, error_row
from npu_runner.reports.report import Source, write_report
from npu_runner.reports.thumbnails import ThumbnailMaker
from npu_runner.request.limits import LIMITS
from npu_runner.request.outputs import CompletionOutput, RequestOutput
from npu_runner.serving.workers.pool import PoolLimits

PROMPT_CHARS, ANSWER_CHARS = 100, 200
WORDS = ("red", "blue", "the", "of", "large", "small", "circle", "square", "beside", "above", "three", "is", "not")
STAMP = JobStamp(created=1, system_fingerprint="fp", model_name="m")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, arguments.rows)
        seconds = [make(folder, arguments.rows) for _ in range(arguments.repeats)]
        num_bytes = (folder / "report.html").stat().st_size
    result = {
        "bench": "report", "rows": arguments.rows, "seconds": round(statistics.median(seconds), 2),
        "spread": [round(min(seconds), 2), round(max(seconds), 2)], "megabytes": round(num_bytes / 1e6, 2),
        "commit": commit(), **versions(),
    }  # fmt: skip
    print(f"{'rows':>8}{'seconds':>10}{'MB':>8}")
    print(f"{result['rows']:>8}{result['seconds']:>10}{result['megabytes']:>8}")
    print(json.dumps(result))


def write_rows(folder: Path, count: int) -> None:
    draw = random.Random(0)
    with open(folder / "in.jsonl", "wb") as requests, open(folder / "out.jsonl", "wb") as results:
        for number in range(count):
            name = f"row-{number:06d}"
            messages = [{"role": "user", "content": text(draw, PROMPT_CHARS)}]
            body: dict[str, Any] = {"model": "m", "messages": messages}
            row = {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body}
            requests.write(json.dumps(row).encode() + b"\n")
            results.write(result_of(draw, name, number))


def result_of(draw: random.Random, name: str, number: int) -> bytes:
    said = text(draw, ANSWER_CHARS)
    if number % 20 == 19:
        return error_row(RowError(code="media_missing", message=said), custom_id=name, line=number + 1)
    output = RequestOutput(name, [CompletionOutput(0, said, [1] * 40, "stop")], 25)
    return answer_row(output, custom_id=name, form=ChatForm(), stamp=STAMP)


def text(draw: random.Random, num_chars: int) -> str:
    return " ".join(draw.choices(WORDS, k=num_chars // 2))[:num_chars]


def make(folder: Path, count: int) -> float:
    """Seconds, from opening the input to the page on disk."""
    started = time.perf_counter()
    place = find_place("report", folder / "report.html")
    with InputFile(str(folder / "in.jsonl"), folder) as file, place:
        write_report(
            place,
            Source(file=file, rows=file.scan(), name="out.jsonl", outputs=[folder / "out.jsonl"],
                   max_row_bytes=LIMITS.max_row_bytes),
            thumbnails=ThumbnailMaker(None, LIMITS.max_source_pixels), max_rows=count,
            worker=PoolLimits(num_workers=1, task_timeout_seconds=60.0),
        )  # fmt: skip
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
