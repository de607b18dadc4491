"""Weights in NZ on the npu platform: they answer as the same weights row by row, bit for bit, whatever is multiplied;
they are moved once, when they are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from scripts.quantised.writing import quantise
from tests.cann.environment import has_real_cann, run_python
from tests.full_set import only_full
from tests.npu.int8_cases import GRAPH_ENGINE, MODES, assert_near, case, logits
from tests.npu.int8_cases import SIZES as EXPERTS
from tests.oracle.quantised_folders import one_range
from tests.oracle.rounded_models import rounded_models

pytestmark = [pytest.mark.npu, pytest.mark.slow,
              pytest.mark.skipif(has_real_cann(), reason="only the emulated CANN counts launches")]

DENSE = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
         "num_key_value_heads": 4, "num_hidden_layers": 1}
LINEARS = 4
"""q, k and v; o; gate and up; down."""
READ_NZ = {"dense": {"aclnnQuantMatmulWeightNz"},
           "experts": {"aclnnGroupedMatmulSwigluQuantWeightNzV2", "aclnnGroupedMatmulWeightNz"}}
ROW_BY_ROW = {"aclnnQuantMatmulV5", "aclnnGroupedMatmulV5", "aclnnDequantSwigluQuantV2"}


def answers(cases: list[dict[str, Any]], weights: str, folder: Path) -> list[dict[str, Any]]:
    """`weights`: the setting of the platform."""
    (folder / "spec.json").write_text(json.dumps({"cases": cases}))
    done = run_python(["-m", "tests.npu.programs.nz", str(folder / "spec.json"), str(folder / "found.pt")], timeout=900,
                      NPU_RUNNER_ASCEND_NZ_WEIGHTS=weights)
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return list(found["answers"])


def assert_same(folders: list[Path], modes: list[dict[str, Any]], weights: str, folder: Path) -> list[dict[str, Any]]:
    """As without NZ; casts are made while loading alone."""
    cases = [case(path, **mode) for path in folders for mode in modes]
    found, plain = (answers(cases, each, folder) for each in (weights, "none"))
    for ours, theirs in zip(found, plain, strict=True):
        assert ours["tokens"] == theirs["tokens"]
        assert torch.equal(ours["logits"], theirs["logits"])
        assert ours["casts"][0] == ours["casts"][1] > 0
        assert theirs["casts"] == [0, 0]
    return found


def assert_logits(plain: Path, quantised: Path, found: dict[str, Any]) -> None:
    with open_weights(quantised, read_quantization(quantised)) as stored:
        exact, rounded = rounded_models(plain, stored)
    assert_near(found["logits"], logits(exact, found["tokens"]), logits(rounded, found["tokens"]))


def matmuls(answer: dict[str, Any]) -> set[str]:
    return set(answer["launches"]) | set(answer["captured"])


@pytest.mark.parametrize("sizes", [{128: MODES[1]}, *only_full("the other size, eagerly", {64: MODES[0]})], ids=str)
def test_integers_in_groups(sizes: dict[int, dict[str, Any]], checkpoint: Any, tmp_path: Path) -> None:
    """In NZ as near to float64 as plain torch is; every weight is moved. int8 with rounded inputs is read from NZ, too.
    """
    plain = checkpoint("qwen3", **DENSE)
    quantise(plain, tmp_path / "w8a8", "w8a8")
    for size in sizes:
        quantise(plain, tmp_path / f"awq{size}", "awq", group_size=size)
    cases = [case(tmp_path / f"awq{size}", **mode) for size, mode in sizes.items()]
    *groups, int8 = answers([*cases, case(tmp_path / "w8a8", **MODES[0])], "all", tmp_path)
    assert READ_NZ["dense"] <= matmuls(int8)
    assert not ROW_BY_ROW & matmuls(int8)
    for size, found in zip(sizes, groups, strict=True):
        assert_logits(plain, tmp_path / f"awq{size}", found)
        # The vendor's packing moves what it reads there and back.
        assert found["casts"] == [2 * LINEARS, 2 * LINEARS]


@pytest.mark.full("a process for each layout; int8 in NZ stays (test_int8, test_int8_experts), and groups above")
@pytest.mark.parametrize("modes", [MODES, GRAPH_ENGINE])
def test_answers_are_those_of_weights_row_by_row(modes: list[dict[str, Any]], checkpoint: Any, tmp_path: Path) -> None:
    """One checkpoint of each form; of groups those that NZ takes, and those that it does not."""
    dense, moe = checkpoint("qwen3", **DENSE), checkpoint("qwen3_moe", **EXPERTS)
    for name in ("w8a8", "w8a8-static"):
        quantise(dense, tmp_path / name, name, ranges=one_range(dense))
    for found in assert_same([tmp_path / "w8a8", tmp_path / "w8a8-static"], modes, "int8", tmp_path):
        assert READ_NZ["dense"] <= matmuls(found)
        assert not ROW_BY_ROW & matmuls(found)
        assert found["casts"][0] == LINEARS
    for name, size in (("awq", 64), ("gptq", 128), ("modelslim-w8a16", 64)):
        quantise(dense, tmp_path / name, name, group_size=size)
    assert_same([tmp_path / name for name in ("awq", "gptq")], modes, "all", tmp_path)
    # By output it is turned in ND, and CPUs add up in another order then.
    for found in answers([case(tmp_path / "modelslim-w8a16", **mode) for mode in modes], "all", tmp_path):
        assert_logits(dense, tmp_path / "modelslim-w8a16", found)
        assert found["casts"] == [LINEARS, LINEARS]
    quantise(moe, tmp_path / "experts", "w8a8")
    for found in answers([case(tmp_path / "experts", **mode) for mode in modes], "int8", tmp_path):
        assert_logits(moe, tmp_path / "experts", found)
        assert READ_NZ["dense"] | READ_NZ["experts"] <= matmuls(found)
        assert not ROW_BY_ROW & matmuls(found)
