"""A process that is sent SIGINT at random moments of its calls; says whether each next call answers as the first did.

    python -m tests.faults.interrupts MODEL TENSOR_PARALLEL_SIZE NUM_INTERRUPTS STEPS_UNDER_WAY [DATA_PARALLEL_SIZE]

With the embedded model (shapes-vl) calls are conversations with images, prepared in workers, results read as they
finish; else raw prompts. It leads a group of processes of its own, and the signal goes to the whole group, as from a
terminal.
Ends with an error if a process of its own is left behind.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from npu_runner import LLM, SamplingParams
from npu_runner.assets import SHAPES_VL
from scripts.shapes.drawing import TEST_SEEDS, draw_example

PROMPTS = ["which", "what colour is the picture?", "a b c d e f g", "colour " * 40]
DRAWN = SamplingParams(temperature=1.0, seed=3, repetition_penalty=1.2, max_tokens=12, ignore_eos=True)
PARAMS = [DRAWN, DRAWN.replace(temperature=0.0), DRAWN.replace(n=3), DRAWN.replace(bad_words=("a",))]
GREEDY = SamplingParams(temperature=0, max_tokens=8)
MOST_LOST = 2
"""And a tenth of them all."""
SETTINGS = {"platform": "cpu", "max_model_len": 512, "max_num_seqs": 4, "max_num_batched_tokens": 64,
            "kv_cache_bytes": 1 << 20}
IMAGE_SETTINGS = {**SETTINGS, "kv_cache_bytes": 8 << 20}


Answers = list[list[list[int]]]


def answers(llm: LLM) -> Answers:
    return [[c.token_ids for c in output.completions] for output in llm.generate(PROMPTS, PARAMS)]


def answers_to_images(llm: LLM) -> Answers:
    conversations = (draw_example(seed).conversation() for seed in TEST_SEEDS[:6])
    found = dict(llm.chat(conversations, GREEDY, stream_results=True))
    return [[c.token_ids for c in found[index].completions] for index in range(len(found))]


def processes_left() -> list[str]:
    """Children of this process, whichever thread has started them, but for what forks them (tests/zygote.py)."""
    threads = Path(f"/proc/{os.getpid()}/task")
    children = [child for path in threads.glob("*/children") for child in path.read_text().split()]
    return [child for child in children if not Path(f"/proc/{child}/cmdline").read_bytes().startswith(b"zygote\0")]


def interrupted(llm: LLM, delay: float, call: Callable[[LLM], Answers]) -> bool:
    """Whether the interrupt came: C code that was just asking an object for an attribute drops what that raises."""
    timer = threading.Timer(delay, os.killpg, (os.getpgid(0), signal.SIGINT))
    try:
        timer.start()
        call(llm)
        timer.join()
        time.sleep(1)
    except KeyboardInterrupt:
        return True
    return False


def main(model: str, size: str, num_interrupts: str, steps_under_way: str, num_replicas: str = "1") -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    rng = random.Random(5)
    has_images = model == SHAPES_VL.name
    call = answers_to_images if has_images else answers
    settings = {**(IMAGE_SETTINGS if has_images else SETTINGS), "async_scheduling": steps_under_way == "2"}
    with LLM(model, tensor_parallel_size=int(size), data_parallel_size=int(num_replicas), **settings) as llm:
        expected = call(llm)
        started = time.monotonic()
        assert call(llm) == expected
        seconds = time.monotonic() - started
        same: list[bool] = []
        lost = 0
        while len(same) < int(num_interrupts):
            if not interrupted(llm, rng.uniform(0, seconds), call):
                lost += 1
                assert lost <= MOST_LOST + int(num_interrupts) // 10, "interrupts are swallowed"
                continue
            # What replicas told last may be older than the answers.
            same.append(call(llm) == expected and (num_replicas != "1" or llm.stats().kv_blocks_used == 0))
    assert not processes_left()
    print(json.dumps(same))


if __name__ == "__main__":
    main(*sys.argv[1:])
