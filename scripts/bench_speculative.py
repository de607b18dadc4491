"""What drafts save on the cpu platform: the embedded models, plain steps against steps with drafts, in turns.

Two engines in one process answer the same rows one after the other, and their answers are compared. A figure is the
median over the repeats; a ratio is that of each pair. CPU seconds are of this process, with one thread; on a busy
machine they say more than seconds of a clock. Prints a line for each case, then one JSON line.

    python scripts/bench_speculative.py                                      # every case, some minutes
    python scripts/bench_speculative.py --rows 1 --method forced --repeats 9
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from typing import Any

import torch
from bench_common import commit, versions
from shapes.drawing import TEST_SEEDS, draw_json_example

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import EngineStats

_METHODS: dict[str, dict[str, Any]] = {
    "forced": {"method": "forced"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
}
# Without white space names and signs are one forced text. json.dumps writes blanks, and so the model learned it: then
# the model chooses where they are, and only names are forced.
_TASKS: dict[str, dict[str, Any] | None] = {"compact": {"disable_any_whitespace": True},
                                            "blanks": {"whitespace_pattern": " ?"}, "text": None}
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--method", nargs="+", choices=_METHODS, default=list(_METHODS))
    parser.add_argument("--task", nargs="+", choices=_TASKS, default=list(_TASKS))
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    with _engine(None) as plain:
        for method in arguments.method:
            with _engine(_METHODS[method]) as drafted:
                for task, num_rows in itertools.product(arguments.task, arguments.rows):
                    found = measure(plain, drafted, task, num_rows, arguments.repeats)
                    results.append({"method": method, "task": task, "rows": num_rows, **found})
                    print(describe(results[-1]), flush=True)
    print(json.dumps({"bench": "bench_speculative", "commit": commit(), "model": "shapes-vl", "platform": "cpu",
                      "repeats": arguments.repeats, "versions": versions("torch", "llguidance"), "cases": results}))


def _engine(speculative: dict[str, Any] | None) -> LLM:
    return LLM("shapes-vl", platform="cpu", max_model_len=1024, max_num_seqs=64, preprocessing_workers=0,
               speculative_config=speculative)


def requests(task: str, num_rows: int) -> tuple[list[Any], list[SamplingParams]]:
    """Questions that the model was trained to answer in JSON, each with the schema of its answer or without."""
    rows, params = [], []
    for number in range(num_rows):
        example = draw_json_example(TEST_SEEDS[number])
        parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": image} for image in example.images]
        rows.append([{"role": "user", "content": [*parts, {"type": "text", "text": example.question}]}])
        options = _TASKS[task]
        rule = None if options is None else {"json": example.schema, **options}
        params.append(_PARAMS.replace(structured_outputs=rule))
    return rows, params


def measure(plain: LLM, drafted: LLM, task: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """The first answers of each engine are not measured: they build rules, and fill the caches of images."""
    rows, params = requests(task, num_rows)
    answers = {id(llm): [output.token_ids for output in llm.chat(rows, params)] for llm in (plain, drafted)}
    before, seconds = drafted.stats(), {"plain": [], "drafted": []}  # type: ignore[var-annotated]
    wall: dict[str, list[float]] = {"plain": [], "drafted": []}
    for _ in range(repeats):
        for name, llm in (("plain", plain), ("drafted", drafted)):
            cpu, clock = time.process_time(), time.perf_counter()
            llm.chat(rows, params)
            seconds[name].append(time.process_time() - cpu)
            wall[name].append(time.perf_counter() - clock)
    ratios = [one / two for one, two in zip(seconds["plain"], seconds["drafted"], strict=True)]
    num_equal = sum(one == two for one, two in zip(*answers.values(), strict=True))
    return {"cpu_seconds": seconds, "wall_seconds": wall, "speed_up": statistics.median(ratios),
            "speed_ups": ratios, "equal_answers": num_equal, **_counts(before, drafted.stats(), repeats)}


def _counts(before: EngineStats, after: EngineStats, repeats: int) -> dict[str, Any]:
    def each(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / repeats

    return {name: each(name) for name in ("num_decode_steps", "num_decode_tokens", "num_drafts", "num_draft_tokens",
                                          "num_accepted_tokens", "num_forced_accepted")}


def describe(found: dict[str, Any]) -> str:
    plain, drafted = (statistics.median(found["cpu_seconds"][name]) for name in ("plain", "drafted"))
    share = found["num_accepted_tokens"] / found["num_draft_tokens"] if found["num_draft_tokens"] else 0.0
    of_all = found["num_accepted_tokens"] / max(1, found["num_decode_tokens"])
    return (f"{found['method']:<7} {found['task']:<7} {found['rows']:>3} rows: {plain:.3f} s plain, {drafted:.3f} s "
            f"with drafts, {found['speed_up']:.2f} times as fast ({min(found['speed_ups']):.2f} to "
            f"{max(found['speed_ups']):.2f}); {share:.0%} of drafts kept, {of_all:.0%} of tokens drafted; "
            f"{found['equal_answers']} of {found['rows']} answers equal")


if __name__ == "__main__":
    main()
