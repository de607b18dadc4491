"""Two ranks, one of which is killed or stopped in the middle of a job; says how the job ended and what it left behind.

    python -m tests.npu.programs.failing_ranks MODEL killed|stopped|none [SETTING=VALUE ...] RESULTS.json

FAIL_OF_THE_VICTIM in the environment is the emulation's FAIL for that rank alone.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from npu_runner import LLM, SamplingParams
from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor
from npu_runner.errors import EngineDeadError
from npu_runner.processes import child

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
VICTIM = 1


class PopenOfRank(subprocess.Popen[bytes]):
    """Starts a rank, the victim with failures of its own."""

    def __init__(self, arguments: list[str], *, env: dict[str, str], **options: Any):
        module = arguments.index("npu_runner.engine.executors.worker")
        if int(arguments[module + 1]) == VICTIM:
            env = {**env, "CANN_EMU_FAIL": os.environ["FAIL_OF_THE_VICTIM"]}
        super().__init__(arguments, env=env, **options)


def is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def end_of_a_job(model: str, how: str, settings: dict[str, Any]) -> dict[str, Any]:
    process_ids: list[int] = []
    seconds = 0.0
    graphs = ""
    if "FAIL_OF_THE_VICTIM" in os.environ:
        child.subprocess.Popen = PopenOfRank  # type: ignore[misc]
    try:
        with LLM(model, platform="npu", tensor_parallel_size=2, max_model_len=512, max_num_seqs=4, **settings) as llm:
            executor = llm.engine._executor
            assert isinstance(executor, SharedMemoryExecutor)
            process_ids, graphs = executor.process_ids(), executor.info.graphs
            llm.engine.add_request("r", llm.engine.processor.from_text("which picture"), LONG)
            for _ in range(3):
                llm.engine.step()
            started = time.monotonic()
            if how != "none":
                os.kill(process_ids[VICTIM], signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            try:
                while llm.engine.has_unfinished_requests():
                    llm.engine.step()
            finally:
                seconds = time.monotonic() - started
        message = ""
    except EngineDeadError as error:
        message = str(error)
    alive = [pid for pid in process_ids if is_alive(pid)]
    return {"message": message, "seconds": seconds, "graphs": graphs, "alive": alive}


def main(model: str, how: str, *rest: str) -> None:
    *pairs, results = rest
    settings = {name: ast.literal_eval(value) for name, _, value in (pair.partition("=") for pair in pairs)}
    Path(results).write_text(json.dumps(end_of_a_job(model, how, settings)))


if __name__ == "__main__":
    main(*sys.argv[1:])
