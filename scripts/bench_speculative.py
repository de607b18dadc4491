"""What drafts save: plain steps against steps with drafts, in turns.

Two engines in one process answer the same rows one after the other, and their answers are compared. A figure is the
median over the repeats; a ratio is that of each pair. On the cpu platform it is of CPU seconds of this process, with
one thread: on a busy machine they say more than seconds of a clock. Elsewhere it is of the clock's. Prints a line for
each case, then one JSON line.

    python scripts/bench_speculative.py                                      # the embedded model on cpu, some minutes
    python scripts/bench_speculative.py --rows 1 --method forced --repeats 9
    python scripts/bench_speculative.py --model shapes-hybrid --method mtp-2 --task text     # its own head
    python scripts/bench_speculative.py --method off --task free --repeats 15                # what drafts cost if off
    python scripts/bench_speculative.py --method suffix --task alike --rows 8 64             # answers of one template
    python scripts/bench_speculative.py --platform cuda --model qwen3-8b --method forced     # random weights
    python scripts/bench_speculative.py --platform cuda --model qwen3-8b --method synthetic --task free

A model of random weights has a vocabulary in which a text has one spelling, and a schema whose fields are four free
characters each. So most tokens are forced, and each of them is kept. `synthetic` keeps three drafts a row with a
probability of 0.7 each, if those before them are kept (synthetic_drafts.py). Its answers are made up.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_common import commit, versions
from bench_device_shapes import TEXT, make_text_model
from bench_structured import write_vocabulary
from shapes.drawing import TEST_SEEDS, draw_json_example
from synthetic_drafts import SPECULATIVE, synthetic_drafts

from npu_runner import LLM, SamplingParams
from npu_runner.request.outputs import EngineStats

_METHODS: dict[str, dict[str, Any]] = {
    "forced": {"method": "forced"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    "synthetic": SPECULATIVE,
    # Configured, and off for every number of rows.
    "off": {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4096, 0]]},
    **{f"mtp-{num}": {"method": "mtp", "num_speculative_tokens": num} for num in (1, 2, 3)},
}
# Without white space names and signs are one forced text. json.dumps writes blanks, and so the model learned it: then
# the model chooses where they are, and only names are forced.
_QUESTIONS: dict[str, dict[str, Any] | None] = {"compact": {"disable_any_whitespace": True},
                                                "blanks": {"whitespace_pattern": " ?"}, "text": None}
# `alike`: those without a schema, other ones in each repeat, as in a job. `free`: as many tokens as --tokens says.
_TASKS = (*_QUESTIONS, "alike", "schema", "free")
_EMBEDDED = ("shapes-vl", "shapes-hybrid")
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--method", nargs="+", choices=_METHODS, default=["forced", "ngram"])
    parser.add_argument("--task", nargs="+", choices=_TASKS, help="by default the questions of an embedded model, with "
                        "and without a schema; schema with random weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256, help="of a row's answer, with the tasks schema and free")
    parser.add_argument("--platform", default="cpu")
    parser.add_argument("--model", default=_EMBEDDED[0], choices=[*_EMBEDDED, *sorted(TEXT)])
    arguments = parser.parse_args()
    if arguments.model not in _EMBEDDED and set(arguments.task or ()) - {"schema", "free"}:
        parser.error(f"{arguments.model} sees no images; its tasks are schema and free")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        results = compare(arguments, folder)
    print(json.dumps({"bench": "bench_speculative", "commit": commit(), "model": arguments.model,
                      "platform": arguments.platform, "repeats": arguments.repeats,
                      "versions": versions("torch", "triton", "llguidance"), "cases": results}))


def compare(arguments: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    settings: dict[str, Any] = {"platform": arguments.platform, "max_num_seqs": max(arguments.rows)}
    model, tasks = arguments.model, arguments.task or list(_QUESTIONS)
    if model in _EMBEDDED:
        settings |= {"preprocessing_workers": 0, "max_model_len": 1024}
    else:
        path = make_text_model(Path(folder), model)
        write_vocabulary(path, TEXT[model], spells_once=True)
        model, tasks = str(path), arguments.task or ["schema"]
        settings |= {"load_format": "dummy", "max_model_len": 4096}
    results: list[dict[str, Any]] = []
    num_asked = 0
    # Of a device's memory each of both engines takes a part.
    with LLM(model, **settings, memory_utilization=0.45) as plain:
        for method in arguments.method:
            drafts = synthetic_drafts() if method == "synthetic" else contextlib.nullcontext()
            with drafts, LLM(model, **settings, memory_utilization=0.9,
                             speculative_config=_METHODS[method]) as drafted:
                for task, num_rows in itertools.product(tasks, arguments.rows):
                    workload = Workload(task, num_rows, arguments.tokens, num_asked)
                    num_asked += (1 + arguments.repeats) * num_rows
                    in_step = (method, task, settings["platform"]) == ("off", "free", "cpu")
                    found = (measure_in_step if in_step else measure)(plain, drafted, workload, arguments.repeats)
                    results.append({"method": method, "task": task, "rows": num_rows, **found})
                    print(describe(results[-1]), flush=True)
    return results


@dataclass(frozen=True)
class Workload:
    task: str
    num_rows: int
    num_tokens: int
    num_asked: int
    """Rows of cases before: an engine has met their images."""

    def requests(self, repeat: int) -> tuple[list[Any], list[SamplingParams]]:
        if self.task == "schema":
            return self._tables()
        if self.task == "free":
            texts = [f"Row {number}, please." for number in range(self.num_rows)]
            params = [SamplingParams(temperature=0.6, seed=number, max_tokens=self.num_tokens, ignore_eos=True)
                      for number in range(self.num_rows)]
            return [[{"role": "user", "content": text}] for text in texts], params
        return self._questions(self.num_asked + repeat * self.num_rows if self.task == "alike" else 0)

    def _tables(self) -> tuple[list[Any], list[SamplingParams]]:
        """Of a schema of their own, cut after `num_tokens`."""
        params = []
        for number in range(self.num_rows):
            value = {"type": "string", "pattern": "^[a-z]{4}$"}
            columns = {f"{word}_{number}": value for word in ("name", "kind", "town", "day")}
            row = {"type": "object", "properties": columns, "required": list(columns), "additionalProperties": False}
            rule = {"json": {"type": "array", "items": row, "minItems": 1000}, "disable_any_whitespace": True}
            params.append(SamplingParams(temperature=0.6, seed=number, max_tokens=self.num_tokens,
                                         structured_outputs=rule))
        return [[{"role": "user", "content": f"Table {number}, please."}] for number in range(self.num_rows)], params

    def _questions(self, first: int) -> tuple[list[Any], list[SamplingParams]]:
        """Those that the model was trained to answer in JSON, each with the schema of its answer or without."""
        rows, params = [], []
        for number in range(first, first + self.num_rows):
            example = draw_json_example(TEST_SEEDS[number])
            parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": image} for image in example.images]
            rows.append([{"role": "user", "content": [*parts, {"type": "text", "text": example.question}]}])
            options = _QUESTIONS.get(self.task)
            rule = None if options is None else {"json": example.schema, **options}
            params.append(_PARAMS.replace(structured_outputs=rule))
        return rows, params


def measure(plain: LLM, drafted: LLM, workload: Workload, repeats: int) -> dict[str, Any]:
    """The first answers of each engine are not measured: they build rules, and fill the caches of images. Engines take
    turns in which of them is first."""
    cpu: dict[str, list[float]] = {"plain": [], "drafted": []}
    wall: dict[str, list[float]] = {"plain": [], "drafted": []}
    before, num_equal = drafted.stats(), 0
    for repeat in range(1 + repeats):
        rows, params = workload.requests(repeat)
        answers: dict[str, list[list[int]]] = {}
        for name, llm in (("plain", plain), ("drafted", drafted))[:: -1 if repeat % 2 else 1]:
            cpu_before, clock_before = time.process_time(), time.perf_counter()
            outputs = llm.chat(rows, params)
            cpu[name].append(time.process_time() - cpu_before)
            wall[name].append(time.perf_counter() - clock_before)
            assert all(output.finish_reason != "error" for output in outputs), "what failed took no time"
            answers[name] = [output.token_ids for output in outputs]
        num_equal += sum(one == two for one, two in zip(answers["plain"], answers["drafted"], strict=True))
    cpu, wall = ({name: values[1:] for name, values in each.items()} for each in (cpu, wall))
    shown = cpu if plain.engine.info.description.get("platform") == "cpu" else wall
    ratios = [one / two for one, two in zip(shown["plain"], shown["drafted"], strict=True)]
    return {"seconds": shown, "cpu_seconds": cpu, "wall_seconds": wall, "speed_up": statistics.median(ratios),
            "speed_ups": ratios, "answers": (1 + repeats) * workload.num_rows, "equal_answers": num_equal,
            **_counts(before, drafted.stats(), 1 + repeats)}


def measure_in_step(plain: LLM, drafted: LLM, workload: Workload, repeats: int) -> dict[str, Any]:
    """Of engines that need the same steps: a pair is a decode step of each, so that both meet the same machine. Seconds
    are those of one process; a ratio is the median of a repeat's pairs."""
    seconds: dict[str, list[float]] = {"plain": [], "drafted": []}
    before, num_equal, ratios = drafted.stats(), 0, []
    for repeat in range(repeats):
        for number, (row, params) in enumerate(zip(*workload.requests(repeat), strict=True)):
            for llm in (plain, drafted):
                llm.engine.add_request(f"{repeat}-{number}", llm.processor(row), llm.processor.resolve_params(params))
        answers: dict[str, dict[str, list[int]]] = {"plain": {}, "drafted": {}}
        pairs: list[dict[str, float]] = []
        while plain.engine.has_unfinished_requests() or drafted.engine.has_unfinished_requests():
            spent = {}
            for name, llm in (("plain", plain), ("drafted", drafted))[:: -1 if len(pairs) % 2 else 1]:
                num_decodes, started = llm.stats().num_decode_steps, time.process_time()
                outputs = llm.engine.step()
                seconds_spent = time.process_time() - started
                if llm.stats().num_decode_steps > num_decodes:
                    spent[name] = seconds_spent
                answers[name].update((output.request_id, output.token_ids) for output in outputs)
            pairs += [spent] * (len(spent) == 2)
        ratios.append(statistics.median(pair["plain"] / pair["drafted"] for pair in pairs))
        for name, values in seconds.items():
            values.append(sum(pair[name] for pair in pairs))
        num_equal += sum(tokens == answers["drafted"][name] for name, tokens in answers["plain"].items())
    return {"seconds": seconds, "cpu_seconds": seconds, "speed_up": statistics.median(ratios), "speed_ups": ratios,
            "answers": repeats * workload.num_rows, "equal_answers": num_equal,
            **_counts(before, drafted.stats(), repeats)}


def _counts(before: EngineStats, after: EngineStats, repeats: int) -> dict[str, Any]:
    def each(name: str) -> float:
        return (getattr(after, name) - getattr(before, name)) / repeats

    return {name: each(name) for name in ("num_decode_steps", "num_decode_tokens", "num_drafts", "num_draft_tokens",
                                          "num_accepted_tokens", "num_forced_accepted")}


def describe(found: dict[str, Any]) -> str:
    plain, drafted = (statistics.median(found["seconds"][name]) for name in ("plain", "drafted"))
    share = found["num_accepted_tokens"] / found["num_draft_tokens"] if found["num_draft_tokens"] else 0.0
    of_all = found["num_accepted_tokens"] / max(1, found["num_decode_tokens"])
    return (f"{found['method']:<9} {found['task']:<7} {found['rows']:>3} rows: {plain:.3f} s plain, {drafted:.3f} s "
            f"with drafts, {found['speed_up']:.3f} times as fast ({min(found['speed_ups']):.3f} to "
            f"{max(found['speed_ups']):.3f}); {share:.0%} of drafts kept, {of_all:.0%} of tokens drafted; "
            f"{found['equal_answers']} of {found['answers']} answers equal")


if __name__ == "__main__":
    main()
