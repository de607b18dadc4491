"""Where memory is measured, the start fills a step with the largest images that a prompt has room for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cann.environment import run_python

pytestmark = pytest.mark.npu

MAX_MODEL_LEN, STEP_TOKENS = 100, 256
PROGRAM = """
import json, sys
from npu_runner import LLM
from tests.oracle.test_largest_image import patches_through_the_tower
with patches_through_the_tower() as seen, LLM(
        sys.argv[1], platform="npu", dtype="float32", attention_backend="fused", graph_mode="eager", max_num_seqs=2,
        max_model_len=int(sys.argv[2]), max_num_batched_tokens=int(sys.argv[3]), vision_cache_bytes=1 << 20) as llm:
    print(json.dumps({"seen": seen, "most": llm.engine.info.max_image_tokens}))
"""


def test_the_worst_step_has_as_many_of_the_largest_images_as_fit(checkpoint: Any) -> None:
    """5 s: one start on the emulation."""
    path = checkpoint("qwen3_vl", num_hidden_layers=2, seed=5)
    settings = json.loads((path / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": 4096, "longest_edge": 16_777_216}
    (path / "preprocessor_config.json").write_text(json.dumps(settings))
    done = run_python(["-c", PROGRAM, str(path), str(MAX_MODEL_LEN), str(STEP_TOKENS)], memory_bytes=1 << 30,
                      forked=True, allow_fp32_attention=True)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    largest, rest = 4 * (MAX_MODEL_LEN - 1), 4 * (STEP_TOKENS - 2 * (MAX_MODEL_LEN - 1))
    assert result["most"] == STEP_TOKENS
    assert max(result["seen"]) == largest, "65,536 patches are an image that no prompt here can have"
    assert sorted(result["seen"][-3:]) == [rest, largest, largest], "the worst step is full"
