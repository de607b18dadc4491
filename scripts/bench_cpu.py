"""shapes-vl over drawn images on the CPU: our batch job against transformers' generate, one by one and batched.

Two sets of questions: `mixed`, every kind as the demo asks them, whose answers are short (the vision tower and prefill
dominate), and `describe`, whose answers are sentences (decoding dominates). By name only: `text`, no image at all.

Every engine runs in a process of its own over the same image files, on the same cores, and must give the same
answers. Time counts from the first row to the last, preprocessing included, start-up apart. Our job prepares its first
rows while its model loads: what those rows take one after the other is measured by itself and added to our time. Prints
a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from bench_common import ROOT, commit, measure_head_start

MODEL = ROOT / "npu_runner" / "assets" / "shapes-vl"
MAX_TOKENS = 96
ENGINES = ("npu_runner", "transformers-1", "transformers-batched")
HEAD_START = "head-start"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-pictures", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of transformers' padded batches")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that compute beside each engine")
    parser.add_argument("--no-peer", action="store_true", help="our job alone")
    parser.add_argument("--questions", choices=("mixed", "describe", "both", "text"), default="both")
    parser.add_argument("--engine", choices=(*ENGINES[1:], HEAD_START), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.engine == HEAD_START:
        from npu_runner.config import RunnerConfig

        config = RunnerConfig(model=str(MODEL))
        print(json.dumps(measure_head_start(config, arguments.folder / "requests.jsonl")))
        return
    if arguments.engine is not None:
        print(json.dumps(measure_transformers(arguments.folder, arguments.engine, arguments.batch_size)))
        return
    for questions in ("mixed", "describe") if arguments.questions == "both" else (arguments.questions,):
        measure(questions, arguments)


def measure(questions: str, arguments: argparse.Namespace) -> None:
    """Run every engine over one set of questions and print what came of it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_requests(folder, questions, arguments.num_pictures)
        engines = ENGINES[:1] if arguments.no_peer else ENGINES
        runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
        for repeat in range(arguments.repeats):  # in turn, so that a slow minute of the machine hits all of them
            for engine in engines:
                with busy(arguments.busy):
                    runs[engine].append(run_engine(engine, folder, arguments.batch_size, repeat))
    report(questions, runs, arguments)


@contextmanager
def busy(count: int) -> Iterator[None]:
    """`count` processes that never wait, as another job on the host would be."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def write_requests(folder: Path, questions: str, count: int) -> None:
    """Images as files, and one OpenAI batch row for each example."""
    from shapes.drawing import DEMO_SEEDS, Example, draw_example, text_question

    if questions == "text":
        asked = (text_question(random.Random(seed)) for seed in DEMO_SEEDS)
        wanted = (Example((), one.text, one.answer, one.kind) for one in asked)
    else:
        drawn = (draw_example(seed) for seed in DEMO_SEEDS)
        wanted = (example for example in drawn if questions == "mixed" or example.kind == questions)
    with (folder / "requests.jsonl").open("w") as file:
        for index, example in enumerate(islice(wanted, count)):
            paths = []
            for number, image in enumerate(example.images):
                paths.append(folder / f"{index}-{number}.png")
                image.save(paths[-1])
            images = [{"type": "image_url", "image_url": {"url": str(path)}} for path in paths]
            question: list[dict[str, Any]] = [{"type": "text", "text": example.question}]
            messages: list[dict[str, Any]] = [{"role": "system", "content": example.system}] if example.system else []
            content = question + images if example.question_first else images + question
            messages.append({"role": "user", "content": content})
            body = {"model": "shapes-vl", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def run_engine(engine: str, folder: Path, batch_size: int, repeat: int) -> dict[str, Any]:
    """One engine in a fresh process: its figures, with the peak memory of it and its children."""
    if engine == "npu_runner":
        output, summary = folder / f"answers-{repeat}.jsonl", folder / "summary.json"
        command = [sys.executable, "-m", "npu_runner", "batch", "-i", str(folder / "requests.jsonl"), "-o",
                   str(output), "--model", str(MODEL), "--platform", "cpu", "--allowed-media-dir", str(folder),
                   "--summary", str(summary), "--progress", "off"]
    else:
        command = child_command(engine, folder, batch_size)
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = _PeakMemory(process.pid)
        text, _ = process.communicate()
        wall_seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{engine} exited with status {process.returncode}")
    if engine == "npu_runner":
        figures = read_job(output, summary)
        measured = subprocess.run(child_command(HEAD_START, folder), stdout=subprocess.PIPE, text=True, check=True)
        figures["serve_seconds"] += json.loads(measured.stdout)
    else:
        figures = json.loads(text.splitlines()[-1])
    return {**figures, "wall_seconds": wall_seconds, "peak_rss_mib": peak.stop() / 2**20}


def child_command(engine: str, folder: Path, batch_size: int = 1) -> list[str]:
    return [sys.executable, __file__, "--engine", engine, "--folder", str(folder), "--batch-size", str(batch_size)]


def read_job(output: Path, summary: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    figures = json.loads(summary.read_text())
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    return {"serve_seconds": figures["seconds"]["serve"], "num_tokens": figures["tokens"]["completion"],
            "answers": answers}


def measure_transformers(folder: Path, engine: str, batch_size: int) -> dict[str, Any]:
    """transformers on the same rows; runs in the child process."""
    import torch
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(MODEL, padding_side="left")
    processor = Qwen2VLImageProcessorPil.from_pretrained(MODEL)
    model = Qwen3VLForConditionalGeneration.from_pretrained(MODEL, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    size = 1 if engine == "transformers-1" else batch_size
    answers: dict[str, str] = {}
    num_tokens = 0
    started = time.perf_counter()
    for batch in batches(rows, size):
        inputs = transformers_inputs(batch, tokenizer, processor, model.config.image_token_id)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        generated = output[:, inputs["input_ids"].shape[1]:]
        num_tokens += int((generated != tokenizer.pad_token_id).sum())
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        answers.update({row["custom_id"]: text for row, text in zip(batch, texts, strict=True)})
    return {"serve_seconds": time.perf_counter() - started, "num_tokens": num_tokens, "answers": answers}


def batches(rows: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(rows), size):
        yield rows[start : start + size]


def transformers_inputs(batch: list[Any], tokenizer: Any, processor: Any, image_token_id: int) -> dict[str, Any]:
    """Chat template, images, expanded placeholders and left padding, as transformers' own processor does it."""
    from PIL import Image

    texts, images = [], []
    for row in batch:
        messages = row["body"]["messages"]
        texts.append(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "image_url":
                    images.append(Image.open(part["image_url"]["url"]))
    features = processor(images, return_tensors="pt") if images else {}
    counts = iter([int(grid.prod()) // 4 for grid in features.get("image_grid_thw", [])])
    pad = tokenizer.convert_ids_to_tokens(image_token_id)
    expanded = []
    for text in texts:
        pieces = text.split(pad)
        expanded.append(pieces[0] + "".join(pad * next(counts) + piece for piece in pieces[1:]))
    encoded = tokenizer(expanded, return_tensors="pt", padding=True)
    kinds = (encoded["input_ids"] == image_token_id).int()
    return {**encoded, **features, "mm_token_type_ids": kinds}


class _PeakMemory:
    """Samples the resident memory of a process and its descendants."""

    def __init__(self, pid: int):
        self._pid = pid
        self._peak = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Highest sum of bytes seen; pages that processes share count once for each."""
        self._is_over.set()
        self._thread.join()
        return self._peak

    def _watch(self) -> None:
        while not self._is_over.wait(0.1):
            self._peak = max(self._peak, sum(map(_resident_bytes, _descendants(self._pid))))


def _descendants(pid: int) -> list[int]:
    found = [pid]
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return found  # it has just ended
    for child in children:
        found += _descendants(int(child))
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it has just ended


def report(questions: str, runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    first = runs["npu_runner"][0]["answers"]
    same = {engine: sum(all(run["answers"][key] == text for run in results) for key, text in first.items())
            for engine, results in runs.items()}
    count = arguments.num_pictures
    rows: dict[str, dict[str, float]] = {}
    print(f"{questions} questions")
    print(f"{'engine':<22}{'rows/s':>9}{'min-max':>16}{'tokens/s':>10}{'peak RSS MiB':>14}{'start s':>9}{'same':>10}")
    for engine, results in runs.items():
        rates = [count / run["serve_seconds"] for run in results]
        pick: Callable[[str], float] = lambda key, results=results: statistics.median(run[key] for run in results)  # type: ignore[misc]
        rows[engine] = {
            "rows_per_second": statistics.median(rates), "min": min(rates), "max": max(rates),
            "tokens_per_second": statistics.median(run["num_tokens"] / run["serve_seconds"] for run in results),
            "peak_rss_mib": pick("peak_rss_mib"), "start_seconds": pick("wall_seconds") - pick("serve_seconds"),
            "same_answers": same[engine],
        }
        row = rows[engine]
        print(f"{engine:<22}{row['rows_per_second']:>9.2f}{min(rates):>8.2f}-{max(rates):<7.2f}"
              f"{row['tokens_per_second']:>10.0f}{row['peak_rss_mib']:>14.0f}{row['start_seconds']:>9.1f}"
              f"{same[engine]:>6}/{count}")
    ours = rows["npu_runner"]["rows_per_second"]
    ratios = {engine: ours / rows[engine]["rows_per_second"] for engine in list(runs)[1:]}
    for engine, ratio in ratios.items():
        print(f"npu_runner is {ratio:.2f} times as fast as {engine}")
    machine = platform.processor() or platform.machine()
    print(json.dumps({"bench": "bench_cpu", "questions": questions, "commit": commit(), "machine": machine,
                      "cores": len(os.sched_getaffinity(0)), "busy": arguments.busy,
                      "python": platform.python_version(), "repeats": arguments.repeats, "num_pictures": count,
                      "ratios": ratios, "engines": rows}))


if __name__ == "__main__":
    main()
