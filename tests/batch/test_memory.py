"""Memory does not grow with the number of rows: neither of this process, nor of what waits between its stages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, resource, sys
from npu_runner.reports.report import run_batch_and_report
from npu_runner.batch.job.options import BatchOptions
from npu_runner.config import RunnerConfig
from tests.batch.scripted import ScriptedEngine, ScriptedModel

engines = []

def make(config):
    engines.append(ScriptedEngine(config, latency=lambda text: 1, max_running=64))
    return engines[-1]

options = BatchOptions.from_keywords(input=sys.argv[1], output=sys.argv[2], preprocessing_workers=1, progress="off")
open_model = lambda config: ScriptedModel(config, make)
summary = run_batch_and_report(RunnerConfig(model=sys.argv[3]), options, open_model=open_model)
print(json.dumps({
    "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "answered": summary.tally.num_answered,
    "failed": summary.tally.num_failed,
    "most_held": engines[0].most_held,
}))
"""
# Each row carries this much text, so that twenty thousand rows held anywhere would be seen at once.
TEXT_BYTES = 4000


def run(folder: Path, num_rows: int) -> dict[str, int]:
    (folder / "config.json").write_text("{}")
    requests = folder / f"in-{num_rows}.jsonl"
    with open(requests, "w") as file:
        for n in range(num_rows):
            messages = [
                {"role": "system", "content": "x" * TEXT_BYTES},
                {"role": "user", "content": "bad" if n % 3 else "ok"},
            ]
            body = {"messages": messages, "temperature": 0}
            row = {"custom_id": f"r{n}", "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n" if n % 5 else "not json" + "x" * TEXT_BYTES + "\n")
    arguments = [str(requests), str(folder / f"out-{num_rows}.jsonl"), str(folder)]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], stdout=subprocess.PIPE, check=True)
    figures: dict[str, int] = json.loads(done.stdout)
    assert figures["answered"] + figures["failed"] == num_rows
    return figures


@pytest.mark.full("20,000 rows go through a job, to see its memory")
def test_twenty_thousand_rows_take_no_more_memory_than_five_hundred(tmp_path: Path) -> None:
    few, many = run(tmp_path, 500), run(tmp_path, 20_000)
    held = many["peak_kib"] - few["peak_kib"]
    # 20,000 rows are 80 MB of text; their 16-byte names and what the allocator keeps are allowed for.
    assert held < 16 * 1024, f"{held} KiB more for 19,500 more rows"
    assert many["most_held"] <= 64 + 64
