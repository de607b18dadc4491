"""Asks shapes-vl about fresh images and counts exact answers, by kind of question.

`hf` is transformers' greedy generate in float32, one question at a time; `runner` is this project; `both` also
compares the two token for token. Ends with one line of JSON; exit status 1 when tokens differ.

    python -m scripts.shapes.evaluate --engine both --num-pictures 1000
    python -m scripts.shapes.evaluate --engine runner --model FOLDER --settings '{"platform": "npu"}'
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from npu_runner.assets import SHAPES_VL
from scripts.shapes.drawing import EVAL_SEEDS, Example, draw_example, draw_json_example

MAX_NEW_TOKENS = 96


@dataclass(frozen=True)
class Answer:
    """token_ids: the generated ones, without the end token."""

    text: str
    token_ids: list[int]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("hf", "runner", "both"), default="hf")
    parser.add_argument("--model", type=Path, default=SHAPES_VL)
    parser.add_argument("--num-pictures", type=int, default=1000, help="questions, each about images of its own")
    parser.add_argument("--settings", type=json.loads, default={}, metavar="JSON",
                        help='of the runner\'s LLM, as {"platform": "npu", "quantization": "int8"}')
    parser.add_argument("--json", action="store_true", help="ask for JSON objects instead (without a grammar)")
    parser.add_argument("--first-seed", type=int, default=EVAL_SEEDS[0])
    return parser.parse_args()


def hf_answers(model_path: Path, examples: Iterable[Example]) -> Iterator[Answer]:
    import torch
    from transformers import AutoModelForImageTextToText, AutoTokenizer
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    processor = Qwen2VLImageProcessorPil.from_pretrained(model_path)
    model = AutoModelForImageTextToText.from_pretrained(model_path, dtype=torch.float32).eval()
    ends = set(model.generation_config.eos_token_id)
    for example in examples:
        inputs = model_inputs([example.conversation()], example.images, tokenizer, processor,
                              model.config.image_token_id)
        with torch.inference_mode():
            output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        generated = [token for token in output[0, inputs["input_ids"].shape[1]:].tolist() if token not in ends]
        yield Answer(tokenizer.decode(generated, skip_special_tokens=True), generated)


def model_inputs(conversations: Sequence[list[dict[str, Any]]], images: Sequence[Image.Image], tokenizer: Any,
                 processor: Any, image_token_id: int) -> dict[str, Any]:
    """Chat template, images, expanded placeholders and padding, as transformers' own processor does it."""
    features = processor(list(images), return_tensors="pt") if images else {}
    counts = iter([int(grid.prod()) // 4 for grid in features.get("image_grid_thw", [])])
    pad, texts = tokenizer.convert_ids_to_tokens(image_token_id), []
    for messages in conversations:
        first, *parts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split(pad)
        texts.append(first + "".join(pad * next(counts) + part for part in parts))
    encoded = tokenizer(texts, return_tensors="pt", padding=True)
    return {**encoded, **features, "mm_token_type_ids": (encoded["input_ids"] == image_token_id).int()}


def runner_answers(model_path: Path, examples: Sequence[Example], settings: dict[str, Any]) -> Iterator[Answer]:
    from npu_runner import LLM, SamplingParams

    conversations = [example.conversation() for example in examples]
    with LLM(str(model_path), **settings) as llm:
        outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=MAX_NEW_TOKENS))
    ends = set(json.loads((model_path / "generation_config.json").read_text())["eos_token_id"])
    for output in outputs:
        yield Answer(output.text, [token for token in output.token_ids if token not in ends])


def score(engine: str, examples: Iterable[Example], answers: Iterable[Answer]) -> dict[str, float]:
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for example, answer in zip(examples, answers, strict=True):
        asked[example.kind] += 1
        right[example.kind] += answer.text == example.answer
        if answer.text != example.answer:
            print(f"{engine} wrong ({example.kind}): {example.question} -> {answer.text} (right: {example.answer})")
    print(f"\n{engine}: {right.total()} of {asked.total()} answers exactly right")
    for kind in sorted(asked):
        print(f"  {kind:<10}{right[kind]:>5} of {asked[kind]:<5}{right[kind] / asked[kind]:>8.1%}")
    kinds = {kind: round(right[kind] / asked[kind], 4) for kind in sorted(asked)}
    return {"all": round(right.total() / asked.total(), 4), **kinds}


def count_mismatches(seeds: range, first: Sequence[Answer], second: Sequence[Answer]) -> int:
    mismatches = 0
    for seed, ours, theirs in zip(seeds, first, second, strict=True):
        if ours.token_ids != theirs.token_ids:
            mismatches += 1
            print(f"seed {seed}: hf {ours.token_ids} ({ours.text}), runner {theirs.token_ids} ({theirs.text})")
    return mismatches


def main() -> int:
    arguments = parse_arguments()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.num_pictures)
    if seeds[0] not in EVAL_SEEDS or seeds[-1] not in EVAL_SEEDS:
        print(f"seeds {seeds[0]} to {seeds[-1]} leave the evaluation range {EVAL_SEEDS}", file=sys.stderr)
        return 2
    examples = [(draw_json_example if arguments.json else draw_example)(seed) for seed in seeds]
    engines: dict[str, Callable[[Path, Sequence[Example]], Iterator[Answer]]] = {
        "hf": hf_answers, "runner": partial(runner_answers, settings=arguments.settings)}
    result: dict[str, Any] = {
        "model": arguments.model.name, "seeds": [seeds[0], seeds[-1]], "questions": len(examples),
        "pictures": sum(len(example.images) for example in examples), "machine": platform.machine(),
        "settings": arguments.settings}
    answers: dict[str, list[Answer]] = {}
    for engine in engines if arguments.engine == "both" else [arguments.engine]:
        started = time.monotonic()
        answers[engine] = list(engines[engine](arguments.model, examples))
        result[engine] = {"accuracy": score(engine, examples, answers[engine]),
                          "generated_tokens": sum(len(answer.token_ids) for answer in answers[engine]),
                          "seconds": round(time.monotonic() - started, 1)}
    if arguments.engine == "both":
        result["token_mismatches"] = count_mismatches(seeds, answers["hf"], answers["runner"])
    print(json.dumps(result))
    return int(bool(result.get("token_mismatches")))


if __name__ == "__main__":
    raise SystemExit(main())
