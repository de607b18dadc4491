"""Graphs of models through transformers' modules: equal to transformers, compared with eager steps at the start, and
left out by name where nothing can be captured.

On cuda these are captured graphs. On the cpu platform a stand-in runs the same functions over the same buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM
from npu_runner.errors import ConfigError
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.facts import AttentionFacts
from npu_runner.platforms.graphs import DecodeForward, GraphCaptureError, GraphCompiler, Recorder, capture_errors
from npu_runner.runner.prefill_graphs import RecordedPrefill
from tests.full_set import only_full
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint, write_config_alone
from tests.oracle.running import SMALL, UncompiledGraphs, assert_equals_reference
from tests.oracle.tiled_attention import TiledAttention

pytest.importorskip("transformers")
TEXTS = ["which", "which of the two pictures shows a circle?", "a b c d e f g " * 20]
SIZES: dict[str, Any] = {"graph_batch_sizes": (2, 4), "graph_prefill_sizes": (8, 64)}
ASKED: dict[str, Any] = {"graph_mode": "reduce-overhead", **SIZES}


class Repeating(UncompiledGraphs):
    def recorder(self) -> Recorder:
        return lambda run: run


class Wrong(Repeating):
    """What it makes of a decode step answers with the logits of the rows in another order."""

    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        return lambda inputs: forward(inputs).roll(1, -1)


class Failing(UncompiledGraphs):
    def compile(self, forward: DecodeForward, batch_size: int) -> DecodeForward:
        def fail(inputs: Any) -> Tensor:
            raise RuntimeError("operation not permitted when stream is capturing")

        return fail


@pytest.fixture
def graphs_of(platform_name: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[GraphCompiler], None]:
    """Gives the cpu platform this compiler, and attention whose prefills can be recorded."""
    if platform_name != "cpu":
        pytest.skip("the stand-in is the cpu platform's")

    def use(compiler: GraphCompiler) -> None:
        monkeypatch.setattr(CpuPlatform, "attention_backends", {"torch": AttentionFacts(records_prefills=True)})
        monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: compiler)
        monkeypatch.setattr("npu_runner.platforms.cpu.attention.CpuAttention", TiledAttention)

    return use


@pytest.mark.parametrize("model_type", ["gemma3_text", *only_full(
    "experts, learned positions, a decoder within the base", "mixtral", "gpt2", "opt")])
def test_graphs_equal_transformers(model_type: str, tmp_path: Path, platform_name: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    if platform_name == "cpu":
        monkeypatch.setattr(CpuPlatform, "attention_backends", {"torch": AttentionFacts(records_prefills=True)})
        monkeypatch.setattr(CpuPlatform, "make_graph_compiler", lambda self, settings: Repeating())
        monkeypatch.setattr("npu_runner.platforms.cpu.attention.CpuAttention", TiledAttention)
    elif platform_name != "cuda":
        pytest.skip("tests/npu/test_generic.py has these")
    path = make_foreign_checkpoint(tmp_path, model_type)
    with LLM(path, platform=platform_name, **ASKED, **SMALL) as llm:
        assert llm.engine.info.graphs == "2, 4; prefills of 8, 64 tokens"
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(text) for text in TEXTS])


def test_graphs_that_answer_otherwise_are_not_used(tmp_path: Path, graphs_of: Any, monkeypatch: pytest.MonkeyPatch,
                                                   caplog: pytest.LogCaptureFixture) -> None:
    graphs_of(Wrong())
    path = make_foreign_checkpoint(tmp_path, "gemma")
    with pytest.raises(ConfigError, match="'reduce-overhead': it answers otherwise than an eager step; leave it at"):
        LLM(path, platform="cpu", **ASKED, **SMALL)
    monkeypatch.setattr(CpuPlatform, "defaults", replace(CpuPlatform.defaults, graph_mode="reduce-overhead"))
    caplog.clear()
    with LLM(path, platform="cpu", **SIZES, **SMALL) as llm:
        assert llm.engine.info.graphs.startswith("none")
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(TEXTS[1])])
    assert [record.message for record in caplog.records].count(
        "no graph of batch size 4 (it answers otherwise than an eager step); batches of up to 4 run eagerly, as all do"
    ) == 1


def test_a_capture_that_fails_is_named(tmp_path: Path, graphs_of: Any) -> None:
    graphs_of(Failing())
    path = make_foreign_checkpoint(tmp_path, "gemma")
    with pytest.raises(ConfigError, match="operation not permitted when stream is capturing; leave it at auto"):
        LLM(path, platform="cpu", **ASKED, **SMALL)


@pytest.mark.parametrize(("kind", "passes"), [(RuntimeError, GraphCaptureError),
                                              (torch.OutOfMemoryError, torch.OutOfMemoryError)])
def test_the_error_that_ended_a_capture_is_named(kind: type[Exception], passes: type[Exception]) -> None:
    """Not that of the capture's end, which hides it."""
    def fail_twice() -> None:
        try:
            raise kind("of an operation")
        finally:
            raise RuntimeError("of the end")

    with pytest.raises(passes, match="of an operation"), capture_errors():
        fail_twice()


def test_prefills_that_answer_otherwise_are_not_recorded(tmp_path: Path, graphs_of: Any,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    graphs_of(Repeating())
    call = RecordedPrefill.__call__
    monkeypatch.setattr(RecordedPrefill, "__call__", lambda self, *given: call(self, *given).roll(1, -1))
    with LLM(make_foreign_checkpoint(tmp_path, "gemma"), platform="cpu", **ASKED, **SMALL) as llm:
        assert llm.engine.info.graphs == "2, 4; prefills of none tokens"


def test_a_module_that_makes_tensors_on_the_host_is_named(tmp_path: Path, platform_name: str,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    reason = "model.rotary_emb makes a tensor on the host and copies it to the device in each step"
    path = write_config_alone(tmp_path / "without", "phimoe")
    with pytest.raises(ConfigError, match=f"no graph can be captured of it: {reason}; leave it at auto"):
        LLM(path, platform=platform_name, graph_mode="reduce-overhead", **SMALL)
    path = make_foreign_checkpoint(tmp_path / "whole", "phimoe")
    with LLM(path, platform=platform_name, **SMALL) as llm:
        assert llm.engine.info.graphs == "eager"
        assert_equals_reference(path, llm, [llm.engine.processor.from_text(TEXTS[1])])
    assert f"it runs eagerly, as no graph can be captured of it: {reason}" in caplog.text
