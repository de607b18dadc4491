"""How long the first token of short prompts takes, on random weights of a real shape: milliseconds of one prefill step.

    python scripts/bench_first_token.py [--shape qwen3-30b-a3b] [--tokens 64 512] [--prompts 1] [--enforce-eager]

Requests of one token each are handed to an idle engine, which runs until they are done. `device ms`: from the first
kernel's start to the last one's end, of one more run under the vendor's profiler; `busy ms`: what kernels ran of it.
--kernels prints the kernels of that run by name. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import torch
from bench_common import commit, versions
from bench_device import device_name
from bench_device_bandwidth import measure_read_bandwidth
from bench_device_idle import busy_ns
from bench_device_shapes import TEXT, make_text_model

from npu_runner import LLM, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs

_PHASES = ("prepare", "launch", "sample", "wait")
_WARM_UP, _BANDWIDTH_BYTES = 2, 1 << 30
_NUM_TOKEN_IDS = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--shape", choices=TEXT, default="qwen3-30b-a3b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="of a prompt")
    parser.add_argument("--prompts", type=int, default=1, help="of a step")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    settings = {"platform": arguments.platform, "dtype": arguments.dtype, "enforce_eager": arguments.enforce_eager}
    with tempfile.TemporaryDirectory() as folder:
        path = make_text_model(Path(folder), arguments.shape)
        with LLM(path, load_format="dummy", max_model_len=4096, enable_prefix_caching=False, **settings) as llm:
            start = llm.engine.info.start_seconds
            print("start: " + ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in start.items()))
            print(f"{'tokens':>7}{'ms':>9}{'min-max':>16}  host ms: " + " ".join(f"{name:>8}" for name in _PHASES) +
                  "  device ms  busy ms")
            results = [measure(llm, arguments, num_tokens) for num_tokens in arguments.tokens]
            graphs = llm.engine.info.graphs
    device = torch.device(arguments.platform)
    bandwidth, _ = measure_read_bandwidth(device, _BANDWIDTH_BYTES)
    print(json.dumps({"bench": "bench_first_token", "commit": commit(), "device": device_name(arguments.platform),
                      "versions": versions("torch", "torch-npu", "triton"), "shape": arguments.shape,
                      "prompts": arguments.prompts, "dtype": arguments.dtype, "graphs": graphs, "start": start,
                      "read_bytes_per_second": bandwidth, "results": results}))


def measure(llm: LLM, arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    for repeat in range(_WARM_UP):
        _first_tokens(llm, arguments.prompts, num_tokens, repeat)
    before = asdict(llm.engine.stats())
    times = [_first_tokens(llm, arguments.prompts, num_tokens, _WARM_UP + repeat)
             for repeat in range(arguments.repeats)]
    after = asdict(llm.engine.stats())
    parts = {phase: 1e3 * (after[f"{phase}_seconds"] - before[f"{phase}_seconds"]) / len(times) for phase in _PHASES}
    found = {"tokens": num_tokens, "milliseconds": times, "parts": parts}
    if arguments.platform == "cuda":
        found |= _on_device(llm, arguments, num_tokens)
    print(f"{num_tokens:>7}{statistics.median(times):>9.2f}{min(times):>9.2f}-{max(times):<6.2f}           " +
          " ".join(f"{value:>8.2f}" for value in parts.values()) +
          f"{found.get('device_ms', 0):>11.2f}{found.get('busy_ms', 0):>9.2f}", flush=True)
    return found


def _first_tokens(llm: LLM, num_prompts: int, num_tokens: int, number: int) -> float:
    """Milliseconds until every prompt has its token."""
    draw = Random(1000 * num_tokens + number)
    last_id = min(_NUM_TOKEN_IDS, llm.engine.model_config.vocab_size - 1)
    prompts = [[draw.randint(0, last_id) for _ in range(num_tokens)] for _ in range(num_prompts)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        llm.engine.add_request(f"{num_tokens}-{number}-{index}", PromptInputs(prompt), params)
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return 1e3 * (time.perf_counter() - started)


def _on_device(llm: LLM, arguments: argparse.Namespace, num_tokens: int) -> dict[str, Any]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        _first_tokens(llm, arguments.prompts, num_tokens, -1)
    spans_ns, microseconds, calls = [], Counter[str](), Counter[str]()
    for event in profile.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            spans_ns.append((event.start_ns(), event.end_ns()))
            microseconds[event.name()[:60]] += event.duration_ns() / 1e3
            calls[event.name()[:60]] += 1
    if arguments.kernels:
        print("\n".join(f"    {total:>9.0f} us {calls[name]:>5} {name}"
                        for name, total in microseconds.most_common(16)))
    ends = min(first for first, _ in spans_ns), max(last for _, last in spans_ns)
    return {"device_ms": (ends[1] - ends[0]) / 1e6, "busy_ms": busy_ns(spans_ns) / 1e6, "kernels": len(spans_ns)}


if __name__ == "__main__":
    main()
