"""A closed engine gives the device back: nothing is allocated any more, and the allocator holds nothing back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python

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
          max_num_batched_tokens=512, **graphs)
llm.generate(["which picture"], SamplingParams(temperature=0, max_tokens=4))
open_ = NpuPlatform().memory.info()
llm.close()
closed = NpuPlatform().memory.info()
print(json.dumps([dataclasses.asdict(open_), dataclasses.asdict(closed)]))
"""


def test_a_closed_engine_leaves_nothing_on_the_device(checkpoint: Any) -> None:
    assert_nothing_is_left("reduce-overhead", checkpoint)


@pytest.mark.full("a process for each mode; captured graphs stay")
@pytest.mark.parametrize("graph_mode", ["eager", "max-autotune"])
def test_a_closed_engine_of_another_mode_leaves_nothing(graph_mode: str, checkpoint: Any) -> None:
    assert_nothing_is_left(graph_mode, checkpoint)


def assert_nothing_is_left(graph_mode: str, checkpoint: Any) -> None:
    model: Path = checkpoint("qwen3", num_hidden_layers=1)
    done = run_python(["-c", PROGRAM, str(model), graph_mode], forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    before, after = json.loads(done.stdout.splitlines()[-1])
    assert before["allocated_bytes"] > 4 << 20
    assert after["allocated_bytes"] == 0
    assert after["reserved_bytes"] == 0
    assert after["free_bytes"] > before["free_bytes"]


BROKEN = """
import sys
import torch, torch_npu
from npu_runner import LLM, SamplingParams
from npu_runner.errors import EngineDeadError
from tests.cann.programs.emulation import set_failures

llm = LLM(sys.argv[1], platform="npu", dtype="bfloat16", graph_mode="eager", max_model_len=512, max_num_seqs=2)
set_failures(",".join(f"aclrt{name}:1+:507015" for name in sys.argv[2:]))
try:
    llm.generate(["which picture"], SamplingParams(temperature=0, max_tokens=4))
except EngineDeadError as end:
    print("DIED", str(end).partition("\\n")[0])
llm.close()
llm.close()
print("CLOSED")
"""


@pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN fails on demand")
def test_an_engine_whose_device_broke_is_closed_and_says_what_it_could_not_give_back(checkpoint: Any) -> None:
    model: Path = checkpoint("qwen3", num_hidden_layers=1)
    waits = ("SynchronizeStream", "SynchronizeDevice", "SynchronizeStreamWithTimeout", "SynchronizeDeviceWithTimeout",
             "SynchronizeEvent")
    done = run_python(["-c", BROKEN, str(model), *waits], forked=True)
    assert done.returncode == 0, done.stderr[-4000:]
    died, closed = done.stdout.splitlines()[-2:]
    assert died.startswith("DIED"), done.stdout
    assert closed == "CLOSED"
    assert "the device did not take its memory back" in done.stderr
