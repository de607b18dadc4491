"""Generates from images with two steps under way on the emulated device, and says what was so when each was staged.

    python -m tests.npu.programs.images_ahead MODEL RESULTS.json FAILURE...

For each FAILURE an engine of its own, in which the device fails like that while images are staged for the second
time; "" is none, "fault" a kernel on the stream of the images that reads what is not there. "chunks" is none either:
there all images are one prompt's, whose chunks show about one each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.errors import NpuRunnerError
from npu_runner.platforms import pick_platform
from tests.oracle.reference import random_image
from tests.oracle.running import runner_of

SIZES = ((64, 64), (128, 96), (64, 96), (160, 96), (32, 96), (96, 128))
# A step takes two of these prompts at most, so that images come in several steps.
SETTINGS: dict[str, Any] = {"max_num_seqs": 8, "max_model_len": 128, "max_num_batched_tokens": 64, "dtype": "float32",
                            "vision_cache_bytes": 1 << 20}
FAULT, CHUNKS = "fault", "chunks"
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def prompts_of(llm: LLM) -> list[Any]:
    rng = np.random.default_rng(3)
    images = [{"type": "image", "image": random_image(rng, *size)} for size in SIZES]
    text = {"type": "text", "text": "which"}
    return [llm.engine.processor([{"role": "user", "content": [image, text]}]) for image in images]


def prompt_of_all(llm: LLM) -> list[Any]:
    """The images of `prompts_of` in one prompt."""
    rng = np.random.default_rng(3)
    images = [{"type": "image", "image": random_image(rng, *size)} for size in SIZES]
    return [llm.engine.processor([{"role": "user", "content": [*images, {"type": "text", "text": "which"}]}])]


def fail(failure: str) -> None:
    from tests.cann.programs.emulation import set_failures

    if failure == FAULT:
        torch.nn.functional.embedding(torch.full((1,), 1 << 20).npu(), torch.zeros(4, 4).npu())
    elif failure != CHUNKS:
        torch.npu.empty_cache()  # nothing is at hand: images need memory of their own
        set_failures(failure)


def hold_up(stream: Any) -> None:
    """Let `stream` begin only after whatever else could run has run, where nothing runs before somebody waits.

    The emulation goes through the streams in the order of their handles until nothing is left: the higher of two cannot
    let the lower one go before the next round.
    """
    low, high = sorted((torch.npu.Stream(), torch.npu.Stream()), key=lambda gate: gate.npu_stream)
    for first, second in ((high, low), (low, stream)):
        event = torch.npu.Event()
        event.record(first)
        second.wait_event(event)


def run(model: str, failure: str) -> dict[str, Any]:
    settings = SETTINGS | ({"max_num_batched_tokens": 16} if failure == CHUNKS else {})
    with LLM(model, platform="npu", attention_backend="fused", graph_mode="eager", async_scheduling=True,
             **settings) as llm:
        runner = runner_of(llm)
        stage, encode, seen = runner.strategy.stage_images, runner.strategy.encode_images, []
        ends_of_reading: list[Any] = []
        steps_stream = torch.npu.current_stream().stream_id

        def noted(*arguments: Any) -> Any:
            newest = runner.steps._newest
            seen.append({"beside": torch.npu.current_stream().stream_id != steps_stream,
                         "step_runs": newest is not None and not newest.is_done(),
                         "num_unread": sum(not end.query() for end in ends_of_reading)})
            if failure and len(seen) == 2:
                fail(failure)
            if len(seen) == 1:
                hold_up(torch.npu.current_stream())
            return stage(*arguments)

        def read(*arguments: Any) -> Any:
            embeddings = encode(*arguments)
            ends_of_reading.append(torch.npu.Event())
            ends_of_reading[-1].record()
            return embeddings

        runner.strategy.stage_images = noted  # type: ignore[method-assign]
        runner.strategy.encode_images = read  # type: ignore[method-assign]
        result: dict[str, Any] = {"seen": seen, "ledger": llm.engine.ledger}
        try:
            outputs = llm.generate((prompt_of_all if failure == CHUNKS else prompts_of)(llm), PARAMS)
            result |= {"tokens": [output.token_ids for output in outputs],
                       "given_up": [output.completions[0].error_code for output in outputs]}
        except NpuRunnerError as error:
            result |= {"error": type(error).__name__, "message": str(error)}
        stats = llm.stats()
        return result | {"num_retries": runner.guard.num_retries, "num_encoded": stats.num_images_encoded}


def gives_memory_to_the_next_one() -> bool:
    """Whether work on a side stream gets the memory of what is still to be read, where nothing runs before a wait."""
    platform = pick_platform("npu")
    platform.devices.set_device(0)
    side = platform.memory.side_stream()
    assert side is not None, "the platform has streams"
    aside = side.run(lambda: torch.ones(1 << 16, device="npu"))
    place = aside.result.data_ptr()
    total = aside.join([aside.result]).sum()
    del aside
    again = side.run(lambda: torch.zeros(1 << 16, device="npu"))
    is_same = again.result.data_ptr() == place
    assert is_same or total.item() == 1 << 16
    return is_same


def main(model: str, results_path: str, *failures: str) -> None:
    results = {"reuses_memory": gives_memory_to_the_next_one(), "runs": [run(model, failure) for failure in failures]}
    Path(results_path).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
