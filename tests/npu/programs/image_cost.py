"""Counts what a prefill step with images costs on the emulated device, for 1 and for 8 images of different sizes.

    python -m tests.npu.programs.image_cost MODEL RESULTS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_runner import LLM, SamplingParams
from tests.cann.programs.emulation import counters, reset_counters
from tests.oracle.reference import random_image
from tests.oracle.running import runner_of

SIZES = ((64, 64), (128, 96), (64, 96), (160, 96), (32, 96), (96, 128), (96, 96), (32, 64))
NUM_IMAGES = (1, len(SIZES))


def prompt_with(llm: LLM, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    parts = [{"type": "image", "image": random_image(rng, *size)} for size in SIZES[:count]]
    return llm.engine.processor([{"role": "user", "content": [*parts, {"type": "text", "text": "which"}]}])


def of_a_step(llm: LLM, count: int) -> dict[str, Any]:
    """Counters over the prefill of a prompt that shows `count` images that nobody has seen."""
    llm.engine.add_request(str(count), prompt_with(llm, count, seed=count),
                           SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    llm.engine.step()  # it is planned
    torch.npu.synchronize()
    reset_counters()
    llm.engine.step()
    syncs = counters().get("syncs", {})
    torch.npu.synchronize()
    found = {**counters(), "syncs": syncs}
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    return found


def of_staging(llm: LLM, count: int) -> Any:
    """Counters over what happens to images before the tower."""
    runner = runner_of(llm)
    images = prompt_with(llm, count, seed=0).images
    torch.npu.synchronize()
    reset_counters()
    with torch.inference_mode():
        staged = runner.strategy.stage_images(runner.model, images)
    found = counters()
    torch.npu.synchronize()
    assert len(staged) == count
    return {**counters(), "syncs": found.get("syncs", {})}


def main(model: str, results_path: str) -> None:
    # One step after the other: with two under way, what belongs to which of them could not be told.
    with LLM(model, platform="npu", max_num_seqs=2, max_model_len=512, graph_mode="eager", dtype="bfloat16",
             async_scheduling=False) as llm:
        of_a_step(llm, 2)  # settles what is lazy
        found = {str(count): {"step": of_a_step(llm, count), "staging": of_staging(llm, count)}
                 for count in NUM_IMAGES}
    Path(results_path).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
