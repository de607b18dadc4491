"""Ranks whose kernels wait for each other: one that is killed ends the job by name, and a suspended job goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
import torch

from npu_runner import LLM, SamplingParams
from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor
from npu_runner.errors import EngineDeadError
from tests.full_set import only_full

pytestmark = pytest.mark.ranks
SETTINGS: dict[str, Any] = {"platform": "cuda", "dtype": "bfloat16", "tensor_parallel_size": 2, "max_model_len": 2048,
                            "max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_bytes": 64 << 20}
LONG = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)


@pytest.fixture(autouse=True)
def _two_gpus(device: torch.device) -> None:
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")


def run_to_end(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


@pytest.mark.parametrize("number", [*range(8), *only_full("a start each; the first eight differ in kind",
                                                          *range(8, 50))])
def test_a_killed_rank_is_named(number: int, checkpoint: Any, monkeypatch: pytest.MonkeyPatch,
                                capfd: pytest.CaptureFixture[str]) -> None:
    """Eagerly and in graphs; the first rank and the second; while the other rank's kernel waits, and at any moment."""
    is_eager, victim, has_stopped = number % 2 == 0, number // 2 % 2, number // 4 % 2 == 0
    rng = random.Random(number)
    monkeypatch.setenv("NPU_RUNNER_LOG_LEVEL", "info")
    llm = LLM(checkpoint("qwen3"), enforce_eager=is_eager, **SETTINGS)
    assert ("eager" in llm.engine.info.graphs) == is_eager
    assert "all-reduce: custom up to 8.0 MiB" in capfd.readouterr().err
    executor = llm.engine._executor
    assert isinstance(executor, SharedMemoryExecutor)
    process_ids = executor.process_ids()
    llm.engine.add_request("r", llm.engine.processor.from_text("which picture"), LONG)
    for _ in range(rng.randrange(3, 40)):
        llm.engine.step()
    if has_stopped:
        os.kill(process_ids[victim], signal.SIGSTOP)
        time.sleep(0.2)  # what it has launched is over, and the other rank waits in a kernel
    else:
        time.sleep(0.003 * rng.random())
    os.kill(process_ids[victim], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"rank {victim} died .killed by SIGKILL"):
        run_to_end(llm)
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)
    llm.close()


@pytest.mark.parametrize("seconds", [3, *only_full("a minute of waiting", 60)])
def test_a_suspended_job_goes_on(seconds: int, checkpoint: Any) -> None:
    """All of its processes are stopped, one after the other, so that kernels wait for ranks that are stopped."""
    script = ("import sys\n"
              "from npu_runner import LLM, SamplingParams\n"
              f"llm = LLM(sys.argv[1], **{SETTINGS!r})\n"
              "print(*llm.engine._executor.process_ids(), flush=True)\n"
              "params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)\n"
              "while not sys.stdin.closed:\n"
              "    found = [tuple(each.token_ids) for each in llm.generate(['which picture', 'a b c'], params)]\n"
              "    print(hash(tuple(found)), flush=True)\n")
    with subprocess.Popen([sys.executable, "-c", script, str(checkpoint("qwen3"))], stdout=subprocess.PIPE, text=True
                          ) as engine:
        try:
            assert engine.stdout is not None
            ranks = [int(word) for word in engine.stdout.readline().split()]
            assert len(ranks) == 2
            expected = engine.stdout.readline()
            for first, last in (ranks, ranks[::-1])[: 2 if seconds < 60 else 1]:
                time.sleep(0.3)
                for process_id in (first, engine.pid, last):
                    os.kill(process_id, signal.SIGSTOP)
                    time.sleep(0.2)
                time.sleep(seconds)
                for process_id in (last, engine.pid, first):
                    os.kill(process_id, signal.SIGCONT)
                    time.sleep(0.2)
                found = {engine.stdout.readline() for _ in range(3)}
                assert found == {expected}
        finally:
            engine.kill()
