"""Decode steps on the CPU, with contexts of one length and of very different ones: what a long one costs the others.

Runs the embedded model: `short` rows alone, one `long` row alone, both together, and rows of every length between.
Prints a table, then a JSON line. `ratio` is what both together take over the sum of both alone: at most 1.3 is asked.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import time
from typing import Any

import numpy as np
from bench_common import ROOT, commit, versions

from npu_runner import LLM, SamplingParams
from npu_runner.core.batch import ScheduledBatch
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.runner.step import StepUnderWay

STEPS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--short", type=int, default=30, help="tokens of the short prompts")
    parser.add_argument("--long", type=int, default=3900, help="tokens of the long prompt")
    arguments = parser.parse_args()
    short, long = [arguments.short] * arguments.rows, [arguments.long]
    spread = np.geomspace(arguments.short, arguments.long, arguments.rows).astype(int).tolist()
    with LLM(str(ROOT / "npu_runner" / "assets" / "shapes-vl"), platform="cpu", max_num_seqs=arguments.rows + 1) as llm:
        measure(llm, [8] * 4)  # imports, and memory that every step takes
        cases = {"short": short, "long": long, "together": short + long, "spread": spread}
        rows = {name: measure(llm, lengths) for name, lengths in cases.items()}
    report(rows)


def measure(llm: LLM, prompt_lens: list[int]) -> dict[str, float]:
    """Milliseconds of the decode steps that hold all prompts, and by how much the process' highest memory rose."""
    rng = np.random.default_rng(0)
    prompts = [PromptInputs(token_ids=rng.integers(0, 500, length).tolist()) for length in prompt_lens]
    runner: Any = llm.engine._executor._runner  # type: ignore[attr-defined]
    submit, collect = runner.submit, runner.collect
    seconds: list[float] = []
    started = 0.0

    def begin(batch: ScheduledBatch) -> StepUnderWay:
        nonlocal started
        started = time.perf_counter()
        under_way: StepUnderWay = submit(batch)
        return under_way

    def end(under_way: StepUnderWay) -> Any:  # before the next step begins: on the CPU no two are under way
        output, batch = collect(under_way), under_way.step.batch
        if not batch.is_prefill and batch.batch_size == len(prompts):
            seconds.append(time.perf_counter() - started)
        return output

    runner.submit, runner.collect = begin, end
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True), use_tqdm=False)
    runner.submit, runner.collect = submit, collect
    rise = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    ordered = sorted(1000 * value for value in seconds)
    return {"contexts": sum(prompt_lens), "median_ms": statistics.median(ordered), "min_ms": ordered[0],
            "max_ms": ordered[-1], "rise_mib": rise}


def report(rows: dict[str, dict[str, float]]) -> None:
    print(f"{'rows':<10}{'tokens':>9}{'median ms':>11}{'min-max':>18}{'memory MiB':>12}")
    for name, row in rows.items():
        print(f"{name:<10}{row['contexts']:>9.0f}{row['median_ms']:>11.2f}{row['min_ms']:>10.2f}-{row['max_ms']:<7.2f}"
              f"{row['rise_mib']:>+12.0f}")
    ratio = rows["together"]["median_ms"] / (rows["short"]["median_ms"] + rows["long"]["median_ms"])
    print(f"together over the sum of both alone: {ratio:.2f}")
    print(json.dumps({"bench": "bench_cpu_attention", "commit": commit(), "cores": len(os.sched_getaffinity(0)),
                      **versions("torch"), "steps": STEPS, "ratio": ratio, "rows": rows}))


if __name__ == "__main__":
    main()
