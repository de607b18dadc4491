"""CANN 8.5 under a wheel of TorchNPU 26.2.0: what is served gives the tokens of the cpu platform, the rest is refused by
name before weights load, and an operator that computes otherwise ends the start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann
from tests.families import FAMILIES
from tests.npu.programs.generate import Case
from tests.npu.running import SMALL, assert_graphs_are_whole, on_cpu, on_npu
from tests.npu.test_doctor import toolkit

pytestmark = [pytest.mark.npu, pytest.mark.skipif(has_real_cann(), reason="a real host has the CANN it has")]

SERVED: dict[str, dict[str, Any]] = {"qwen3": {}, "qwen3_vl": {"rope_parameters": {
    "rope_type": "default", "rope_theta": 10000.0, "mrope_section": [24, 20, 20]}}}


def cann85(folder: Path) -> dict[str, str]:
    """The emulation's switch, and a toolkit that says the same."""
    return {"cann_version": "8.5.0", **toolkit(folder / "cann", "8.5.0")}


def cases(checkpoint: Any, mode: str, model_types: Sequence[str] = tuple(SERVED), **settings: Any) -> list[Case]:
    found = []
    for name in model_types:
        model = checkpoint(name, **{**FAMILIES[name].npu[0], **SERVED[name], "head_dim": 128})
        graphs = {} if mode == "eager" else {"graph_batch_sizes": [4]}
        prompts, count = ("images", 3) if name == "qwen3_vl" else ("texts", 5)
        found.append(Case(str(model), {"graph_mode": mode, "dtype": "bfloat16", **SMALL, **graphs, **settings}, prompts,
                          count, logprobs=8))
    return found


def assert_tokens_equal_cpu(asked: list[Case], folder: Path) -> list[dict[str, Any]]:
    results = on_npu(asked, folder, allow_fp32_attention=False, **cann85(folder))
    for case, result in zip(asked, results, strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"], case.model
        if case.settings["graph_mode"] != "eager":
            assert_graphs_are_whole(result, [4])
        assert result["after"].get("fallbacks", {}) == {}, "nothing leaves the AI core, nor sorts indices"
        assert "not verified on any 8.5" in result["stderr"]
    return results


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead"])
def test_dense_models(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_tokens_equal_cpu(cases(checkpoint, mode), tmp_path)
