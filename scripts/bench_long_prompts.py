"""Long prompts of the Qwen3-8B shape, nothing cached: seconds from the call to the last token, on one GPU.

    python scripts/bench_long_prompts.py [--repeats 2] [--sizes real|tiny] [--kernels own triton]

16 prompts of 16,384 tokens with 129 tokens of answer, and 256 of 4,000 with 8. `own` is the kernel for long prompts
where there is one, `triton` the same without it; both load the same random weights, one after the other. Prints a
line a repeat, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from random import Random

import torch
from bench_common import commit, versions
from bench_device_shapes import make_text_model

from npu_runner import LLM, SamplingParams
from npu_runner.platforms.cuda.attention import hopper_prompts as prompt_attention
from npu_runner.request.prompt_inputs import PromptInputs

# Prompts, their tokens, tokens of an answer.
WORK = {"real": ("qwen3-8b", ((16, 16384, 129), (256, 4000, 8))), "tiny": ("tiny", ((2, 1500, 9), (4, 700, 8)))}
_NEVER = 1 << 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--sizes", choices=tuple(WORK), default="real")
    parser.add_argument("--kernels", choices=("own", "triton"), nargs="+", default=["own", "triton"])
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger(prompt_attention.__name__).setLevel(logging.INFO)
    model, work = WORK[arguments.sizes]
    results = {}
    with tempfile.TemporaryDirectory() as name:
        path = make_text_model(Path(name), model)
        for kernel in arguments.kernels:
            with LLM(path, load_format="dummy", platform="cuda", max_model_len=18432) as llm:
                if kernel == "triton":
                    prompt_attention._LEAST_TOKENS = _NEVER
                results[kernel] = measure(llm, work, arguments.repeats, kernel)
    print(json.dumps({"bench": "bench_long_prompts", "commit": commit(), "device": torch.cuda.get_device_name(),
                      "versions": versions("torch", "triton"), "sizes": arguments.sizes, "seconds": results}))


def measure(llm: LLM, work: tuple[tuple[int, int, int], ...], repeats: int, kernel: str) -> dict[str, list[float]]:
    """Seconds of each call; every repeat has prompts of its own."""
    seconds: dict[str, list[float]] = {}
    draw = Random(0)
    call(llm, draw, 4, work[-1][1], 2)
    for count, length, answer in work:
        name = f"{count} x {length}"
        seconds[name] = [call(llm, draw, count, length, answer) for _ in range(repeats)]
        print(f"{kernel}: {name} tokens, {answer} of an answer: {', '.join(f'{s:.2f} s' for s in seconds[name])}",
              flush=True)
    return seconds


def call(llm: LLM, draw: Random, count: int, length: int, answer: int) -> float:
    last_id = min(10_000, llm.engine.model_config.vocab_size - 1)
    prompts = [PromptInputs([draw.randint(0, last_id) for _ in range(length)]) for _ in range(count)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, ignore_eos=True, max_tokens=answer), use_tqdm=False)
    seconds = time.perf_counter() - started
    assert all(len(output.token_ids) == answer for output in outputs), "every request gets the tokens it asked for"
    return seconds


if __name__ == "__main__":
    main()
