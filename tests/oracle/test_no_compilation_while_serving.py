"""After the start nothing is compiled any more, whatever lengths come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from npu_runner.multimodal.inputs import PromptInputs
from tests.oracle.running import SMALL, greedy

# Block tables of 1, 2, 15, 16 and 17 blocks; kernels like to have variants for sizes of 1 and of multiples of 16.
LENGTHS = (3, 70, 900, 1000, 1040)


@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}], ids=["graphs", "eager"])
def test_no_kernel_is_compiled_after_the_start(settings: dict[str, Any], checkpoint: Any, platform_name: str,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name != "cuda":
        pytest.skip("only the cuda platform has kernels that are compiled when they are first called")
    import triton

    compiled: list[str] = []
    path: Path = checkpoint("qwen3")
    with LLM(path, platform=platform_name, attention_backend="triton", block_size=64,
             **{**SMALL, "max_model_len": 2048, **settings}) as llm:
        monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook",
                            lambda **call: compiled.append(call["fn"].name))
        for length in LENGTHS:
            llm.generate([PromptInputs([5] * length)], greedy(3))
        llm.generate([PromptInputs([6] * length) for length in LENGTHS], greedy(3))
    assert compiled == []
