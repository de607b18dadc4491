"""Runs a small job once for each of several failures of the device, and says how each run ended.

    python -m tests.npu.programs.failing_device SPEC.json RESULTS.json

SPEC: {"failures": ["aclrtMallocPhysical:3+:207001", ...], "settings": {"model": ..., ...}, "undisturbed": {...}}. Each
run is a fork of this process, which has imported everything and touched no device. The failure "" is none, and takes
the settings of "undisturbed" as well; one that begins with "serving " is counted from when the model stands ready.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch  # noqa: F401 - imported for the children
import torch_npu  # noqa: F401 - imported for the children

import npu_runner.runner.model_runner  # noqa: F401 - imported for the children
from npu_runner import LLM, SamplingParams
from npu_runner.errors import NpuRunnerError
from scripts.shapes.drawing import TEST_SEEDS, draw_example
from tests.cann.programs.emulation import set_failures
from tests.oracle.running import runner_of

NUM_EXAMPLES = 3
SERVING = "serving "


def job(settings: dict[str, Any], failure: str) -> dict[str, Any]:
    """Tokens of the job, or the error that ended it."""
    is_late = failure.startswith(SERVING)
    try:
        set_failures("" if is_late else failure)
        with LLM(platform="npu", **settings) as llm:
            if is_late:
                set_failures(failure.removeprefix(SERVING))
            conversations = [draw_example(seed).conversation() for seed in TEST_SEEDS[:NUM_EXAMPLES]]
            if not runner_of(llm).strategy.is_multimodal:
                conversations = [[{"role": "user", "content": "which picture " * (1 + index)}]
                                 for index in range(NUM_EXAMPLES)]
            prompts = [llm.engine.processor(conversation) for conversation in conversations]
            outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=6))
            given_up = [completion.error for output in outputs for completion in output.completions if completion.error]
            if given_up:
                return {"error": "GivenUp", "message": given_up[0]}
            return {"tokens": [output.token_ids for output in outputs], "graphs": llm.engine.info.graphs,
                    "num_retries": runner_of(llm).guard.num_retries}
    except NpuRunnerError as error:
        return {"error": type(error).__name__, "message": str(error)}
    except RuntimeError:
        return {"error": "other", "message": traceback.format_exc()}


def forked(failure: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The result of the job in a fork in which the device fails like that."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        with os.fdopen(write, "w") as pipe:
            json.dump(job(settings, failure), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"error": "died", "message": f"ended with {os.waitstatus_to_exitcode(status)} and said nothing"}
    found: dict[str, Any] = json.loads(text)
    return found


def main(spec_path: str, results_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    runs = {failure: forked(failure, spec["settings"] | ({} if failure else spec["undisturbed"]))
            for failure in spec["failures"]}
    Path(results_path).write_text(json.dumps(runs))


if __name__ == "__main__":
    main(*sys.argv[1:])
