"""What a start does, and what it does without."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from npu_runner.config import RunnerConfig
from npu_runner.core.batch import ScheduledBatch
from npu_runner.engine.llm_engine import LLMEngine
from npu_runner.prompts.processor import ChatProcessor
from npu_runner.runner.clocks import PhaseClock
from npu_runner.runner.model_runner import ModelRunner
from npu_runner.runner.step import StepUnderWay
from npu_runner.strategies import open_checkpoint
from npu_runner.strategies.base import LoadStrategy

_SETTINGS = {"platform": "cpu", "enforce_eager": True, "kv_cache_bytes": 1 << 20, "max_model_len": 64}
_PROGRAM = """
import sys
from npu_runner import LLM, SamplingParams
import npu_runner.platforms.cuda.graphs
with LLM(sys.argv[1], platform="cpu", enforce_eager=True, kv_cache_bytes=1 << 20, max_model_len=64) as llm:
    llm.generate(["which"], SamplingParams(max_tokens=2))
    print(sorted({"torch._dynamo", "torch._inductor", "transformers", "sympy"} & set(sys.modules)))
"""


def test_a_start_that_compiles_nothing_loads_no_compiler(checkpoint: Callable[..., Path]) -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(checkpoint("qwen3"))], check=True, capture_output=True,
                          text=True)
    assert done.stdout.strip() == "[]"


def test_one_process_reads_a_tokenizer_once(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = LoadStrategy.processor

    def counted(strategy: LoadStrategy, config: RunnerConfig) -> ChatProcessor:
        made.append(config)
        return make(strategy, config)

    monkeypatch.setattr(LoadStrategy, "processor", counted)
    with LLMEngine(open_checkpoint(RunnerConfig.from_keywords(checkpoint("qwen3"), **_SETTINGS))):
        assert len(made) == 1


def test_a_start_tells_its_phases_in_order(checkpoint: Callable[..., Path]) -> None:
    with LLMEngine(open_checkpoint(RunnerConfig.from_keywords(checkpoint("qwen3"), **_SETTINGS))) as engine:
        assert list(engine.info.start_seconds) == [
            "reading config and tokenizer", "setting the device", "loading weights", "compiling kernels",
            "profiling memory", "allocating the KV cache"]


def test_where_nothing_is_measured_a_small_step_is_run(checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
                                                      ) -> None:
    """A worst step has 4,096 tokens here: all of them would go through a larger model, and nothing would be learnt."""
    sizes = []
    submit = ModelRunner.submit

    def measured(runner: ModelRunner, batch: ScheduledBatch) -> StepUnderWay:
        sizes.append(int(batch.query_lens_B.sum()))
        return submit(runner, batch)

    monkeypatch.setattr(ModelRunner, "submit", measured)
    with LLMEngine(open_checkpoint(RunnerConfig.from_keywords(checkpoint("qwen3"), platform="cpu"))):
        assert sizes == [32, 4], "a prefill and a decode step"


def test_seconds_belong_to_the_phase_they_pass_in(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 63.0))
    monkeypatch.setattr("npu_runner.runner.clocks.time.perf_counter", lambda: next(times))
    clock = PhaseClock()
    for phase in ("reading", "writing", "reading"):
        clock.enter(phase)
    clock.end()
    clock.end()
    assert clock.seconds == {"reading": 10.0, "writing": 4.0}
    assert clock.describe() == "reading 10.00 s, writing 4.00 s"
