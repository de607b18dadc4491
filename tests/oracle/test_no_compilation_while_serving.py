"""After the start nothing is compiled any more, whatever lengths and images come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from npu_runner import LLM
from npu_runner.request.prompt_inputs import PromptInputs
from tests.oracle.reference import random_image
from tests.oracle.running import SMALL, greedy

# Block tables of 1, 2, 15, 16 and 17 blocks; kernels like to have variants for sizes of 1 and of multiples of 16. All
# but one token of 65 have been seen before: a prefill of one.
LENGTHS = (3, 70, 65, 900, 1000, 1040)
IMAGES = ((32, 32), (128, 64), (256, 512), (96, 224))


def prompts_of(llm: LLM, seed: int) -> list[PromptInputs]:
    """Another seed gives other tokens and images: no prefix of theirs is cached."""
    prompts = [PromptInputs([5 + seed] * length) for length in LENGTHS]
    if llm.engine.model_config.vision is None:
        return prompts
    draw = np.random.default_rng(seed)
    images = [{"type": "image", "image": random_image(draw, *size)} for size in IMAGES]
    text = {"type": "text", "text": "which"}
    return prompts + [llm.engine.processor([{"role": "user", "content": [*content, text]}])
                      for content in (*([image] for image in images), images)]


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen3_vl", "qwen3_5_moe"])
def test_no_kernel_is_compiled_after_the_start(model_type: str, settings: dict[str, Any], checkpoint: Any,
                                               platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name != "cuda":
        pytest.skip("only the cuda platform has kernels that are compiled when they are first called")
    import triton

    compiled: list[str] = []
    path: Path = checkpoint(model_type)
    with LLM(path, platform=platform_name, attention_backend="triton", block_size=64,
             **{**SMALL, "max_model_len": 2048, **settings}) as llm:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook",
                            lambda **call: compiled.append(call["fn"].name))
        for prompt in prompts_of(llm, seed=0):
            llm.generate([prompt], greedy(3))
        llm.generate(prompts_of(llm, seed=1), greedy(3))
    assert compiled == []
