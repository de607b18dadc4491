"""What a decode step costs on the emulated device, counted: thirteen launches a layer, one copy in, one copy out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import has_real_cann, run_python

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts"),
]

MOST_LAUNCHES = 13
# GE operators that are no kernels of their own: views, and transposes of weights, which go into the product.
VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose"}
BATCH_SIZE = 4


def measured(mode: str, checkpoint: Any, folder: Path) -> dict[str, Any]:
    shapes = {"head_dim": 128, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    models = {str(count): str(checkpoint("qwen3", num_hidden_layers=count, **shapes)) for count in (2, 4)}
    settings: dict[str, Any] = {"graph_mode": mode, "dtype": "bfloat16", "vision_cache_bytes": 0}
    if mode != "eager":
        settings["graph_batch_sizes"] = [BATCH_SIZE]
    if mode == "max-autotune":
        settings["use_graph_cache"] = False
    spec = {"models": models, "batch_size": BATCH_SIZE, "settings": settings}
    (folder / "spec.json").write_text(json.dumps(spec))
    done = run_python(["-m", "tests.npu.programs.decode_cost", str(folder / "spec.json"), str(folder / "out.json")])
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


@pytest.mark.parametrize("mode", ["eager", "reduce-overhead", "max-autotune"])
def test_thirteen_launches_a_layer_and_one_copy_each_way(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    cost = measured(mode, checkpoint, tmp_path)
    launches = {name: count for name, count in cost["per_layer"].items() if name not in VIEWS}
    assert sum(launches.values()) == MOST_LAUNCHES, launches
    assert all(count > 0 for count in launches.values()), launches
    assert cost["copies"]["h2d"]["calls"] == 1
    assert cost["copies"]["d2h"]["calls"] == 1
    assert sum(entry["calls"] for entry in cost["syncs"].values()) == 1, "the sampled tokens are waited for, once"
    on_device = sum(entry["bytes"] for name, entry in cost["copies"].items() if name.startswith("d2d"))
    assert on_device < cost["cache_bytes"] / 100, "the KV cache is never copied"
    assert mode == "eager" or "graphs" in cost["groups"], "the step went through a graph"
