"""Compares on a device the two or more values of each setting that has several, and prints the figures side by side.

    scripts/run_ascend.sh --exec python3 scripts/compare_ascend.py            # real shapes, random weights
    ... --only decode_attention --model path/to/Qwen3-VL                      # one comparison, a checkpoint of yours
    ... --size tiny --platform cpu                                            # that the script itself works

Each side runs in a process of its own, through the same code as every job, `--repeats` times by turns; a figure is the
median. "other tokens" means that the sides do not choose the same tokens, which random weights do easily and a real
checkpoint should not. Ends with one JSON line. Default settings stand first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench.common import ROOT, commit, in_turn, versions
from bench.shapes import make_text_model

PREFIX = "NPU_RUNNER_ASCEND_"
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Sides by name: environment variables, and settings of LLM. Those of `settings` hold for all sides."""

    question: str
    sides: Mapping[str, tuple[Mapping[str, str], Settings]]
    settings: Settings = field(default_factory=dict)
    workload: str = "decode"
    num_devices: int = 1


def _variable(name: str, *values: str | None) -> dict[str, tuple[dict[str, str], Settings]]:
    """A side for each value of an environment variable; None: not set."""
    return {"not set" if value is None else f"{name.removeprefix(PREFIX)}={value}":
            ({} if value is None else {name: value}, {}) for value in values}


_GRAPHS = {"graph_mode": "reduce-overhead"}
_AUTOTUNE = {"graph_mode": "max-autotune", "use_graph_cache": False}
COMPARISONS = {
    "graph_mode": Comparison(
        question="What are graphs worth, and what does their start cost?",
        sides={mode: ({}, {"graph_mode": mode}) for mode in ("reduce-overhead", "eager")}
        | {"max-autotune": ({}, _AUTOTUNE)}),
    "decode_attention": Comparison(
        question="Does decode attention without a mask take the kernel's own path for it?",
        sides=_variable(f"{PREFIX}DECODE_ATTENTION", "masked", "unmasked"), settings=_GRAPHS),
    "capture": Comparison(
        question="What does the host pay for a replay of torch_npu's compiler, and of torch.npu.graph?",
        sides=_variable(f"{PREFIX}CAPTURE", "compiled", "recorded"), settings=_GRAPHS),
    "ge_tiling": Comparison(
        question="Do GE graphs wait for the host, which computes attention's tiling?",
        sides=_variable(f"{PREFIX}GE_TILING", "auto", "device", "host"), settings=_AUTOTUNE),
    "replay": Comparison(
        question="Can a graph be given new lengths while its last replay runs, and what does that save?",
        sides=_variable(f"{PREFIX}REPLAY", "waiting", "overlapped"), settings=_GRAPHS),
    "nz_weights": Comparison(
        question="Are int8 weights quicker in NZ than row by row?",
        sides=_variable(f"{PREFIX}NZ_WEIGHTS", "int8", "all", "none"), settings={**_GRAPHS, "quantization": "int8"}),
    "affinity": Comparison(
        question="Is it worth to bind threads to the cores near their device?",
        sides=_variable("CPU_AFFINITY_CONF", None, "0", "1", "mode:2,npu_affine:1"), settings=_GRAPHS),
    "threads": Comparison(
        question="Do threads of the device's process help it, or take cores from preprocessing?",
        sides=_variable("OMP_NUM_THREADS", None, "4", "8"), workload="pictures"),
    "expansion": Comparison(
        question="Are collectives on the vector cores quicker than as the chip does them by itself?",
        sides=_variable("HCCL_OP_EXPANSION_MODE", None, ""), settings={**_GRAPHS, "tensor_parallel_size": 2},
        num_devices=2),
    "buffers": Comparison(
        question="Is 64 MiB enough for the second communicator?",
        sides=_variable("HCCL_BUFFSIZE", None, "200"), settings={**_AUTOTUNE, "tensor_parallel_size": 2},
        num_devices=2),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Size:
    """A batch of equal prompts, each with the same number of tokens to come."""

    model: str
    batch_size: int
    prompt_len: int
    num_tokens: int
    num_rows: int
    job: tuple[str, ...] = ()
    """Options of the batch job."""


SIZES = {"real": Size(model="qwen3-8b", batch_size=32, prompt_len=2048, num_tokens=128, num_rows=512),
         "tiny": Size(model="tiny", batch_size=2, prompt_len=20, num_tokens=6, num_rows=3,
                      job=("--max-num-seqs=4", "--max-model-len=512", "--enforce-eager"))}


def measure_decode(settings: dict[str, Any], size: Size) -> dict[str, Any]:
    """Seconds to start, milliseconds a decode step, and of those the host's; a hash of the tokens."""
    from npu_runner import LLM, SamplingParams
    from npu_runner.request.prompt_inputs import PromptInputs

    started = time.perf_counter()
    settings |= {"max_num_seqs": size.batch_size, "max_model_len": size.prompt_len + size.num_tokens}
    if settings.get("graph_mode") != "eager":
        settings["graph_batch_sizes"] = (size.batch_size,)
    with LLM(**settings) as llm:
        start_seconds = time.perf_counter() - started
        prompts = [PromptInputs([(row * 31 + place * 7) % 1900 + 3 for place in range(size.prompt_len)])
                   for row in range(size.batch_size)]
        params = SamplingParams(temperature=0, max_tokens=size.num_tokens, ignore_eos=True)
        results = llm.generate(prompts, params)
        stats = llm.engine.stats()
    num_steps = max(1, stats.num_decode_steps)
    host_seconds = stats.prepare_seconds + stats.launch_seconds + stats.sample_seconds
    tokens = json.dumps([result.token_ids for result in results])
    return {"start_s": start_seconds, "step_ms": 1000 * stats.decode_seconds / num_steps,
            "host_ms": 1000 * host_seconds / (num_steps + stats.num_prefill_steps),
            "tokens": hashlib.sha256(tokens.encode()).hexdigest()[:12]}


def measure_images(settings: dict[str, Any], size: Size) -> dict[str, Any]:
    """Rows a second of a batch job of images, with everything that prepares them."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items() if name != "load_format"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _run([str(ROOT / "scripts/demo_requests.py"), name, "--num-rows", str(size.num_rows)])
        started = time.perf_counter()
        _run(["-m", "npu_runner", "batch", "--input", str(folder / "requests.jsonl"), "--output",
              str(folder / "answers.jsonl"), "--allowed-media-dir", str(folder / "pictures"), *options, *size.job])
        seconds = time.perf_counter() - started
        rows = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    texts = sorted((row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"]) for row in rows)
    return {"job_s": seconds, "rows_per_s": len(rows) / seconds,
            "tokens": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:12]}


def _run(arguments: list[str]) -> None:
    """A program of ours, whose last words become this program's when it fails."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(_last_line(done.stderr))


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no output"


def run_side(comparison: Comparison, side: str, common: Settings, size: str) -> dict[str, Any]:
    """The figures of one process, or the last line of what it said instead."""
    variables, settings = comparison.sides[side]
    task = {"workload": comparison.workload, "settings": {**common, **comparison.settings, **settings}, "size": size}
    names = [name for one, _ in comparison.sides.values() for name in one]
    env = {name: value for name, value in os.environ.items() if name not in names} | dict(variables)
    command = [sys.executable, __file__, "--run", json.dumps(task)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return json.loads(_last_line(done.stdout)) if done.returncode == 0 else {"error": _last_line(done.stderr)}


def compare(comparison: Comparison, common: Settings, size: str, repeats: int) -> dict[str, dict[str, Any]]:
    """Medians of each side."""
    sides = {side: lambda _, side=side: run_side(comparison, side, common, size) for side in comparison.sides}
    medians = {side: _median(runs) for side, runs in in_turn(sides, repeats).items()}
    first = next(iter(medians.values())).get("tokens")
    for figures in medians.values():
        figures["same_tokens"] = figures.pop("tokens", None) == first
    return medians


def _median(runs: list[dict[str, Any]]) -> dict[str, Any]:
    failed = next((run for run in runs if "error" in run), None)
    if failed is not None:
        return failed
    figures = [name for name in runs[0] if name != "tokens"]
    return {"tokens": runs[0]["tokens"], **{name: statistics.median(run[name] for run in runs) for name in figures}}


def as_rows(name: str, comparison: Comparison, medians: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    yield f"\n{name}: {comparison.question}"
    for side, figures in medians.items():
        texts = [f"{value:>10.2f} {figure}" for figure, value in figures.items() if isinstance(value, float)]
        note = figures.get("error", "" if figures["same_tokens"] else "other tokens")
        yield f"  {side:32} {''.join(texts)}  {note}".rstrip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=COMPARISONS, action="append", help="may be repeated; default: all of them")
    parser.add_argument("--skip", choices=COMPARISONS, action="append", default=[], help="may be repeated")
    parser.add_argument("--model", help="a checkpoint; default: real shapes with random weights")
    parser.add_argument("--size", choices=SIZES, default="real")
    parser.add_argument("--platform", default="npu")
    parser.add_argument("--num-devices", type=int, default=1, help="with 2, ranks are compared, too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--run", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run is not None:
        task = arguments.run
        measure = measure_decode if task["workload"] == "decode" else measure_images
        print(json.dumps(measure(task["settings"], SIZES[task["size"]])))
        return 0
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        random = {"model": str(make_text_model(Path(folder), SIZES[arguments.size].model)), "load_format": "dummy"}
        for name in [name for name in arguments.only or COMPARISONS if name not in arguments.skip]:
            comparison = COMPARISONS[name]
            if comparison.num_devices > arguments.num_devices:
                print(f"\n{name}: skipped, it wants --num-devices {comparison.num_devices}")
                continue
            given = {"model": arguments.model} if arguments.model else random if comparison.workload == "decode" else {}
            common = {**given, "platform": arguments.platform}
            found[name] = compare(comparison, common, arguments.size, arguments.repeats)
            print("\n".join(as_rows(name, comparison, found[name])), flush=True)
    print(json.dumps({"bench": "compare_ascend", "commit": commit(), "size": arguments.size,
                      "repeats": arguments.repeats, "versions": versions(), "found": found}))
    return 1 if any("error" in figures for sides in found.values() for figures in sides.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
