"""Would a prefill step be worth more if it carried the running sequences' next tokens? Milliseconds of such steps.

    python scripts/bench_mixed_steps.py [--platform cuda] [--sizes real|tiny]

Three steps over random weights, two under way at a time: a decode step of all sequences (a captured graph), a prefill
of some prompts, and both in one: the same prompts with one token for each of the other sequences, whose attention goes
through the prefill's kernel. From these, milliseconds a row in a job that runs on and on, where a row that ends makes
room for the next: with the two apart, prompts gathered as the scheduler gathers them, and with every prompt in a step
that decodes, too.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import commit, versions
from bench_device_shapes import make_text_model

from npu_runner import LLM, SamplingParams
from npu_runner.core.batch import NO_NEW_BLOCKS, NO_TOKEN_IDS, SamplingEntry, ScheduledBatch
from npu_runner.platforms import find_platform

_REPEATS, _STEPS = 3, 4
_JOIN_SHARE = 8  # as the scheduler gathers


@dataclass(frozen=True)
class Work:
    """`answers`: tokens of an answer, to be worked out from the same steps."""

    model: str
    num_seqs: int
    prompt: int
    context: int
    answers: tuple[int, ...] = (128, 512)

    @property
    def group(self) -> int:
        return self.num_seqs // _JOIN_SHARE


WORK = {"real": (Work("qwen3-8b", 256, 830, 900), Work("qwen3-8b", 64, 2000, 2200), Work("qwen3-0.6b", 256, 560, 900)),
        "tiny": (Work("tiny", 16, 40, 60, (8, 32)),)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--sizes", choices=tuple(WORK), default="real")
    arguments = parser.parse_args()
    results = []
    for work in WORK[arguments.sizes]:
        measured = measure(work, arguments.platform)
        print("\n".join(report(work, measured)), flush=True)
        results.append({**asdict(work), **measured})
    print(json.dumps({"bench": "bench_mixed_steps", "commit": commit(), "versions": versions("torch", "triton"),
                      "platform": arguments.platform, "results": results}))


def measure(work: Work, platform: str) -> dict[str, Any]:
    """{"decode": ms, "prefill": {prompts: ms}, "mixed": {prompts: ms}}."""
    defaults = find_platform(platform).defaults
    graphs = {"enforce_eager": True} if defaults.graph_mode == "eager" else {"graph_batch_sizes": (work.num_seqs,)}
    dtype = defaults.dtype or "bfloat16"
    with (tempfile.TemporaryDirectory() as folder,
          LLM(make_text_model(Path(folder), work.model), load_format="dummy", platform=platform, dtype=dtype,
              max_model_len=4096, max_num_seqs=work.num_seqs,
              max_num_batched_tokens=work.group * work.prompt + work.num_seqs, **graphs) as llm):
        runner: Any = llm.engine._executor._runner  # type: ignore[attr-defined]
        with torch.inference_mode():
            return _measure(runner, work)


def _measure(runner: Any, work: Work) -> dict[str, Any]:
    block_size = runner.settings.block_size

    def seconds(rows: Sequence[tuple[int, int]], *, is_prefill: bool = True) -> float:
        return _milliseconds(runner, _step(rows, block_size, is_prefill=is_prefill))

    decoding = (1, work.context)
    entering = _step([(1, 1)] * work.num_seqs, block_size, is_prefill=True)
    entering.new_sampling = [_entry(slot) for slot in range(work.num_seqs)]
    runner.collect(runner.submit(entering))
    counts = sorted({1, 2, 4, work.group})
    prompts = {count: [(work.prompt, work.prompt)] * count for count in counts}
    return {"decode": seconds([decoding] * work.num_seqs, is_prefill=False),
            "prefill": {count: seconds(rows) for count, rows in prompts.items()},
            "mixed": {count: seconds([decoding] * (work.num_seqs - count) + rows) for count, rows in prompts.items()}}


def _entry(slot: int) -> SamplingEntry:
    return SamplingEntry(slot, SamplingParams(temperature=0.0), slot, [0], [])


def _step(rows: Sequence[tuple[int, int]], block_size: int, *, is_prefill: bool) -> ScheduledBatch:
    """A made-up step of (tokens of it, context with them) for each slot, over blocks that no two rows share."""
    query_lens_B, context_lens_B = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    counts_B = -(-context_lens_B // block_size)
    columns_N = np.concatenate([np.arange(count) for count in counts_B])
    rows_N = np.repeat(np.arange(len(rows)), counts_B)
    new_blocks_N3 = np.stack([rows_N, columns_N, 1 + np.arange(len(rows_N))], axis=1).astype(np.int32)
    positions_T = np.concatenate([np.arange(context - query, context, dtype=np.int32)
                                  for query, context in zip(query_lens_B, context_lens_B, strict=True)])
    return ScheduledBatch(
        is_prefill=is_prefill, request_ids=[str(row) for row in range(len(rows))],
        slots_B=np.arange(len(rows), dtype=np.int32),
        token_ids_T=np.arange(len(positions_T), dtype=np.int32) % 2000 if is_prefill else NO_TOKEN_IDS,
        positions=positions_T, query_lens_B=query_lens_B, context_lens_B=context_lens_B, new_blocks_N3=new_blocks_N3,
        samples_B=np.ones(len(rows), dtype=np.bool_))


def _milliseconds(runner: Any, step: ScheduledBatch) -> float:
    """Of one step among several, two under way: the median of a few rounds."""
    runner.collect(runner.submit(step))  # kernels for these sizes, and the block tables
    step.new_blocks_N3 = NO_NEW_BLOCKS
    rounds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        newest = runner.submit(step)
        for _ in range(_STEPS - 1):
            oldest, newest = newest, runner.submit(step)
            runner.collect(oldest)
        runner.collect(newest)
        rounds.append(1e3 * (time.perf_counter() - started) / _STEPS)
    return statistics.median(rounds)


def report(work: Work, measured: dict[str, Any]) -> list[str]:
    decode, prefill, mixed = measured["decode"], measured["prefill"], measured["mixed"]
    lines = [f"{work.model}, {work.num_seqs} sequences of {work.context} tokens, prompts of {work.prompt}: "
             f"a decode step {decode:.2f} ms"]
    lines += [f"    {count:>4} prompts: {prefill[count]:.2f} ms, with the other sequences' tokens {mixed[count]:.2f}; "
              f"apart {prefill[count] + decode:.2f}" for count in prefill]
    for answer in work.answers:
        apart = prefill[work.group] / work.group + decode * answer / work.num_seqs
        lines.append(f"    answers of {answer} tokens, ms a row: apart {apart:.3f}, mixed "
                     f"{_mixed_row(work, measured, answer):.3f}")
    return lines


def _mixed_row(work: Work, measured: dict[str, Any], answer: int) -> float:
    """Of `answer` steps, which num_seqs rows share, each takes in as many prompts as rows have ended."""
    ended_a_step = work.num_seqs / answer
    if ended_a_step < 1:
        return float(measured["mixed"][1] + measured["decode"] * (1 / ended_a_step - 1))
    count = min(measured["mixed"], key=lambda count: abs(math.log(count / ended_a_step)))
    return float(measured["mixed"][count] / count)


if __name__ == "__main__":
    main()
