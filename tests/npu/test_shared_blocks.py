"""Partly shared blocks on the emulated device: all bytes are copied, by three launches for all layers, and answers are
those of the cpu platform, which computes each prompt by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM
from tests.cann.environment import has_real_cann, run_python
from tests.full_set import only_full
from tests.npu.programs.shared_blocks import tokens_of
from tests.npu.running import DEVICE_MEMORY, SMALL

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts, and takes float32"),
]


@pytest.mark.parametrize(("model_type", "modes"), [
    ("mistral", ["eager"]), *only_full("copies come before a step, however it runs",
                                       ("mistral", ["reduce-overhead"]), ("qwen3", ["eager", "max-autotune"]))])
def test_answers_and_prompts_that_copy_blocks(model_type: str, modes: list[str], checkpoint: Any,
                                              tmp_path: Path) -> None:
    changes = {"sliding_window": 10} if model_type == "mistral" else {}
    model, results = checkpoint(model_type, **changes), tmp_path / "out.json"
    done = run_python(["-m", "tests.npu.programs.shared_blocks", str(model), str(results), *modes],
                      allow_fp32_attention=True, memory_bytes=DEVICE_MEMORY)
    assert done.returncode == 0, done.stderr[-6000:]
    with LLM(model, platform="cpu", enable_prefix_caching=False, **SMALL) as llm:
        expected = tokens_of(llm)
    for mode, found in json.loads(results.read_text()).items():
        assert found["tokens"] == expected, mode
        assert found["num_copies"] > len(found["launches"]) >= 3, "a step has several copies"
        for launches, copies in zip(found["launches"], found["copies"], strict=True):
            assert launches == {"aclnnIndexSelect": 2, "aclnnScatterPaKvCache": 1}
            assert copies == {"h2d": 1}
        assert found["fallbacks"] == {}
