"""What a row that asks for much costs the others: a step of 256 sequences on the CPU, with and without such a row.

(e) engine: the embedded model, 256 sequences; one row (or one with n=128) asks for bad words, biases, stops or log
    probabilities. Milliseconds of a decode step, the slowest step, the engine's whole time, bytes of memory a token.
(s) sampler: 256 rows of 151,936 logits; one row asks for a feature that looks at its whole vocabulary.

    python scripts/bench_neighbours.py [--part engine|sampler] [--case NAME ...] [--repeats 3] [--device cuda]

Each case is compared with the same rows without what is asked for. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import ROOT, commit, versions

from npu_runner import LLM, SamplingParams
from npu_runner.request.limits import LIMITS
from npu_runner.request.prompt_inputs import PromptInputs
from npu_runner.sampling.sampler import Sampler

NUM_SEQS = 256
NUM_TOKENS = 64
VOCAB = 151_936
PLAIN = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=NUM_TOKENS)


def words(count: int, length: int = 3) -> list[str]:
    draw = random.Random(0)
    found: dict[str, None] = {}
    while len(found) < count:
        found["".join(draw.choices("bcdfghjklmnpqrstvwxz", k=length))] = None
    return list(found)


# As much as npu_runner/request/limits.py lets one request ask for.
BAD_WORDS = [*words(LIMITS.max_bad_words - 1), "".join(words(99, 3))[: LIMITS.max_bad_word_chars]]
BIASES = {token: 0.25 for token in range(500)}  # the embedded model has few more tokens
THAT_COME: list[str] = []  # measure_engine fills it in
ENGINE_CASES: dict[str, dict[str, Any]] = {
    "bad_words, one long": {"bad_words": BAD_WORDS},
    "logit_bias": {"logit_bias": BIASES},
    "stop": {"stop": [word * (LIMITS.max_stop_chars // 6) for word in words(LIMITS.max_stop_strings, 6)]},
    "n=128 bad_words": {"n": 128, "bad_words": BAD_WORDS},
    "n=128 bad_words that come": {"n": 128, "bad_words": THAT_COME},
    "n=128 logit_bias": {"n": 128, "logit_bias": BIASES},
    "n=128 top_logprobs 20": {"n": 128, "logprobs": 20},
    "min_tokens": {"min_tokens": NUM_TOKENS},
}
SAMPLER_CASES: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.1},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "min_tokens": {"min_tokens": 1000},
    "logit_bias": {"logit_bias": {5: 1.0}},
    "temperature": {"temperature": 0.7},
    "top_k 50, top_p 0.9": {"temperature": 0.7, "top_k": 50, "top_p": 0.9},
    "top_p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "logprobs 20": {"logprobs": 20},
}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def run_engine(llm: LLM, asked: dict[str, Any], number: int) -> dict[str, float]:
    """255 plain sequences and a row with what is asked for, to their end."""
    engine = llm.engine
    special = engine.processor.resolve_params(PLAIN.replace(**asked))
    prompts = [PromptInputs([5 + (index * 7 + place * (index + number)) % 400 for place in range(12)])
               for index in range(NUM_SEQS - special.n + 1)]
    memory = resident_bytes()
    begun = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(f"{number}-{index}", prompt, special if index == 0 else PLAIN)
    steps, outputs = [], []
    while engine.has_unfinished_requests():
        started = time.perf_counter()
        outputs += engine.step()
        steps.append(time.perf_counter() - started)
    seconds = time.perf_counter() - begun
    assert all(len(one.token_ids) == NUM_TOKENS for output in outputs for one in output.completions)
    return {"step_ms": 1e3 * statistics.median(steps), "slowest_ms": 1e3 * max(steps), "seconds": seconds,
            "bytes_a_token": (resident_bytes() - memory) / (special.n * NUM_TOKENS)}


def words_that_come(llm: LLM) -> list[str]:
    """Pairs of tokens that the model likes to write: nearly every step has bans that hold because of the last token."""
    engine, outputs = llm.engine, []
    for number in range(8):
        prompt = PromptInputs([5 + place * (number + 1) % 400 for place in range(12)])
        engine.add_request(f"word {number}", prompt, PLAIN)
    while engine.has_unfinished_requests():
        outputs += engine.step()
    pairs = [pair for output in outputs for pair in itertools.pairwise(output.completions[0].token_ids)]
    texts = [engine.processor.tokenizer.decode(pair) for pair, _ in Counter(pairs).most_common()]
    return [text for text in dict.fromkeys(texts) if text.strip()][: LIMITS.max_bad_words]


def measure_engine(cases: list[str], repeats: int, device: str) -> dict[str, Any]:
    path = ROOT / "npu_runner/assets/shapes-vl"
    found: dict[str, Any] = {}
    with LLM(path, platform="cpu", max_num_seqs=NUM_SEQS, max_model_len=256, enable_prefix_caching=False) as llm:
        run_engine(llm, {}, 0)
        THAT_COME[:] = words_that_come(llm)
        number = 1
        for name in cases:
            asked = ENGINE_CASES[name]
            runs: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
            for _ in range(repeats):
                for kind in runs:
                    given = asked if kind == "with" else {key: value for key, value in asked.items() if key == "n"}
                    runs[kind].append(run_engine(llm, given, number))
                    number += 1
            found[name] = {kind: {key: statistics.median(run[key] for run in all_runs) for key in all_runs[0]}
                           for kind, all_runs in runs.items()}
            print(engine_line(name, found[name]), flush=True)
    return found


def engine_line(name: str, result: dict[str, dict[str, float]]) -> str:
    without, having = result["without"], result["with"]
    return (f"    {name:<28}{without['step_ms']:>9.2f}{having['step_ms']:>9.2f}"
            f"{having['step_ms'] / without['step_ms'] - 1:>+9.1%}{without['slowest_ms']:>12.0f}"
            f"{having['slowest_ms']:>8.0f}{without['seconds']:>11.2f}{having['seconds']:>8.2f}"
            f"{having['seconds'] / without['seconds'] - 1:>+9.1%}{having['bytes_a_token']:>12.0f}")


def measure_sampler(cases: list[str], repeats: int, device: str) -> dict[str, Any]:
    logits_BV = torch.randn(NUM_SEQS, VOCAB, generator=torch.Generator().manual_seed(0)).to(device)
    plain = sampler_ms(logits_BV, SamplingParams(temperature=0.0), repeats)
    found: dict[str, Any] = {}
    for name in cases:
        having = sampler_ms(logits_BV, SamplingParams(**{"temperature": 0.0, **SAMPLER_CASES[name]}), repeats)
        found[name] = {"without_ms": plain, "with_ms": having}
        print(f"    {name:<28}{plain:>9.2f}{having:>9.2f}{having - plain:>+9.2f}", flush=True)
    return found


def sampler_ms(logits_BV: torch.Tensor, asked: SamplingParams, repeats: int) -> float:
    """Median milliseconds of a sampler's step in which row 7 asks."""
    device = logits_BV.device
    sampler = Sampler(vocab_size=VOCAB, max_num_seqs=NUM_SEQS, eos_token_ids=[2], device=device)
    slots = np.arange(NUM_SEQS, dtype=np.int32)
    for slot in range(NUM_SEQS):
        sampler.add(slot, asked if slot == 7 else SamplingParams(temperature=0.0), [1, 2, 3], seed=slot)
    receipts_B = torch.zeros(NUM_SEQS, dtype=torch.int32, device=device)
    slots_B = torch.from_numpy(slots).to(device)
    seconds = []
    for _ in range(2 + 3 * repeats):
        uniforms_B = torch.from_numpy(sampler.host_inputs(slots)).to(device)
        started = time.perf_counter()
        sampler(logits_BV, slots_B, uniforms_B, receipts_B, slots).to_host()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("engine", "sampler"), action="append")
    parser.add_argument("--case", action="append", help="a case by its name; default: all")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cpu", help="of the sampler's part")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for part, cases, heading, measure in (
        ("engine", ENGINE_CASES, "(e) engine                     ms/step    with          slowest ms    with"
         "    seconds    with           bytes/token", measure_engine),
        ("sampler", SAMPLER_CASES, "(s) sampler                    ms/step    with", measure_sampler),
    ):
        wanted = [name for name in cases if not arguments.case or name in arguments.case]
        if wanted and part in (arguments.part or ("engine", "sampler")):
            print(heading)
            results[part] = measure(wanted, arguments.repeats, arguments.device)
    print(json.dumps({"bench": "bench_neighbours", "commit": commit(), "versions": versions("torch", "npu-runner"),
                      "threads": torch.get_num_threads(), "repeats": arguments.repeats, "results": results}))


if __name__ == "__main__":
    main()
