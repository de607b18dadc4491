"""Modules of transformers are replaced by ours where both compute the same, and only there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from npu_runner import LLM, strategies
from npu_runner.models.transformers_fusion import FusedAttention, FusedLayer, FusedMLP, LastNorm
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.strategies import transformers_model
from tests.full_set import only_full
from tests.oracle.foreign_checkpoints import make_foreign_checkpoint
from tests.oracle.replaced_modules import counts
from tests.oracle.running import SMALL, assert_equals_reference, assert_prompt_rows_equal, runner_of

pytest.importorskip("transformers")
PROMPT = list(range(203, 3, -1))
ALL = {"layers": 3, "attention": 3, "MLP": 3}


@pytest.fixture(autouse=True)
def ops_of_few_dims(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of vendors take fewer dims than torch's operators, and modules of transformers have one for a batch."""
    def checked(name: str, most: int) -> Any:
        run = getattr(CpuOps, name)

        def call(self: Any, *given: Any) -> Any:
            assert all(x.dim() <= most for x in given if isinstance(x, Tensor)), name
            return run(self, *given)
        return call

    for name, most in (("rms_norm", 3), ("rotary", 3), ("add_rms_norm", 2), ("silu_and_mul", 2), ("linear", 2)):
        monkeypatch.setattr(CpuOps, name, checked(name, most))


def assert_equal(path: Path, llm: LLM) -> None:
    assert_prompt_rows_equal(path, llm, PROMPT)
    assert_equals_reference(path, llm, [llm.engine.processor.from_text("which of the two pictures shows a circle?")])


@pytest.mark.parametrize(("model_type", "changes", "expected"), [
    ("gemma3_text", {}, {"attention": 3, "MLP": 3, "norms": 19}),  # zero-centred, four norms a layer, norms of heads
    ("mixtral", {}, {"layers": 3, "attention": 3, "norms": 7}),  # experts within our layers
    *only_full("others with other parts", ("qwen3", {}, ALL | {"norms": 13}), ("gemma", {}, ALL | {"norms": 7}),
               ("granite", {"residual_multiplier": 0.5, "attention_multiplier": 0.1},
                {"attention": 3, "MLP": 3, "norms": 7}),
               ("stablelm", {"use_qkv_bias": True}, {"attention": 3, "MLP": 3}),
               ("cohere", {}, {"MLP": 3}),
               ("smollm3", {"no_rope_layers": [1, 0, 1]}, {"layers": 2, "attention": 2, "MLP": 3, "norms": 7}),
               ("gpt2", {}, {}))])
def test_equal_modules_are_replaced(model_type: str, changes: dict[str, Any], expected: dict[str, int],
                                    tmp_path: Path, platform_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategies, "find_strategy", lambda model_type: None)
    path = make_foreign_checkpoint(tmp_path, model_type, **changes)
    with LLM(path, platform=platform_name, graph_mode="eager", max_num_batched_tokens=128, **SMALL) as llm:
        assert counts(llm) == expected
        assert_equal(path, llm)


@pytest.mark.parametrize(("kind", "left"), [(FusedMLP, {"layers": 3, "attention": 3, "norms": 7}),
                                            *only_full("one kind stays", (FusedAttention, {"MLP": 3, "norms": 7}),
                                                       (FusedLayer, {"attention": 3, "MLP": 3, "norms": 7}))])
def test_a_module_that_differs_stays(kind: type[nn.Module], left: dict[str, int], tmp_path: Path, platform_name: str,
                                     monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def changed(forward: Any) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = forward(self, *args, **kwargs)
            return 1.01 * found if isinstance(found, Tensor) else (1.01 * found[0], found[1])
        return run

    caplog.set_level("INFO")
    monkeypatch.setattr(kind, "forward", changed(kind.forward))
    path = make_foreign_checkpoint(tmp_path, "gemma")
    with LLM(path, platform=platform_name, graph_mode="eager", **SMALL) as llm:
        assert counts(llm) == left
        assert_equal(path, llm)
    assert "3 of class Gemma" in caplog.text
    assert "differ from ours and stay" in caplog.text


def test_all_stay_where_they_differ_together(tmp_path: Path, platform_name: str, monkeypatch: pytest.MonkeyPatch,
                                             caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(LastNorm, "forward", lambda self, both: 2 * self.norm.add_forward(*both)[0][None])
    path = make_foreign_checkpoint(tmp_path, "gemma")
    with LLM(path, platform=platform_name, graph_mode="eager", **SMALL) as llm:
        assert counts(llm) == {}
        assert_equal(path, llm)
    assert "all modules of transformers stay, as ours differ together: logits" in caplog.text


def test_the_last_layer_adds_its_results_where_the_last_norm_is_not_ours(tmp_path: Path, platform_name: str,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    compare = transformers_model.compare_at_start

    def without_last_norm(model: Any, *given: Any) -> Any:
        model.base.norm.forward = model.base.norm.forward  # as a norm over the features of all ranks has one of its own
        return compare(model, *given)

    monkeypatch.setattr(transformers_model, "compare_at_start", without_last_norm)
    path = make_foreign_checkpoint(tmp_path, "mixtral")
    with LLM(path, platform=platform_name, graph_mode="eager", max_num_batched_tokens=128, **SMALL) as llm:
        assert counts(llm) == {"layers": 3, "attention": 3, "norms": 6}
        passing = [module.passes_on for module in runner_of(llm).model.modules() if isinstance(module, FusedLayer)]
        assert passing == [True, True, False]
        assert_prompt_rows_equal(path, llm, PROMPT)
