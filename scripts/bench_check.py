"""How often the time that `npu-runner check --sample` says holds the time that the job then takes.

    python scripts/bench_check.py [--num-jobs 10] [--num-rows 2000] [--sample 256] [--max-num-seqs 64]

Each job has other images and questions, for the embedded model. Its rows are checked and then answered, by the command,
in processes of their own. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_common import ROOT, commit, versions


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-jobs", type=int, default=10)
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=256)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--platform", default="cpu")
    arguments = parser.parse_args()
    results = []
    for number in range(arguments.num_jobs):
        results.append(measure(number, arguments))
        print("job {job}: {least:.1f} to {most:.1f} s said, {took:.1f} s taken, {verdict}".format(**results[-1]),
              flush=True)
    held = sum(result["verdict"] == "inside" for result in results)
    print(f"inside: {held} of {len(results)}")
    print(json.dumps({"bench": "bench_check", "commit": commit(), "versions": versions("torch"), "inside": held,
                      "settings": vars(arguments), "results": results}))


def measure(number: int, arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_rows(folder, number, arguments.num_rows)
        common = ["--platform", arguments.platform, "--allowed-media-dir", "pictures",
                  "--max-num-seqs", str(arguments.max_num_seqs)]
        said = command(["check", "-i", "rows.jsonl", "--json", "--sample", str(arguments.sample), *common], folder)
        least, most = json.loads(said)["sample"]["seconds"]
        started = time.monotonic()
        command(["batch", "-i", "rows.jsonl", "-o", "answers.jsonl", "--progress", "off", *common], folder)
        took = time.monotonic() - started
    verdict = "inside" if least <= took <= most else "outside"
    return {"job": number, "least": least, "most": most, "took": took, "verdict": verdict}


def write_rows(folder: Path, number: int, count: int) -> None:
    """256 images of the demo's, asked about again and again with limits of 16 to 96 tokens."""
    made = [sys.executable, str(ROOT / "scripts/demo_requests.py"), str(folder), "--num-rows", "256", "--first-seed",
            str(number * 7)]
    subprocess.run(made, check=True, capture_output=True)
    requests = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    with (folder / "rows.jsonl").open("w") as file:
        for index in range(count):
            request = requests[index % len(requests)]
            body = {**request["body"], "max_tokens": 16 + (index * 37 + number) % 81}
            file.write(json.dumps({**request, "custom_id": str(index), "body": body}) + "\n")


def command(arguments: list[str], folder: Path) -> str:
    done = subprocess.run([sys.executable, "-m", "npu_runner", *arguments], cwd=folder, capture_output=True, text=True)
    if done.returncode not in (0, 3):
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
