"""Hidden states of layers and processed logits on the npu platform are those of the cpu platform, out of graphs too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.full_set import only_full
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu

pytestmark = pytest.mark.npu
RETURNED = {"hidden_state_layers": [1, -1], "logprobs_mode": "processed_logits"}
SAMPLING = {"return_hidden_states": True, "top_p": 0.9, "temperature": 0.8, "seed": 5, "repetition_penalty": 1.2}


@pytest.mark.parametrize("mode", ["reduce-overhead", *only_full(
    "compiles the graphs of the graph engine; captured ones stay", "max-autotune")])
def test_graphs_return_what_eager_steps_of_the_cpu_do(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    settings = {"graph_mode": mode, "graph_batch_sizes": [2, 4], "async_scheduling": True, **RETURNED, **SMALL,
                **FLOAT32, **({"use_graph_cache": False} if mode == "max-autotune" else {})}
    case = Case(str(checkpoint("qwen3", num_hidden_layers=2)), settings, "texts", 3, max_tokens=6, logprobs=4,
                sampling=SAMPLING)
    (result,), expected = on_npu([case], tmp_path), on_cpu(case)
    assert_graphs_are_whole(result, [2, 4])
    assert result["tokens"] == expected["tokens"]
    for found, wanted in zip(result["hidden_states"], expected["hidden_states"], strict=True):
        assert found.keys() == wanted.keys() == {"1", "-1"}
        for layer, states in wanted.items():
            np.testing.assert_allclose(found[layer], states, rtol=0, atol=1e-4)
    for found, wanted in zip(result["logprobs"], expected["logprobs"], strict=True):
        for of_npu, of_cpu in zip(found, wanted, strict=True):
            assert of_npu.keys() == of_cpu.keys()
            assert [*of_npu.values()] == pytest.approx([*of_cpu.values()], abs=1e-4)
