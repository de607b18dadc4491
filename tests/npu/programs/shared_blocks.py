"""Copies blocks of the KV cache on the emulated device, and serves answers and prompts that share blocks in part.

    python -m tests.npu.programs.shared_blocks MODEL RESULTS.json MODE...

Bytes are compared here. RESULTS: by MODE, the tokens, launches, copies to the device and operators without a kernel of
each step's copies, and the number of copies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.platforms import pick_platform
from npu_runner.request.prompt_inputs import PromptInputs
from tests.npu.running import FLOAT32, SMALL
from tests.oracle.block_copies import assert_copies
from tests.oracle.running import runner_of

PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=6, ignore_eos=True, n=4)
BLOCK_SIZE = 128
TEXT = "which of the pictures shows a circle and what colour is it "


def prompts_of(llm: LLM) -> list[list[PromptInputs]]:
    """Prompts of one call each: the first, then others that part from it within a block or end there."""
    ids = (llm.engine.processor.from_text(TEXT).token_ids * 20)[: BLOCK_SIZE + 80]
    parted = [[PromptInputs([*ids[:-cut], *range(20, 20 + more)]) for more in (0, 2)] for cut in (1, 3, 9)]
    return [[PromptInputs(ids)], *parted]


def tokens_of(llm: LLM) -> list[list[list[int]]]:
    outputs = [output for prompts in prompts_of(llm) for output in llm.generate(prompts, PARAMS)]
    return [[completion.token_ids for completion in output.completions] for output in outputs]


def compare_bytes() -> None:
    """Of each dtype of a cache, also in pieces that hold a few blocks of all layers, or one."""
    from npu_runner.platforms.npu import attention as npu_attention

    platform = pick_platform("npu")
    device = platform.devices.set_device(0)
    whole = npu_attention._COPIED_BYTES
    for dtype in (torch.bfloat16, torch.float16):
        attention = platform.make_attention("auto", num_heads=2, num_kv_heads=2, head_dim=64, block_size=16,
                                            dtype=dtype)
        for seed, num_bytes in enumerate((whole, whole, whole, 5 * 16 * 2 * 64 * 2, 1)):
            npu_attention._COPIED_BYTES = num_bytes
            assert_copies(attention, device, dtype, seed)
    npu_attention._COPIED_BYTES = whole


def serve(model: str, mode: str) -> dict[str, Any]:
    from tests.cann.programs.emulation import calls, fallbacks, reset_counters

    graphs = {} if mode == "eager" else {"graph_batch_sizes": [4]}
    found: dict[str, Any] = {"launches": [], "copies": [], "fallbacks": {}, "num_copies": 0}
    with LLM(model, platform="npu", block_size=BLOCK_SIZE, graph_mode=mode, **SMALL, **FLOAT32, **graphs) as llm:
        steps = runner_of(llm).steps
        copy = steps.copy_blocks
        assert copy is not None

        def counted(pairs: np.ndarray) -> None:
            reset_counters()
            copy(pairs)
            found["launches"].append(calls("launches"))
            found["copies"].append(calls("copies"))
            found["fallbacks"] |= fallbacks()
            found["num_copies"] += len(pairs)

        steps.copy_blocks = counted
        found["tokens"] = tokens_of(llm)
    return found


def main(model: str, results: str, *modes: str) -> None:
    compare_bytes()
    Path(results).write_text(json.dumps({mode: serve(model, mode) for mode in modes}))


if __name__ == "__main__":
    main(*sys.argv[1:])
