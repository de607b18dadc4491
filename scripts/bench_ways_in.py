"""The same rows through the batch job, through LLM.chat and through Ray Data: what a way in costs beside the others.

shapes-vl on the CPU over the image files of bench_cpu.py; every way in a process of its own, in turn, with the same
answers. Time counts from when the model stands ready to the last answer, preparing included. The job prepares rows
while its model loads: what those take is measured by itself and added to its time (bench_cpu.py). LLM.chat and Ray
Data's actor have answered one row before, so that their workers run. Of LLM.chat it also says how long one short call
takes on the warm model. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import bench_cpu
from bench_common import commit, versions

from npu_runner.ray_data import LLMPredictor

WAYS = ("batch", "chat", "stream", "ray")
SHORT_CALLS = 50


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-pictures", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--questions", choices=("mixed", "describe", "text"), default="mixed")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--batch-size", type=int, default=None, help="rows of one of Ray Data's batches; default: all")
    parser.add_argument("--way", choices=WAYS[1:], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        rows = [json.loads(line) for line in (arguments.folder / "requests.jsonl").read_text().splitlines()]
        run = measure_ray if arguments.way == "ray" else measure_llm
        print(json.dumps(run(rows, arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        bench_cpu.write_requests(Path(name), arguments.questions, arguments.num_pictures)
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in arguments.ways}
        for repeat in range(arguments.repeats):  # in turn, so that a slow minute of the machine hits all of them
            for way in arguments.ways:
                runs[way].append(run_way(way, Path(name), arguments, repeat))
    report(runs, arguments)


def run_way(way: str, folder: Path, arguments: argparse.Namespace, repeat: int) -> dict[str, Any]:
    if way == "batch":
        return bench_cpu.run_engine("npu_runner", folder, 1, repeat)
    command = [sys.executable, __file__, "--way", way, "--folder", str(folder)]
    if arguments.batch_size is not None:
        command += ["--batch-size", str(arguments.batch_size)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def measure_llm(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """LLM.chat; runs in the child process."""
    from npu_runner import LLM, SamplingParams

    conversations = [row["body"]["messages"] for row in rows]
    params = SamplingParams(temperature=0, max_tokens=bench_cpu.MAX_TOKENS)
    with LLM(bench_cpu.MODEL, platform="cpu") as llm:
        llm.chat(conversations[:1], params, use_tqdm=False, allowed_media_dir=arguments.folder)
        started = time.perf_counter()
        if arguments.way == "stream":
            stream = llm.chat(iter(conversations), params, allowed_media_dir=arguments.folder, stream_results=True)
            outputs = [output for _, output in sorted(stream)]
        else:
            outputs = llm.chat(conversations, params, use_tqdm=False, allowed_media_dir=arguments.folder)
        seconds = time.perf_counter() - started
        short_ms = {
            "generate": milliseconds(lambda: llm.generate("which", params.replace(max_tokens=4), use_tqdm=False)),
            "chat": milliseconds(lambda: llm.chat([{"role": "user", "content": "which"}],
                                                  params.replace(max_tokens=4), use_tqdm=False))}
    return {"serve_seconds": seconds, "short_ms": short_ms, "answers": {row["custom_id"]: output.text for row, output in
                                                  zip(rows, outputs, strict=True)}}


def milliseconds(call: Callable[[], Any]) -> float:
    """The median of SHORT_CALLS calls."""
    spent = []
    for _ in range(SHORT_CALLS):
        started = time.perf_counter()
        call()
        spent.append(1e3 * (time.perf_counter() - started))
    return statistics.median(spent)


class Clocked(LLMPredictor):
    """Notes when it stood ready, with workers, and when its last answer was there."""

    def __init__(self, model: str, **settings: Any):
        self._clock = Path(settings.pop("clock"))
        warm_up = settings.pop("warm_up")
        super().__init__(model, **settings)
        super().__call__({"messages": [warm_up]})
        self._clock.write_text(f"{time.time()}\n")

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        answered = super().__call__(batch)
        with self._clock.open("a") as file:
            file.write(f"{time.time()}\n")
        return answered


def measure_ray(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> dict[str, Any]:
    """Ray Data with one actor that has all cores; runs in the child process."""
    import ray

    cores = len(os.sched_getaffinity(0))
    clock = arguments.folder / "clock"
    ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False)
    items = [{"custom_id": row["custom_id"], "messages": row["body"]["messages"]} for row in rows]
    settings = {"model": str(bench_cpu.MODEL), "platform": "cpu", "allowed_media_dir": str(arguments.folder),
                "sampling_params": {"temperature": 0, "max_tokens": bench_cpu.MAX_TOKENS},
                "clock": str(clock), "warm_up": items[0]["messages"]}
    answered = ray.data.from_items(items).map_batches(
        Clocked, fn_constructor_kwargs=settings, compute=ray.data.ActorPoolStrategy(size=1), num_cpus=cores,
        batch_size=arguments.batch_size or len(items)).take_all()
    times = [float(line) for line in clock.read_text().splitlines()]
    assert not any(row["__inference_error__"] for row in answered)
    return {"serve_seconds": times[-1] - times[0],
            "answers": {row["custom_id"]: row["generated_text"] for row in answered}}


def report(runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    count = arguments.num_pictures
    first = runs[arguments.ways[0]][0]["answers"]
    rates = {way: [count / run["serve_seconds"] for run in results] for way, results in runs.items()}
    same = {way: min(sum(run["answers"][key] == text for key, text in first.items()) for run in results)
            for way, results in runs.items()}
    print(f"{'way':<10}{'rows/s':>9}{'min-max':>17}{'same':>12}")
    for way, values in rates.items():
        print(f"{way:<10}{statistics.median(values):>9.2f}{min(values):>9.2f}-{max(values):<7.2f}{same[way]:>6}/{count}")
    # Pairs of one turn: the machine's speed changes by more than what is looked for.
    base = rates[arguments.ways[0]]
    ratios = {way: statistics.median(ours / other for ours, other in zip(values, base, strict=True))
              for way, values in rates.items()}
    short = [run["short_ms"] for run in runs.get("chat", [])]
    for name in short[0] if short else ():
        print(f"one short {name} on the warm LLM: {statistics.median(each[name] for each in short):.2f} ms")
    for way in arguments.ways[1:]:
        print(f"{way} is {ratios[way]:.3f} times as fast as {arguments.ways[0]} (median of pairs)")
    print(json.dumps({"bench": "bench_ways_in", "questions": arguments.questions, "commit": commit(),
                      "cores": len(os.sched_getaffinity(0)), "python": platform.python_version(),
                      "versions": versions("torch", "ray", "pillow"), "repeats": arguments.repeats,
                      "num_pictures": count, "batch_size": arguments.batch_size, "rates": rates, "ratios": ratios,
                      "same_answers": same, "short_ms": short}))


if __name__ == "__main__":
    main()
