"""Launches and copies of a decode step, measured for each kind of layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scripts.quantised.writing import quantise
from tests.cann.environment import run_python
from tests.npu.layer_kinds import LAYERS, LayerKind
from tests.oracle.quantised_folders import one_range

# GE operators that are no kernels of their own: views, and transposes of weights, which go into the matmul.
VIEWS = {"Reshape", "Unsqueeze", "Squeeze", "Identity", "Transpose"}
BATCH_SIZE = 4


def measured(kind: LayerKind, mode: str, checkpoint: Any, folder: Path, *, layers: tuple[int, int] = LAYERS,
             **emulation: str) -> dict[str, Any]:
    models = {str(count): str(stored(kind, checkpoint(kind.model_type, **kind.config(count)), folder / str(count)))
              for count in layers}
    settings: dict[str, Any] = {"graph_mode": mode, "dtype": "bfloat16", "vision_cache_bytes": 0, **kind.settings}
    if mode != "eager":
        settings["graph_batch_sizes"] = [BATCH_SIZE]
    if mode == "max-autotune":
        settings["use_graph_cache"] = False
    spec = {"models": models, "batch_size": BATCH_SIZE, "settings": settings}
    (folder / "spec.json").write_text(json.dumps(spec))
    done = run_python(["-m", "tests.npu.programs.decode_cost", str(folder / "spec.json"), str(folder / "out.json")],
                      **kind.emulation, **emulation)
    assert done.returncode == 0, done.stderr[-6000:]
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    return found


def stored(kind: LayerKind, plain: Path, folder: Path) -> Path:
    """The checkpoint as the kind has it."""
    if kind.stored is None:
        return plain
    quantise(plain, folder, kind.stored, ranges=one_range(plain))
    return folder


def launches_of(cost: dict[str, Any]) -> dict[str, float]:
    return {name: count for name, count in cost["per_layer"].items() if name not in VIEWS}


def assert_no_cache_is_copied(cost: dict[str, Any]) -> None:
    on_device = sum(entry["bytes"] for name, entry in cost["copies"].items() if name.startswith("d2d"))
    assert on_device < cost["cache_bytes"] / 100, "neither the KV cache nor the states are copied"
