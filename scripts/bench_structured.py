"""What schemas cost a decode step: sequences with a schema each, all different, against the same ones without.

The Qwen3-8B shape with random weights and a made-up byte-level vocabulary of Qwen3's size. The two kinds of batch take
turns in one process; a figure is the median over the steps in which every sequence decodes. Prints a line each, then
one JSON line.

    python scripts/bench_structured.py                        # one GPU, or --platform npu
    python scripts/bench_structured.py --neighbours           # 8 rows beside a rule with a long forced text
    python scripts/bench_structured.py --model tiny --platform cpu --batch-size 4    # shows that it works
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench_common import commit, versions
from bench_device_shapes import TEXT, make_text_model
from bench_device_work import decode_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from npu_runner import LLM, SamplingParams
from npu_runner.request.prompt_inputs import PromptInputs

_WARM_UP_STEPS, _MARGIN = 8, 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--platform", default="cuda")
    parser.add_argument("--model", default="qwen3-8b", choices=sorted(TEXT))
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--context", type=int, default=512, help="tokens in the middle of the measured steps")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--async-scheduling", action=argparse.BooleanOptionalAction)
    parser.add_argument("--neighbours", action="store_true",
                        help="seconds of 8 rows of 100 tokens beside a rule with a forced text against a small schema")
    parser.add_argument("--forced", type=int, default=60_000, help="characters of that text")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        path = make_text_model(Path(name), arguments.model)
        write_vocabulary(path, TEXT[arguments.model])
        settings = {"platform": arguments.platform, "async_scheduling": arguments.async_scheduling}
        length = arguments.context + 2 * arguments.steps + 2 * _MARGIN + 3 * arguments.neighbours * arguments.forced
        reach(path, length)
        with LLM(path, load_format="dummy", max_model_len=length, max_num_seqs=arguments.batch_size, **settings) as llm:
            result = (measure_neighbours if arguments.neighbours else measure)(llm, arguments)
    print(json.dumps({"bench": "bench_structured", "commit": commit(), "platform": arguments.platform,
                      "model": arguments.model, "batch_size": arguments.batch_size,
                      "versions": versions("torch", "triton", "llguidance"), **result}))


def measure(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    milliseconds: dict[str, list[float]] = {"without": [], "with": []}
    started = time.perf_counter()
    steps_of(llm, arguments, "first", has_schema=True, count=2)
    first_seconds = time.perf_counter() - started
    for repeat, kind in itertools.product(range(arguments.repeats), milliseconds):
        steps = steps_of(llm, arguments, f"{kind}-{repeat}", has_schema=kind == "with", count=arguments.steps)
        milliseconds[kind].append(1e3 * statistics.median(steps))
    for kind, values in milliseconds.items():
        print(f"{kind:<8} {statistics.median(values):.3f} ms a step ({min(values):.3f} to {max(values):.3f})")
    ratio = statistics.median(milliseconds["with"]) / statistics.median(milliseconds["without"])
    print(f"a step with {arguments.batch_size} different schemas takes {ratio:.3f} times as long. The first of them, "
          f"with what it builds, took {first_seconds:.1f} s")
    return {"milliseconds": milliseconds, "ratio": ratio, "first_batch_seconds": first_seconds}


def measure_neighbours(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds of 8 rows without a rule, from the first step to the last of theirs, beside each kind of row in turn."""
    text = "".join(f"{number:05}" for number in range(arguments.forced // 5))
    words = " ".join(f'"1_{number}"' for number in range(arguments.forced // 3))
    rules: dict[str, Any] = {"small": {"json": schema(0)}, "const": {"json": {"const": text}},
                             "choice": {"choice": [text]}, "grammar": {"grammar": f"start: {words}"}}
    seconds: dict[str, list[float]] = {kind: [] for kind in rules}
    for repeat, kind in itertools.product(range(arguments.repeats + 1), rules):
        spent = seconds_beside(llm, f"{kind}-{repeat}", rules[kind])
        if repeat:  # the first of each builds
            seconds[kind].append(spent)
    ratios = {kind: statistics.median(one / small for one, small in zip(seconds[kind], seconds["small"], strict=True))
              for kind in rules}
    for kind, values in seconds.items():
        print(f"beside {kind:<7} {statistics.median(values):.3f} s ({min(values):.3f} to {max(values):.3f}), "
              f"{ratios[kind]:.3f} times as long")
    return {"neighbour_seconds": seconds, "neighbour_ratios": ratios}


def seconds_beside(llm: LLM, name: str, rule: dict[str, Any]) -> float:
    engine = llm.engine
    prompts = decode_prompts(9, 32, engine.model_config.vocab_size)
    free = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    ruled = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=rule)
    engine.add_request(f"{name}-ruled", PromptInputs(prompts[8]), engine.processor.resolve_params(ruled))
    for index in range(8):
        engine.add_request(f"{name}-{index}", PromptInputs(prompts[index]), free)
    started, left = time.perf_counter(), 8
    while left:
        left -= sum(not output.request_id.endswith("ruled") for output in engine.step())
    spent = time.perf_counter() - started
    while engine.has_unfinished_requests():
        engine.step()
    return spent


def steps_of(llm: LLM, arguments: argparse.Namespace, name: str, *, has_schema: bool, count: int) -> list[float]:
    """Seconds of each of `count` steps in which the whole batch decodes."""
    engine, size = llm.engine, arguments.batch_size
    prompts = decode_prompts(size, arguments.context - arguments.steps // 2, engine.model_config.vocab_size)
    for index, prompt in enumerate(prompts):
        rules: dict[str, Any] = {"structured_outputs": {"json": schema(index)}} if has_schema else {}
        params = SamplingParams(temperature=0.6, seed=index, ignore_eos=not has_schema,
                                max_tokens=_WARM_UP_STEPS + count + _MARGIN, **rules)
        engine.add_request(f"{name}-{index}", PromptInputs(prompt), engine.processor.resolve_params(params))
    while engine.stats().num_waiting:
        engine.step()
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    steps = []
    for _ in range(count):
        started = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - started)
        assert len(engine.scheduler.running) == size, f"{len(engine.scheduler.running)} of {size} decode"
    while engine.has_unfinished_requests():
        engine.step()
    return steps


def schema(index: int) -> dict[str, Any]:
    """A table whose columns nobody else has, longer than any answer."""
    columns = {f"{word}_{index}": kind for word, kind in (
        ("name", {"type": "string"}), ("kind", {"enum": [f"{letter}{index}" for letter in "abcdef"]}),
        ("amount", {"type": "number"}), ("is_new", {"type": "boolean"}))}
    row = {"type": "object", "properties": columns, "required": list(columns), "additionalProperties": False}
    return {"type": "array", "items": row, "minItems": 1000}


def reach(folder: Path, length: int) -> None:
    """The checkpoint has positions for it; its weights are made up, and nothing else depends on their number."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": max(length, config["max_position_embeddings"])}))


def write_vocabulary(folder: Path, config: dict[str, Any], *, spells_once: bool = False) -> None:
    """A tokenizer of all the config's tokens: all bytes, then pairs of bytes, then pairs with one byte more. Its
    special tokens are where the config has them. With `spells_once` only bytes outside of ASCII are in such pairs, so
    a text in ASCII has one spelling."""
    special = {config["bos_token_id"]: "<|endoftext|>", config["eos_token_id"]: "<|im_end|>"}
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    joined = [letter for letter in letters if not (spells_once and letter.isascii())]
    pairs = [(first, second) for first in joined for second in joined]
    merges = [*pairs, *((first + second, third) for third in joined for first, second in pairs)]
    merges = merges[: config["vocab_size"] - len(letters) - len(special)]
    tokens = iter([*letters, *(first + second for first, second in merges)])
    vocabulary = {special[index] if index in special else next(tokens): index for index in range(config["vocab_size"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special.values()))
    tokenizer.save(str(folder / "tokenizer.json"))


if __name__ == "__main__":
    main()
