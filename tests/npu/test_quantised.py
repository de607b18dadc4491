"""Quantised checkpoints on the npu platform: dequantised while loading, they give the tokens of the cpu platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.quantised.writing import quantise
from tests.cann.environment import has_real_cann
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.slow]
FORMATS = {"fp8-block": "reduce-overhead", "modelslim-w4a16": "eager"}


@pytest.mark.full("captures graphs; what reads such weights is the same on every platform, and compared on the cpu one")
@pytest.mark.skipif(has_real_cann(), reason="a device's attention takes no float32")
def test_dequantised_weights_give_the_tokens_of_the_cpu_platform(checkpoint: Any, tmp_path: Path) -> None:
    cases = []
    for name, mode in FORMATS.items():
        quantise(checkpoint("qwen3", head_dim=64, num_hidden_layers=2), tmp_path / name, name, group_size=16)
        graphs = {} if mode == "eager" else {"graph_batch_sizes": [4]}
        cases.append(Case(str(tmp_path / name), {"graph_mode": mode, **SMALL, **FLOAT32, **graphs}, "texts", 7))
    for case, result in zip(cases, on_npu(cases, tmp_path), strict=True):
        assert result["tokens"] == on_cpu(case)["tokens"]
