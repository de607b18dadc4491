"""What a decode step costs whose rows have drafts of the model's own head, beside a plain step: how many of the drafts
must be kept for them to pay.

A shape of Qwen3.5 with random weights (bench_device_shapes.py). Its drafts are never kept, and no row pauses here, so
each step has all of them. Plain steps have two under way where the platform does so by itself. "without graphs": the
head's passes are launched operator by operator, in the same steps, by turns. Prints the median step of each repeat,
then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_common import commit
from bench_device_shapes import make_text_model

from npu_runner import LLM, SamplingParams
from npu_runner.core.draft_history import DraftHistory
from npu_runner.request.prompt_inputs import PromptInputs

_NUM_PROMPT, _WARM_UP, _STEPS = 60, 8, 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--model", default="qwen3.5-9b", choices=["qwen3.5-9b", "qwen3.6-35b-a3b", "tiny-hybrid"])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--drafts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    found: dict[str, Any] = {}
    DraftHistory.pauses_at = lambda self, num_tokens: False  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        path = make_text_model(Path(folder), arguments.model)
        for num_drafts in [0, *arguments.drafts]:
            found[str(num_drafts)] = measure(path, num_drafts, arguments)
    print(json.dumps({"bench": "bench_mtp_steps", "commit": commit(), "model": arguments.model, "torch":
                      torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
                      "milliseconds": found}))


def measure(path: Path, num_drafts: int, arguments: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """Milliseconds by rows and kind."""
    drafting: dict[str, Any] = {}
    if num_drafts:
        drafting["speculative_config"] = {"method": "mtp", "num_speculative_tokens": num_drafts}
    found: dict[str, dict[str, list[float]]] = {}
    with LLM(path, platform=arguments.platform, load_format="dummy", max_model_len=512,
             max_num_seqs=max(arguments.rows), **drafting) as llm:
        steps: Any = llm.engine._executor._runner.steps  # type: ignore[attr-defined]
        for rows in arguments.rows:
            kinds: dict[str, list[float]] = {"": []}
            if num_drafts:
                kinds["without graphs"] = []
            for repeat, kind in [(repeat, kind) for repeat in range(arguments.repeats) for kind in kinds]:
                if kind:
                    steps._pass = without_graphs(steps)
                kinds[kind].append(milliseconds(llm, rows, f"{rows} {kind} {repeat}"))
                steps.__dict__.pop("_pass", None)
            for kind, values in kinds.items():
                print(f"{num_drafts} drafts {rows:4} rows {kind:16}", " ".join(f"{value:.3f}" for value in values),
                      flush=True)
            found[str(rows)] = kinds
    return found


def without_graphs(steps: Any) -> Callable[..., None]:
    """Over the same buffers; attention whose eager steps need no plan."""
    return lambda bucket, inputs, plan: steps.head_step(inputs, plan)  # type: ignore[no-any-return]


def milliseconds(llm: LLM, rows: int, name: str) -> float:
    """The median of the steps of a full batch."""
    engine, times = llm.engine, []
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=2 * (_WARM_UP + _STEPS))
    for row in range(rows):
        prompt = [(row * 7 + place) % 1000 + 5 for place in range(_NUM_PROMPT)]
        engine.add_request(f"{name} {row}", PromptInputs(prompt), params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(_WARM_UP):
        engine.step()
    for _ in range(_STEPS):
        started = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - started))
    while engine.has_unfinished_requests():
        engine.step()
    return statistics.median(times)


if __name__ == "__main__":
    main()
