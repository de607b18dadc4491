"""shapes-vl on the CPU: our batch job beside transformers' generate, and our ways in beside each other.

Engines: `job` (npu-runner batch), `transformers-1` and `transformers-batched` (one row at a time, and padded batches of
32), `chat` and `stream` (LLM.chat), `ray` (Ray Data with one actor that has all cores and gets all rows at once).
Questions: `mixed`, every kind as the demo asks them, whose answers are short (the vision tower and prefill dominate);
`describe`, whose answers are sentences (decoding dominates); by name only `text`, no image at all.

Every engine runs in a process of its own over the same image files, on the same cores, by turns, and must give the same
answers. Time counts from a model that is ready to the last answer, preprocessing included. Our job prepares its first
rows while its model loads: what those rows take one after the other is measured by itself and added to its time. LLM
and Ray Data's actor have answered one row before, so that their workers run.

    python -m bench.cpu                                           # beside transformers
    python -m bench.cpu --engines job chat stream ray --num-pictures 512 --questions mixed
    python -m bench.cpu --engines job chat --against ../other     # each engine with another tree's npu_runner, too
    python -m bench.cpu --calls                                   # one short generate and chat on a warm LLM

Prints tables, then one JSON line for each.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from bench.common import (
    SHAPES_VL,
    PeakMemory,
    in_turn,
    make_parser,
    measure_head_start,
    median_ratio,
    num_cores,
    print_result,
    run_child,
    show,
    start_child,
)
from npu_runner.ray_data import LLMPredictor
from scripts.shapes.drawing import DEMO_SEEDS, Example, draw_example
from scripts.shapes.evaluate import model_inputs
from scripts.shapes.questions import text_question

MAX_TOKENS, BATCH_SIZE = 96, 32
DEFAULT_ENGINES = ("job", "transformers-1", "transformers-batched")
ENGINES = (*DEFAULT_ENGINES, "chat", "stream", "ray")
HEAD_START, CALLS = "head-start", "calls"
NUM_CALLS = 40


def main() -> None:
    parser = make_parser(__doc__, repeats=3, compares_trees=True)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(DEFAULT_ENGINES))
    parser.add_argument("--questions", choices=("mixed", "describe", "both", "text"), default="both")
    parser.add_argument("--num-pictures", type=int, default=256)
    parser.add_argument("--calls", action="store_true", help="milliseconds of short calls, in place of the engines")
    parser.add_argument("--child", choices=(*ENGINES, HEAD_START, CALLS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(CHILDREN[arguments.child](arguments)))
        return
    if arguments.calls:
        report_calls(measure_calls_of_trees(arguments), arguments)
        return
    for questions in ("mixed", "describe") if arguments.questions == "both" else (arguments.questions,):
        with tempfile.TemporaryDirectory() as name:
            write_requests(Path(name), questions, arguments.num_pictures)
            report(questions, measure_engines(Path(name), arguments), arguments)


def trees(arguments: argparse.Namespace) -> dict[str, Path | None]:
    """The trees to measure, by what is added to an engine's name."""
    return {"": None, **({" of the other tree": arguments.against} if arguments.against else {})}


def measure_calls_of_trees(arguments: argparse.Namespace) -> dict[str, list[Any]]:
    return in_turn({f"{CALLS}{suffix}": partial(_run, CALLS, tree) for suffix, tree in trees(arguments).items()},
                   arguments.repeats)


def _run(child: str, tree: Path | None, _: int = 0, *, folder: Path | None = None) -> Any:
    more = ["--folder", folder] if folder else []
    result = run_child("bench.cpu", *sys.argv[1:], "--child", child, *more, tree=tree)
    if result is None:
        raise SystemExit(f"{child} failed")
    return result


def measure_engines(folder: Path, arguments: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """The runs of every engine, one row's answers and figures each."""
    sides: dict[str, Callable[[int], dict[str, Any]]] = {}
    for engine in arguments.engines:
        for suffix, tree in trees(arguments).items():
            if tree is None or not engine.startswith("transformers"):
                sides[engine + suffix] = partial(run_engine, engine, folder, tree)
    return in_turn(sides, arguments.repeats)


def run_engine(engine: str, folder: Path, tree: Path | None, repeat: int) -> dict[str, Any]:
    """One engine in a fresh process: its figures, with the peak memory of it and its children."""
    output, summary = folder / f"answers-{repeat}-{tree is None}.jsonl", folder / "summary.json"
    if engine == "job":
        command = ["npu_runner", "batch", "-i", folder / "requests.jsonl", "-o", output, "--model", SHAPES_VL,
                   "--platform", "cpu", "--allowed-media-dir", folder, "--summary", summary, "--progress", "off"]
    else:
        command = ["bench.cpu", *sys.argv[1:], "--child", engine, "--folder", folder]
    started = time.perf_counter()
    with start_child(*map(str, command), tree=tree) as process:
        peak = PeakMemory(process.pid)
        text, _ = process.communicate()
        wall_seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{engine} exited with status {process.returncode}")
    if engine == "job":
        figures = read_job(output, summary)
        figures["serve_seconds"] += _run(HEAD_START, tree, folder=folder)
    else:
        figures = json.loads(text.splitlines()[-1])
    return {**figures, "wall_seconds": wall_seconds, "peak_rss_mib": peak.stop() / 2**20}


def write_requests(folder: Path, questions: str, count: int) -> None:
    """Images as files, and one OpenAI batch row for each example."""
    if questions == "text":
        asked = (text_question(random.Random(seed)) for seed in DEMO_SEEDS)
        examples = (Example((), one.text, one.answer, one.kind) for one in asked)
    else:
        drawn = (draw_example(seed) for seed in DEMO_SEEDS)
        examples = (example for example in drawn if questions == "mixed" or example.kind == questions)
    with (folder / "requests.jsonl").open("w") as file:
        for index, example in enumerate(islice(examples, count)):
            paths = [folder / f"{index}-{number}.png" for number in range(len(example.images))]
            for path, image in zip(paths, example.images, strict=True):
                image.save(path)
            messages = example.messages([{"type": "image_url", "image_url": {"url": str(path)}} for path in paths])
            body = {"model": "shapes-vl", "messages": messages, "temperature": 0, "max_tokens": MAX_TOKENS}
            row = {"custom_id": str(index), "method": "POST", "url": "/v1/chat/completions", "body": body}
            file.write(json.dumps(row) + "\n")


def read_rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]


def read_job(output: Path, summary: Path) -> dict[str, Any]:
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    figures = json.loads(summary.read_text())
    answers = {row["custom_id"]: row["response"]["body"]["choices"][0]["message"]["content"] for row in rows}
    return {"serve_seconds": figures["seconds"]["serve"], "num_tokens": figures["tokens"]["completion"],
            "answers": answers}


def head_start(arguments: argparse.Namespace) -> float:
    from npu_runner.config import RunnerConfig

    return measure_head_start(RunnerConfig(model=str(SHAPES_VL)), arguments.folder / "requests.jsonl")[0]


def run_llm(arguments: argparse.Namespace) -> dict[str, Any]:
    from npu_runner import LLM, SamplingParams

    rows = read_rows(arguments.folder)
    conversations = [row["body"]["messages"] for row in rows]
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    with LLM(SHAPES_VL, platform="cpu") as llm:
        llm.chat(conversations[:1], params, use_tqdm=False, allowed_media_dir=arguments.folder)
        started = time.perf_counter()
        if arguments.child == "stream":
            stream = llm.chat(iter(conversations), params, allowed_media_dir=arguments.folder, stream_results=True)
            outputs = [output for _, output in sorted(stream)]
        else:
            outputs = llm.chat(conversations, params, use_tqdm=False, allowed_media_dir=arguments.folder)
        seconds = time.perf_counter() - started
    return {"serve_seconds": seconds, "num_tokens": sum(len(output.token_ids) for output in outputs),
            "answers": {row["custom_id"]: output.text for row, output in zip(rows, outputs, strict=True)}}


class Clocked(LLMPredictor):
    """Writes down when it is ready, with workers, and when its last answer is there."""

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


def run_ray(arguments: argparse.Namespace) -> dict[str, Any]:
    import ray

    from bench.cpu import Clocked  # by its name, so that actors can import it

    clock, rows = arguments.folder / "clock", read_rows(arguments.folder)
    ray.init(num_cpus=num_cores(), include_dashboard=False, log_to_driver=False)
    items = [{"custom_id": row["custom_id"], "messages": row["body"]["messages"]} for row in rows]
    settings = {"model": str(SHAPES_VL), "platform": "cpu", "allowed_media_dir": str(arguments.folder),
                "sampling_params": {"temperature": 0, "max_tokens": MAX_TOKENS},
                "clock": str(clock), "warm_up": items[0]["messages"]}
    answered = ray.data.from_items(items).map_batches(
        Clocked, fn_constructor_kwargs=settings, compute=ray.data.ActorPoolStrategy(size=1), num_cpus=num_cores(),
        batch_size=len(items)).take_all()
    times = [float(line) for line in clock.read_text().splitlines()]
    assert not any(row["__inference_error__"] for row in answered)
    return {"serve_seconds": times[-1] - times[0], "num_tokens": 0,
            "answers": {row["custom_id"]: row["generated_text"] for row in answered}}


def run_transformers(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch
    from PIL import Image
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3VLForConditionalGeneration

    tokenizer = AutoTokenizer.from_pretrained(SHAPES_VL, padding_side="left")
    processor = Qwen2VLImageProcessorPil.from_pretrained(SHAPES_VL)
    model = Qwen3VLForConditionalGeneration.from_pretrained(SHAPES_VL, dtype=torch.float32).eval()
    rows, size = read_rows(arguments.folder), 1 if arguments.child == "transformers-1" else BATCH_SIZE
    answers: dict[str, str] = {}
    num_tokens = 0
    started = time.perf_counter()
    for first in range(0, len(rows), size):
        batch = rows[first : first + size]
        conversations = [row["body"]["messages"] for row in batch]
        images = [Image.open(part["image_url"]["url"]) for messages in conversations
                  for part in messages[-1]["content"] if part["type"] == "image_url"]
        inputs = model_inputs(conversations, images, tokenizer, processor, model.config.image_token_id)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_TOKENS, do_sample=False)
        generated = output[:, inputs["input_ids"].shape[1]:]
        num_tokens += int((generated != tokenizer.pad_token_id).sum())
        texts = tokenizer.batch_decode(generated, skip_special_tokens=True)
        answers.update({row["custom_id"]: text for row, text in zip(batch, texts, strict=True)})
    return {"serve_seconds": time.perf_counter() - started, "num_tokens": num_tokens, "answers": answers}


def report(questions: str, runs: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> None:
    count, base = arguments.num_pictures, next(iter(runs))
    first = runs[base][0]["answers"]
    rows: dict[str, dict[str, Any]] = {}
    print(f"{questions} questions\n{'engine':<40}{'rows/s':>26}{'tokens/s':>10}{'peak RSS MiB':>14}{'start s':>9}"
          f"{'same':>10}")
    for engine, results in runs.items():
        serve = [run["serve_seconds"] for run in results]
        rates = [count / seconds for seconds in serve]
        pick: Callable[[str], float] = lambda key, results=results: statistics.median(run[key] for run in results)  # type: ignore[misc]
        row = rows[engine] = {
            "rows_per_second": rates, "tokens_per_second": pick("num_tokens") / statistics.median(serve),
            "peak_rss_mib": pick("peak_rss_mib"), "start_seconds": pick("wall_seconds") - statistics.median(serve),
            "same_answers": min(sum(run["answers"][key] == text for key, text in first.items()) for run in results)}
        print(f"{engine:<40}{show(rates, 2):>26}{row['tokens_per_second']:>10.0f}{row['peak_rss_mib']:>14.0f}"
              f"{row['start_seconds']:>9.1f}{row['same_answers']:>6}/{count}")
    ratios = {engine: median_ratio(rows[base]["rows_per_second"], row["rows_per_second"])
              for engine, row in rows.items() if engine != base}
    for engine, ratio in ratios.items():
        print(f"{base} is {ratio:.3f} times as fast as {engine} (median of pairs)")
    print_result("cpu", arguments, questions=questions, ratios=ratios, engines=rows)


def measure_calls(_: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of one short call on a warm LLM, each with other words; the first calls are warm-up."""
    from npu_runner import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    found: dict[str, list[float]] = {"generate": [], "chat": []}
    with LLM(SHAPES_VL, platform="cpu") as llm:
        calls: dict[str, Callable[[str], Any]] = {
            "generate": lambda text: llm.generate([text], params, use_tqdm=False),
            "chat": lambda text: llm.chat([{"role": "user", "content": text}], params, use_tqdm=False)}
        for number in range(5 + NUM_CALLS):
            for name, call in calls.items():
                started = time.perf_counter()
                call(f"What is shape {number}?")
                if number >= 5:
                    found[name].append(1e3 * (time.perf_counter() - started))
    return found


def report_calls(runs: dict[str, list[dict[str, list[float]]]], arguments: argparse.Namespace) -> None:
    milliseconds = {f"{name}, {side}": [statistics.median(run[name]) for run in results]
                    for name in ("generate", "chat") for side, results in runs.items()}
    for name, values in milliseconds.items():
        print(f"{name:<40}{show(values, 2)} ms a call")
    print_result("cpu calls", arguments, milliseconds=milliseconds)


CHILDREN: dict[str, Callable[[argparse.Namespace], Any]] = {
    "chat": run_llm, "stream": run_llm, "ray": run_ray, "transformers-1": run_transformers,
    "transformers-batched": run_transformers, HEAD_START: head_start, CALLS: measure_calls}


if __name__ == "__main__":
    main()
