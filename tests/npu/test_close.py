"""A closed engine gives the device back: nothing is allocated any more, and the allocator holds nothing back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import run_python

pytestmark = pytest.mark.npu

PROGRAM = """
import dataclasses, json, sys
import torch, torch_npu
from npu_runner import LLM, SamplingParams
from npu_runner.platforms.npu.platform import NpuPlatform
graphs = {} if sys.argv[2] == "eager" else {"graph_batch_sizes": (2,)}
if sys.argv[2] == "max-autotune":
    graphs["use_graph_cache"] = False
llm = LLM(sys.argv[1], platform="npu", dtype="bfloat16", graph_mode=sys.argv[2], max_model_len=512, max_num_seqs=2,
          **graphs)
llm.generate(["which picture"], SamplingParams(temperature=0, max_tokens=4))
open_ = NpuPlatform().memory_info()
llm.close()
closed = NpuPlatform().memory_info()
print(json.dumps([dataclasses.asdict(open_), dataclasses.asdict(closed)]))
"""


@pytest.mark.parametrize("graph_mode", ["eager", "reduce-overhead", "max-autotune"])
def test_a_closed_engine_leaves_nothing_on_the_device(graph_mode: str, checkpoint: Any) -> None:
    model: Path = checkpoint("qwen3", num_hidden_layers=1)
    done = run_python(["-c", PROGRAM, str(model), graph_mode])
    assert done.returncode == 0, done.stderr[-4000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before["allocated_bytes"] > 4 << 20
    assert after["allocated_bytes"] == 0
    assert after["reserved_bytes"] == 0
    assert after["free_bytes"] > before["free_bytes"]
