"""What a decode step costs on the emulated device, counted: launches of a layer of each kind and of what is outside the
layers, one copy in, one out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cann.environment import ROOT, has_real_cann, run_python
from tests.npu.layer_kinds import KINDS, LAYERS, LayerKind
from tests.npu.measured_layers import BATCH_SIZE, VIEWS, assert_no_cache_is_copied, launches_of, measured
from tests.oracle.mtp_reference import with_head

pytestmark = [
    pytest.mark.npu,
    pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts"),
]

MODES = ["eager", "reduce-overhead", "max-autotune"]
# Twelve for the draw, and one for the ids that a step under way goes on from.
MOST_OF_A_DRAW = 13
MOST_OUTSIDE = 20
# Of the head's own layer 21, in the graph engine 25.
A_PASS = {"eager": 33, "reduce-overhead": 33, "max-autotune": 37}


# What the host does for the attention of each layer, beside launching it.
OF_THE_HOST = {
    "eager": {}, "reduce-overhead": {"aclrtSetStreamResLimit": 2.0},
    "max-autotune": {"host_scheduled FusedInferAttentionScore": 1.0},
}


def test_launches_of_a_layer_and_one_copy_each_way(checkpoint: Any, tmp_path: Path) -> None:
    """Each layer is traced, a second and more: three of them say what six do."""
    assert_cost(KINDS["dense"], "reduce-overhead", checkpoint, tmp_path, layers=(1, 2))


@pytest.mark.full("two processes for each kind and mode; a captured graph of dense layers stays")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_launches_of_layers_of_every_kind_and_mode(name: str, mode: str, checkpoint: Any, tmp_path: Path) -> None:
    assert_cost(KINDS[name], mode, checkpoint, tmp_path)


def assert_cost(kind: LayerKind, mode: str, checkpoint: Any, tmp_path: Path, *,
                layers: tuple[int, int] = LAYERS) -> None:
    cost = measured(kind, mode, checkpoint, tmp_path, layers=layers)
    launches = launches_of(cost)
    assert sum(launches.values()) == kind.launches[mode], launches
    assert all(count > 0 for count in launches.values()), launches
    assert cost["copies"]["h2d"]["calls"] == 1
    assert cost["copies"]["d2h"]["calls"] == 1
    assert cost["copies_in"] == {"grows": 1, "leaves": 1}, "what is new in block tables comes with the step"
    assert cost["more"] == {"grows": 1, "leaves": 1}, cost["more"]
    assert sum(entry["calls"] for entry in cost["syncs"].values()) == 1, "the sampled tokens are waited for, once"
    assert_no_cache_is_copied(cost)
    assert mode == "eager" or "graphs" in cost["groups"], "the step went through a graph"
    assert cost["fallbacks"] == {}, "nothing leaves the AI core"
    assert sum(cost["draw"].values()) <= MOST_OF_A_DRAW, cost["draw"]
    assert sum(cost["greedy"].values()) <= MOST_OF_A_DRAW, cost["greedy"]
    if kind is KINDS["dense"]:  # of the others a layer of another kind is outside
        beside = sum(count for name, count in cost["forward"].items() if name not in VIEWS)
        assert beside + sum(cost["draw"].values()) <= MOST_OUTSIDE, (cost["forward"], cost["draw"])
    # A layer without attention needs nothing of the host.
    assert cost["host_per_layer"] == (OF_THE_HOST[mode] if kind.has_attention else {})


@pytest.mark.full("two processes for each setting; the counts with the settings as they are stay")
@pytest.mark.parametrize(
    ("mode", "setting"),
    [("reduce-overhead", {"NPU_RUNNER_ASCEND_CAPTURE": "recorded"}),
     ("max-autotune", {"NPU_RUNNER_ASCEND_GE_TILING": "device"}),
     ("max-autotune", {"ASCEND_TOOLKIT_HOME": "9.0.0"})],
    ids=["recorded", "tiled on the device", "tiled where this CANN does it best"],
)
def test_what_the_host_does_for_each_layer_can_be_left_out(
    mode: str, setting: dict[str, str], checkpoint: Any, tmp_path: Path
) -> None:
    if (version := setting.get("ASCEND_TOOLKIT_HOME")) is not None:
        (tmp_path / "version.cfg").write_text(f"toolkit_running_version=[{version}:{version}]\n")
        setting = {"ASCEND_TOOLKIT_HOME": str(tmp_path)}
    cost = measured(KINDS["dense"], mode, checkpoint, tmp_path, **setting)
    assert cost["host_per_layer"] == {}
    assert sum(launches_of(cost).values()) == KINDS["dense"].launches[mode]


@pytest.mark.full("a process for each mode, three engines in each; nothing like it stays")
@pytest.mark.parametrize("mode", MODES)
def test_launches_of_the_models_own_head(mode: str, checkpoint: Any, tmp_path: Path) -> None:
    """Behind a plain step, then behind steps with one and two drafts a row."""
    plain = checkpoint("qwen3_5_text", **KINDS["gated attention"].config(1))
    settings: dict[str, Any] = {"graph_mode": mode, "dtype": "bfloat16", "vision_cache_bytes": 0}
    if mode == "max-autotune":
        settings["use_graph_cache"] = False
    spec = {"model": str(with_head(plain, tmp_path / "head")), "batch_size": BATCH_SIZE, "drafts": [0, 1, 2],
            "settings": settings}
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = run_python(["-m", "tests.npu.programs.head_cost", str(tmp_path / "spec.json"), str(tmp_path / "out.json")])
    assert done.returncode == 0, done.stderr[-6000:]
    costs = json.loads((tmp_path / "out.json").read_text())
    counts, outside = ([sum(count for name, count in cost[kind].items() if name not in VIEWS)
                        for cost in costs.values()] for kind in ("launches", "outside"))
    if mode != "eager":
        assert [sum(cost["step_outside"].values()) for cost in costs.values()] == [9, 15, 21], "of the whole step"
    a_pass = A_PASS[mode]
    # The first of two launches tells where the second tokens of pairs lie, or gathers tables; four read a draft out.
    # Eagerly the pass over the step's tokens gathers the tables of its rows, too.
    of_rows = 1 if mode == "eager" else 0
    assert counts == [a_pass, a_pass + 5 + of_rows, 2 * (a_pass + 5) + of_rows]
    assert outside == (counts if mode == "eager" else [0, 5, 10]), "a pass is one graph"
    for num_drafts, cost in enumerate(costs.values()):
        assert cost["syncs"] == {}, "the host waits for nothing between passes"
        waits = {name: entry["calls"] for name, entry in cost["step_syncs"].items()}
        assert not num_drafts or waits == {"event": 2}, "for what was drawn, then for the drafts"
        assert [cost["copies"].get(way, {}).get("calls", 0) for way in ("h2d", "d2h")] == [
            num_drafts, min(num_drafts, 1)], "one copy in for each draft, one out"


@pytest.mark.full("prints what the tests above hold; a minute")
def test_the_script_prints_layers_the_sampler_the_tower_and_the_time_of_the_host() -> None:
    command = [sys.executable, "-m", "bench.npu_ops", "--mode", "eager", "--kind", "dense", "--kind", "tower"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    dense, tower = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    cost = dense["modes"]["eager"]
    assert (cost["launches_per_layer"], tower["launches_per_layer"]) == (13, 15)
    assert cost["launches_outside"] <= MOST_OUTSIDE
    assert all(cost["host_milliseconds"][phase] > 0 for phase in ("prepare", "launch", "sample"))
    for title in ("launches of the sampler, plain draw", "copies of a step", "host, ms a step of 4 layers"):
        assert title in done.stdout
