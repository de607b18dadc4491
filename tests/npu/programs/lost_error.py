"""Generates, lets the device's queue die in a way that nobody hears of, and generates again: prints how that ended.

    python -m tests.npu.programs.lost_error MODEL GRAPH_MODE

torch_npu tells an operation's error once, to whoever queues something next; when that is the destructor of an event,
the error is gone, and whatever is queued from then on is dropped without a word.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch_npu  # noqa: F401

from npu_runner import LLM, SamplingParams
from npu_runner.errors import NpuRunnerError
from tests.cann.programs.emulation import set_failures

DEVICE_FAULT = 507899


def let_the_queue_die() -> None:
    host = torch.ones(4).pin_memory()
    on_device = torch.zeros(4).npu()
    event = torch.npu.Event()
    event.record()
    torch.npu.synchronize()
    set_failures(f"aclrtMemcpyAsync:1:{DEVICE_FAULT}")
    on_device.copy_(host, non_blocking=True)
    time.sleep(1.0)  # until the queue's thread has met the failure
    del event
    torch.npu.synchronize()  # says nothing
    set_failures("")
    assert on_device.cpu().tolist() == [0.0] * 4, "the copy was to fail"


def main(model: str, graph_mode: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(model=model, platform="npu", graph_mode=graph_mode, max_model_len=256, max_num_seqs=2,
             dtype="bfloat16") as llm:
        prompt = llm.engine.processor([{"role": "user", "content": "which picture"}])
        first = llm.generate([prompt], params)[0].token_ids
        let_the_queue_die()
        result: dict[str, object] = {"first": first}
        try:
            result["second"] = llm.generate([prompt], params)[0].token_ids
        except NpuRunnerError as error:
            result |= {"error": type(error).__name__, "message": str(error)}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
