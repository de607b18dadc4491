"""Seconds of one call of LLM whose rows are short, or have their beginning in common; vLLM in the same run.

texts: 20,000 texts of 60 tokens, 4 of an answer, Qwen3-0.6B shape; they are tokenized within the call.
embeddings: vectors of 5,000 texts of 200 tokens, the same shape.
answers-2000, answers-512: 32 prompts of that many tokens, 8 answers of 128 tokens each, Qwen3-8B shape.
system-prompt: 2,000 prompts whose first 2,000 tokens are equal, and 30 of their own; 32 of an answer, Qwen3-8B shape.
questions: 8 questions about each of 256 images of 448 x 448, 32 tokens of an answer, Qwen3-VL-4B shape.
Each side is a process of its own, with random weights and prefix caching. No repeat finds prompts of another one in
a cache. `--tiny --platform cpu` shows that the program works.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from bench import common, peers
from bench.shapes import TEXT, make_text_model, make_vision_model, vision_config
from bench.structured import write_vocabulary

OURS, AGAINST, VLLM = "npu_runner", "against", "vllm"
_TINY = {"qwen3-0.6b": "tiny", "qwen3-8b": "tiny", "qwen3-vl-4b": "tiny-vl"}
_SIDE, _QUESTIONS = 448, 8


def text(rng: Random, num_tokens: int) -> str:
    """Each character is a token."""
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=num_tokens))


def token_ids(rng: Random, count: int) -> list[int]:
    return [rng.randrange(2, 2000) for _ in range(count)]  # every shape has these


def texts(num_tokens: int) -> Callable[[Random, int], list[Any]]:
    return lambda rng, count: [text(rng, num_tokens) for _ in range(count)]


def prompts(num_tokens: int, num_shared: int = 0) -> Callable[[Random, int], list[Any]]:
    """Token ids. All rows begin with the same `num_shared`."""
    def make(rng: Random, count: int) -> list[Any]:
        shared = token_ids(rng, num_shared)
        return [{"prompt_token_ids": shared + token_ids(rng, num_tokens)} for _ in range(count)]
    return make


def questions(rng: Random, count: int) -> list[Any]:
    """Conversations of count / _QUESTIONS images, the questions about one image after the other."""
    rows = []
    for _ in range(count // _QUESTIONS):
        pixels = np.random.default_rng(rng.getrandbits(32)).integers(0, 256, (14, 14, 3), dtype=np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).resize((_SIDE, _SIDE)).save(file, "jpeg")
        url = "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()
        rows += [[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}},
                                               {"type": "text", "text": text(rng, 32)}]}] for _ in range(_QUESTIONS)]
    return rows


class Case(NamedTuple):
    """`answer_tokens` 0: vectors."""

    model: str
    make: Callable[[Random, int], list[Any]]
    num_rows: int
    answer_tokens: int
    num_answers: int = 1

    @property
    def is_vision(self) -> bool:
        return self.make is questions


CASES = {"texts": Case("qwen3-0.6b", texts(60), 20_000, 4), "embeddings": Case("qwen3-0.6b", texts(200), 5_000, 0),
         "answers-2000": Case("qwen3-8b", prompts(2000), 32, 128, 8),
         "answers-512": Case("qwen3-8b", prompts(512), 32, 128, 8),
         "system-prompt": Case("qwen3-8b", prompts(30, 2000), 2_000, 32),
         "questions": Case("qwen3-vl-4b", questions, 256 * _QUESTIONS, 32)}


def main() -> None:
    parser = common.make_parser(__doc__, repeats=3, platform="cuda", compares_trees=True)
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="small models, and 16 rows")
    parser.add_argument("--peer", nargs="*", choices=(VLLM,), default=[VLLM], help="without a name: none")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        name, side = arguments.measure
        print(json.dumps(measure(CASES[name], side, arguments)))
        return
    beside = arguments.peer if peers.has_vllm(arguments.platform) else []
    sides = [OURS, *([AGAINST] if arguments.against else []), *beside]
    results: dict[str, dict[str, Any]] = {name: {} for name in arguments.case}
    for name, side in ((name, side) for name in arguments.case for side in sides):
        tree = arguments.against if side == AGAINST else None
        found = common.run_child("bench.calls", *sys.argv[1:], "--measure", name, side, tree=tree)
        results[name][side] = found
        sys.stderr.write(f"{name} {side}: {json.dumps(found)}\n")  # not lost when a later one hangs
    for name, measured in results.items():
        print("\n".join(report(name, measured)))
    common.print_result("calls", arguments, results=results)


def make_model(case: Case, folder: Path) -> Path:
    """A checkpoint without weights, whose tokenizer has text for every token."""
    if not case.is_vision:
        path = make_text_model(folder, case.model)
        write_vocabulary(path, TEXT[case.model], spells_once=True)
        return path
    path = make_vision_model(folder, case.model, _SIDE)
    added = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
    write_vocabulary(path, vision_config(case.model)["text_config"], spells_once=True,
                     special={token["id"]: token["content"] for token in added})
    return path


def measure(case: Case, side: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of each repeat after a warm-up, and of the start."""
    engine: Any = importlib.import_module("vllm" if side == VLLM else "npu_runner")
    if arguments.tiny:
        case = case._replace(model=_TINY[case.model], num_rows=16)
    settings: dict[str, Any] = {} if side == VLLM else {"platform": arguments.platform}
    settings |= {} if case.answer_tokens else {"runner": "pooling"}
    with tempfile.TemporaryDirectory() as name:
        path = make_model(case, Path(name))
        started = time.perf_counter()
        llm = engine.LLM(str(path), load_format="dummy", max_model_len=4096, seed=0, **settings)
        start_seconds = time.perf_counter() - started
        params = engine.SamplingParams(temperature=float(case.num_answers > 1), n=case.num_answers, ignore_eos=True,
                                       max_tokens=case.answer_tokens or 1)
        call(llm, case._replace(num_rows=max(_QUESTIONS, case.num_rows // 16)), params, -1)
        seconds = [call(llm, case, params, repeat) for repeat in range(arguments.repeats)]
        if side != VLLM:
            llm.close()
    return {"seconds": seconds, "start_seconds": start_seconds, "note": peers.vllm_version() if side == VLLM else ""}


def call(llm: Any, case: Case, params: Any, repeat: int) -> float:
    """Seconds of one call, whose prompts are those of this repeat."""
    rows = case.make(Random(repeat), case.num_rows)
    started = time.perf_counter()
    if not case.answer_tokens:
        outputs = llm.embed(rows, use_tqdm=False)
    else:
        outputs = (llm.chat if case.is_vision else llm.generate)(rows, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    assert len(outputs) == case.num_rows
    if case.answer_tokens:
        lengths = {len(answer.token_ids) for output in outputs for answer in output.outputs}
        assert lengths == {case.answer_tokens}
        assert len(outputs[-1].outputs) == case.num_answers
    return seconds


def report(name: str, results: dict[str, Any]) -> Iterator[str]:
    yield f"{name}: seconds, median and range"
    first = statistics.median(results[OURS]["seconds"]) if results[OURS] else 0.0
    for side, result in results.items():
        if result is None:
            yield f"    {side:<12}failed"
            continue
        share = first / statistics.median(result["seconds"])
        yield f"    {side:<12}{common.show(result['seconds']):>26}, npu_runner takes {share:.3f} of it"


if __name__ == "__main__":
    main()
