"""The npu platform gives the tokens of the cpu platform: the embedded model in every mode, steps of a device that lags
behind, an older torch_npu. Families are compared in test_families.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from npu_runner.assets import SHAPES_VL
from tests.full_set import only_full
from tests.npu.family_cases import emulated, tiny
from tests.npu.programs.generate import Case
from tests.npu.running import FLOAT32, SMALL, assert_graphs_are_whole, on_cpu, on_npu

pytestmark = [pytest.mark.npu, pytest.mark.slow]

NUM_IMAGES = 40
# The worst step shows the tower pairs of frames, as many as a step has room for, in float32.
ROOM = 2 << 30
BUCKETS = [1, 4, 16]


def shapes(mode: str, **settings: Any) -> Case:
    common: dict[str, Any] = {"graph_mode": mode, "max_model_len": 1024, "max_num_seqs": 16,
                              "vision_cache_bytes": SMALL["vision_cache_bytes"], **FLOAT32}
    if mode != "eager":
        common["graph_batch_sizes"] = BUCKETS
    return Case(str(SHAPES_VL), {**common, **settings}, "shapes", NUM_IMAGES, max_tokens=48, ignore_eos=False)


@pytest.fixture(scope="module")
def shapes_on_cpu() -> dict[str, Any]:
    return on_cpu(shapes("eager"))


@pytest.mark.full("the embedded model's graphs; those of a tiny model of its family stay (test_families.py)")
@emulated
def test_shapes_vl(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    (result,) = on_npu([shapes("reduce-overhead")], tmp_path, memory_bytes=ROOM)
    assert result["tokens"] == shapes_on_cpu["tokens"]
    assert_graphs_are_whole(result, BUCKETS)


@pytest.mark.full("prefills run eagerly with graphs, too; eager decode steps stay with tiny models")
@emulated
def test_shapes_vl_without_graphs(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    (result,) = on_npu([shapes("eager")], tmp_path, memory_bytes=ROOM)
    assert result["tokens"] == shapes_on_cpu["tokens"]


@pytest.mark.full("compiles the embedded model's graphs and loads them again; tiny models stay in this mode, kept "
                  "graphs have their own file")
@emulated
def test_shapes_vl_through_the_graph_engine_compiled_and_kept(shapes_on_cpu: dict[str, Any], tmp_path: Path) -> None:
    case = shapes("max-autotune", graph_cache_dir=str(tmp_path / "graphs"))
    (compiled,) = on_npu([case], tmp_path, memory_bytes=ROOM)
    assert compiled["tokens"] == shapes_on_cpu["tokens"]
    assert_graphs_are_whole(compiled, BUCKETS)
    assert "kept" not in compiled["graphs"]
    (loaded,) = on_npu([case], tmp_path, memory_bytes=ROOM)
    assert loaded["tokens"] == shapes_on_cpu["tokens"]
    assert loaded["graphs"] == "1, 4, 16 (kept from an earlier run: 1, 4, 16)"
    assert loaded["after"]["traced"] == 0, "what is loaded is not traced again"


@emulated
@pytest.mark.parametrize(("model_types", "mode"), [(["qwen3"], "reduce-overhead"), *only_full(
    "images, which stay in test_images_ahead.py, and eager steps", (["qwen3_vl"], "reduce-overhead"),
    (["qwen3", "qwen3_vl"], "eager"))])
def test_a_device_that_lags_behind_and_a_null_block_full_of_nan(model_types: Sequence[str], mode: str, checkpoint: Any,
                                                                tmp_path: Path) -> None:
    assert_lag_and_null_block_change_nothing(model_types, mode, checkpoint, tmp_path)


def assert_lag_and_null_block_change_nothing(model_types: Sequence[str], mode: str, checkpoint: Any,
                                             tmp_path: Path) -> None:
    """Nothing runs before somebody waits: a host that refills a buffer too early shows. Chunks that sample nothing do
    not wait. Whoever reads the null block shows, too."""
    several = {} if mode == "eager" else {"graph_batch_sizes": [2, 4]}
    cases = [tiny(model_type, checkpoint, mode, max_num_batched_tokens=40, **several) for model_type in model_types]
    for case in cases:
        case.is_null_block_poisoned = True
    for case, result in zip(cases, on_npu(cases, tmp_path, lazy=True), strict=True):
        assert result["tokens"] == on_cpu(dataclasses.replace(case, is_null_block_poisoned=False))["tokens"]


@emulated
@pytest.mark.full("an older torch_npu's way to captured graphs; that of newer ones stays")
def test_torch_npu_without_npugraph_ex_captures_through_torchair(checkpoint: Any, tmp_path: Path) -> None:
    case = dataclasses.replace(tiny("qwen3", checkpoint, "reduce-overhead"), has_npugraph_ex=False)
    (result,) = on_npu([case], tmp_path)
    assert result["tokens"] == on_cpu(dataclasses.replace(case, has_npugraph_ex=True))["tokens"]
    assert_graphs_are_whole(result, [4])
    assert '"reduce-overhead" mode configuration will be deprecated' in result["stderr"], "torchair says which it is"
