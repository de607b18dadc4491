"""What drafts save: plain steps against steps with drafts, by turns.

Two engines in one process answer the same rows one after the other, and their answers are compared. A figure is the
median over the repeats; a ratio is the median over the pairs. On the cpu platform a figure is CPU seconds of this
process with one thread: on a busy machine they say more than seconds of a clock. Elsewhere it is seconds of the clock.
Prints a line for each case, then one JSON line.

    python -m bench.speculative                                              # the embedded model on cpu, some minutes
    python -m bench.speculative --rows 1 --method forced --repeats 9
    python -m bench.speculative --model shapes-hybrid --method mtp-2 --task text     # its own head
    python -m bench.speculative --method suffix --task alike --rows 8 64             # answers of one template
    python -m bench.speculative --platform cuda --model qwen3-8b --method forced     # random weights

A model of random weights gets a vocabulary in which a text has one spelling, and a schema whose fields are four free
characters each. So most tokens are forced, and each draft of them is accepted. `python -m bench.device --part decode
--model qwen3.5-9b --mtp 2` measures a step whose drafts are all rejected.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.common import in_turn, make_parser, median_ratio, print_result
from bench.shapes import TEXT, make_text_model
from bench.structured import write_vocabulary
from npu_runner import LLM, SamplingParams
from scripts.shapes.drawing import TEST_SEEDS, draw_json_example

_METHODS: dict[str, dict[str, Any]] = {
    "forced": {"method": "forced"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
    # Configured, and off for every number of rows.
    "off": {"method": "ngram", "num_speculative_tokens": 4, "num_speculative_tokens_per_batch_size": [[1, 4096, 0]]},
    **{f"mtp-{num}": {"method": "mtp", "num_speculative_tokens": num} for num in (1, 2, 3)},
}
# Without white space names and signs are one forced text. json.dumps writes blanks, and so the model learned it: then
# the model chooses where they are, and only names are forced.
_QUESTIONS: dict[str, dict[str, Any] | None] = {"compact": {"disable_any_whitespace": True},
                                                "blanks": {"whitespace_pattern": " ?"}, "text": None}
# `alike`: text, other questions in each repeat, as in a job. `free`: as many tokens as --tokens says.
_TASKS = (*_QUESTIONS, "alike", "schema", "free")
_EMBEDDED = ("shapes-vl", "shapes-hybrid")
_PARAMS = SamplingParams(temperature=0.0, max_tokens=64)
_COUNTS = ("num_decode_steps", "num_decode_tokens", "num_drafts", "num_draft_tokens", "num_accepted_tokens",
           "num_forced_accepted")


def main() -> None:
    parser = make_parser(__doc__, repeats=5, platform="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--method", nargs="+", choices=_METHODS, default=["forced", "ngram"])
    parser.add_argument("--task", nargs="+", choices=_TASKS, help="by default the questions of an embedded model, with "
                        "and without a schema; schema with random weights")
    parser.add_argument("--tokens", type=int, default=256, help="of a row's answer, with the tasks schema and free")
    parser.add_argument("--model", default=_EMBEDDED[0], choices=[*_EMBEDDED, *sorted(TEXT)])
    arguments = parser.parse_args()
    if arguments.model not in _EMBEDDED and set(arguments.task or ()) - {"schema", "free"}:
        parser.error(f"{arguments.model} sees no images; its tasks are schema and free")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print_result("speculative", arguments, cases=compare(arguments, folder))


def compare(arguments: Namespace, folder: str) -> list[dict[str, Any]]:
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
    # Each of both engines takes a part of a device's memory.
    with LLM(model, **settings, memory_utilization=0.45) as plain:
        for method in arguments.method:
            with LLM(model, **settings, memory_utilization=0.9, speculative_config=_METHODS[method]) as drafted:
                for task, num_rows in itertools.product(tasks, arguments.rows):
                    workload = Workload(task, num_rows, arguments.tokens, num_asked)
                    num_asked += (1 + arguments.repeats) * num_rows
                    results.append({"method": method, "task": task, "rows": num_rows,
                                    **measure(plain, drafted, workload, arguments)})
                    print(describe(results[-1]), flush=True)
    return results


@dataclass(frozen=True)
class Workload:
    task: str
    num_rows: int
    num_tokens: int
    num_asked: int
    """Rows of earlier cases: an engine has met their images."""

    def requests(self, repeat: int) -> tuple[list[Any], list[SamplingParams]]:
        if self.task == "schema":
            rules = [self._table(number) for number in range(self.num_rows)]
        elif self.task == "free":
            rules = [{"ignore_eos": True} for _ in range(self.num_rows)]
        else:
            return self._questions(self.num_asked + repeat * self.num_rows if self.task == "alike" else 0)
        rows = [[{"role": "user", "content": f"Row {number}, please."}] for number in range(self.num_rows)]
        return rows, [SamplingParams(temperature=0.6, seed=number, max_tokens=self.num_tokens, **rule)
                      for number, rule in enumerate(rules)]

    @staticmethod
    def _table(number: int) -> dict[str, Any]:
        """A schema that no other row has, longer than an answer."""
        value = {"type": "string", "pattern": "^[a-z]{4}$"}
        columns = {f"{word}_{number}": value for word in ("name", "kind", "town", "day")}
        row = {"type": "object", "properties": columns, "required": list(columns), "additionalProperties": False}
        rule = {"json": {"type": "array", "items": row, "minItems": 1000}, "disable_any_whitespace": True}
        return {"structured_outputs": rule}

    def _questions(self, first: int) -> tuple[list[Any], list[SamplingParams]]:
        """Questions that the model was trained to answer in JSON, each with the schema of its answer or without."""
        rows, params = [], []
        for number in range(first, first + self.num_rows):
            example = draw_json_example(TEST_SEEDS[number])
            parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": image} for image in example.images]
            rows.append([{"role": "user", "content": [*parts, {"type": "text", "text": example.question}]}])
            options = _QUESTIONS.get(self.task)
            rule = None if options is None else {"json": example.schema, **options}
            params.append(_PARAMS.replace(structured_outputs=rule))
        return rows, params


def measure(plain: LLM, drafted: LLM, workload: Workload, arguments: Namespace) -> dict[str, Any]:
    """The first answers of each engine are not measured: they build rules, and fill the caches of images."""

    def answer(llm: LLM, repeat: int) -> tuple[float, float, list[list[int]]]:
        rows, params = workload.requests(repeat)
        cpu, clock = time.process_time(), time.perf_counter()
        outputs = llm.chat(rows, params)
        spent = time.process_time() - cpu, time.perf_counter() - clock
        assert all(output.finish_reason != "error" for output in outputs), "what failed took no time"
        return *spent, [output.token_ids for output in outputs]

    before = drafted.stats()
    found = in_turn({"plain": lambda repeat: answer(plain, repeat), "drafted": lambda repeat: answer(drafted, repeat)},
                    1 + arguments.repeats)
    num_equal = sum(one == two for pair in zip(found["plain"], found["drafted"], strict=True)
                    for one, two in zip(pair[0][2], pair[1][2], strict=True))
    after, is_cpu = drafted.stats(), arguments.platform == "cpu"
    seconds = {name: [cpu if is_cpu else clock for cpu, clock, _ in runs[1:]] for name, runs in found.items()}
    return {"seconds": seconds, "speed_up": median_ratio(seconds["plain"], seconds["drafted"]),
            "answers": (1 + arguments.repeats) * workload.num_rows, "equal_answers": num_equal,
            **{name: (getattr(after, name) - getattr(before, name)) / (1 + arguments.repeats) for name in _COUNTS}}


def describe(found: dict[str, Any]) -> str:
    plain, drafted = (statistics.median(found["seconds"][name]) for name in ("plain", "drafted"))
    ratios = [one / two for one, two in zip(found["seconds"]["plain"], found["seconds"]["drafted"], strict=True)]
    share = found["num_accepted_tokens"] / max(1, found["num_draft_tokens"])
    of_all = found["num_accepted_tokens"] / max(1, found["num_decode_tokens"])
    return (f"{found['method']:<9} {found['task']:<7} {found['rows']:>3} rows: {plain:.3f} s plain, {drafted:.3f} s "
            f"with drafts, {found['speed_up']:.3f} times as fast ({min(ratios):.3f} to {max(ratios):.3f}); {share:.0%} "
            f"of drafts accepted, {of_all:.0%} of tokens drafted; {found['equal_answers']} of {found['answers']} "
            f"answers equal")


if __name__ == "__main__":
    main()
