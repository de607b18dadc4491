"""A rank that dies, stops or fails ends the job soon, by name, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from npu_runner import LLM, SamplingParams
from npu_runner.engine.executors import shared_memory
from npu_runner.engine.executors.shared_memory import SharedMemoryExecutor
from npu_runner.errors import EngineDeadError, OutOfMemoryError
from npu_runner.processes.child import is_ending
from tests import zygote
from tests.full_set import only_full

SETTINGS: dict[str, Any] = {"platform": "cpu", "tensor_parallel_size": 2, "max_model_len": 512, "max_num_seqs": 4}
LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


def executor_of(llm: LLM) -> SharedMemoryExecutor:
    executor = llm.engine._executor
    assert isinstance(executor, SharedMemoryExecutor)
    return executor


def run_to_end(llm: LLM) -> None:
    while llm.engine.has_unfinished_requests():
        llm.engine.step()


def assert_gone(process_ids: list[int]) -> None:
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


@pytest.mark.parametrize("victim", [1, *only_full("the first rank; another one stays", 0)])
def test_a_killed_rank_is_named_and_the_others_end(victim: int, checkpoint: Any) -> None:
    segments = set(os.listdir("/dev/shm"))
    llm = LLM(checkpoint("qwen3"), **SETTINGS)
    process_ids = executor_of(llm).process_ids()
    prompt = llm.engine.processor.from_text("which picture")
    llm.engine.add_request("r", prompt, LONG)
    for _ in range(3):
        llm.engine.step()
    os.kill(process_ids[victim], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=f"rank {victim} died .killed by SIGKILL"):
        run_to_end(llm)
    assert_gone(process_ids)
    assert set(os.listdir("/dev/shm")) <= segments
    llm.close()


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_that_was_aborted_is_not_named_before_one_that_was_killed(killed: int, checkpoint: Any) -> None:
    """A peer whose device loses memory of a dead rank is aborted, and may be gone first."""
    llm = LLM(checkpoint("qwen3"), **SETTINGS)
    process_ids = executor_of(llm).process_ids()
    llm.engine.add_request("r", llm.engine.processor.from_text("which picture"), LONG)
    llm.engine.step()
    for rank, name in ((1 - killed, signal.SIGABRT), (killed, signal.SIGKILL)):
        os.kill(process_ids[rank], name)
        while not is_ending(process_ids[rank]):
            time.sleep(0.01)
    with pytest.raises(EngineDeadError, match=rf"rank {killed} died .killed by SIGKILL"):
        run_to_end(llm)
    assert_gone(process_ids)


def test_a_stopped_rank_is_noticed(checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(checkpoint("qwen3"), **SETTINGS)
    monkeypatch.setattr(shared_memory, "STOPPED_SECONDS", 3.0)
    process_ids = executor_of(llm).process_ids()
    os.kill(process_ids[1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="rank 1 has been stopped"):
        llm.generate(["which picture"], LONG)
    assert_gone(process_ids)
    with pytest.raises(EngineDeadError, match="the model was closed"):
        llm.generate(["which picture"], LONG)


def test_an_engine_that_was_closed_says_so(checkpoint: Any) -> None:
    llm = LLM(checkpoint("qwen3"), **{**SETTINGS, "tensor_parallel_size": 1})
    llm.close()
    with pytest.raises(EngineDeadError, match="the model was closed"):
        llm.generate(["which picture"], LONG)


def test_a_refusal_in_the_ranks_is_the_same_error_as_in_one_process(checkpoint: Any) -> None:
    with pytest.raises(OutOfMemoryError, match="raise kv_cache_bytes"):
        LLM(checkpoint("qwen3"), **SETTINGS, kv_cache_bytes=4096)


def test_ranks_end_when_the_engine_is_killed(checkpoint: Any) -> None:
    script = (
        "import sys, time\n"
        "from npu_runner import LLM\n"
        f"llm = LLM(sys.argv[1], **{SETTINGS!r})\n"
        "print(*llm.engine._executor.process_ids(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with zygote.unless_full().Popen([sys.executable, "-c", script, str(checkpoint("qwen3"))], stdout=subprocess.PIPE,
                                    text=True) as engine:
        assert engine.stdout is not None
        process_ids = [int(word) for word in engine.stdout.readline().split()]
        assert len(process_ids) == 2
        engine.kill()
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process_id}").exists() for process_id in process_ids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_gone(process_ids)
