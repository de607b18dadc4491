"""The vision tower on the emulated device: fifteen launches a layer, and the numbers of the CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts, and takes float32"),
]

# Four matmuls, two norms, two sums, attention, gelu, rotary, and four copies: to float32 and back, and v out of qkv.
MOST_LAUNCHES = 15


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    results = tmp_path_factory.mktemp("tower") / "out.json"
    done = run_python(["-m", "tests.npu.programs.tower_cost", str(results)], allow_fp32_attention=True)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads(Path(results).read_text())
    return found


def test_fifteen_launches_a_layer_and_none_that_pads(tower: dict[str, Any]) -> None:
    assert sum(tower["per_layer"].values()) == MOST_LAUNCHES, tower["per_layer"]
    assert "aclnnConstantPadNd" not in tower["per_layer"]


@pytest.mark.parametrize("activation", ["gelu_pytorch_tanh", "gelu"])
def test_weights_laid_out_for_the_kernel_change_no_number(activation: str, tower: dict[str, Any]) -> None:
    """Nor does a GELU by the error function become the one with tanh, which is a thousandth away."""
    assert tower["distances"][f"float32 {activation}"] < 1e-5
    assert tower["distances"][f"bfloat16 {activation}"] < 0.1
