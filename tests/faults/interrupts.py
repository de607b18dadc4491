"""A process that is sent SIGINT at random moments of its calls; says whether each next call answers as the first did.

    python -m tests.faults.interrupts MODEL TENSOR_PARALLEL_SIZE NUM_INTERRUPTS STEPS_UNDER_WAY

It leads a group of processes of its own, and the signal goes to the whole group, as from a terminal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time

from npu_runner import LLM, SamplingParams

PROMPTS = ["which", "what colour is the picture?", "a b c d e f g", "colour " * 40]
DRAWN = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, max_tokens=24, ignore_eos=True)
PARAMS = [DRAWN, DRAWN.replace(temperature=0.0), DRAWN.replace(n=3), DRAWN.replace(bad_words=("a",))]
MOST_LOST = 2
SETTINGS = {"platform": "cpu", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64,
            "kv_cache_bytes": 1 << 20}


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[c.token_ids for c in output.completions] for output in llm.generate(PROMPTS, PARAMS)]


def interrupted(llm: LLM, delay: float) -> bool:
    """Whether the interrupt came: C code that was just asking an object for an attribute drops what that raises."""
    timer = threading.Timer(delay, os.killpg, (os.getpgid(0), signal.SIGINT))
    try:
        timer.start()
        answers(llm)
        timer.join()
        time.sleep(1)
    except KeyboardInterrupt:
        return True
    return False


def main(model: str, size: str, num_interrupts: str, steps_under_way: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    rng = random.Random(5)
    with LLM(model, tensor_parallel_size=int(size), async_scheduling=steps_under_way == "2", **SETTINGS) as llm:
        expected = answers(llm)
        started = time.monotonic()
        assert answers(llm) == expected
        seconds = time.monotonic() - started
        same: list[bool] = []
        lost = 0
        while len(same) < int(num_interrupts):
            if not interrupted(llm, rng.uniform(0, seconds)):
                lost += 1
                assert lost <= MOST_LOST, "interrupts are swallowed"
                continue
            same.append(answers(llm) == expected and llm.stats().kv_blocks_used == 0)
    print(json.dumps(same))


if __name__ == "__main__":
    main(*sys.argv[1:])
