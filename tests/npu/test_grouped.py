"""Matmuls with integers in groups on the npu platform: no further from float64 than twice what the same formula in
plain torch is, alone and for logits.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.platforms.grouped import matmul, unpacked
from scripts.quantised.writing import quantise
from tests.cann.environment import run_python
from tests.npu.int8_cases import GRAPH_ENGINE, LIMIT, MODES, assert_near, case, distance, logits
from tests.npu.programs.generate import Case
from tests.npu.programs.grouped import DTYPES, KINDS, SHAPES, inputs_of
from tests.npu.running import SMALL, on_cpu, on_npu
from tests.oracle.rounded_models import rounded_models

pytestmark = [pytest.mark.npu, pytest.mark.slow]

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4,
         "num_key_value_heads": 4, "num_hidden_layers": 1}
FORMATS = ("w4a16-asym", "gptq", "gptq-int8", "w8a16", "modelslim-w4a16", "modelslim-w8a16")


def run(cases: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    (folder / "spec.json").write_text(json.dumps({"cases": cases}))
    done = run_python(["-m", "tests.npu.programs.grouped", str(folder / "spec.json"), str(folder / "found.pt")],
                      timeout=900)
    assert done.returncode == 0, done.stderr[-8000:]
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return found


def assert_logits(checkpoint: Path, names: tuple[str, ...], modes: list[dict[str, Any]], folder: Path, **settings: Any
                  ) -> dict[str, Any]:
    for name in names:
        quantise(checkpoint, folder / name, name, group_size=64)
    found = run([case(folder / name, **mode, **settings) for name in names for mode in modes], folder)
    for place, (tokens, ours) in enumerate(found["logits"]):
        path = folder / names[place // len(modes)]
        with open_weights(path, read_quantization(path)) as stored:
            exact, plain = rounded_models(checkpoint, stored)
        assert_near(ours, logits(exact, tokens), logits(plain, tokens))
    assert all("int4 and int8 with 16-bit inputs multiplied as they are stored" in each for each in found["said"])
    return found


def test_matmuls_and_logits_are_as_near_as_plain_torch(checkpoint: Any, tmp_path: Path) -> None:
    found = assert_logits(checkpoint("qwen3", **SIZES), ("awq",), MODES[:1], tmp_path)
    theirs, ours = found["words"]
    assert torch.equal(theirs, ours)
    for dtype in DTYPES:
        for shape in SHAPES:
            for kind in KINDS:
                x, weight, bias = inputs_of(shape, kind, dtype)
                numbers = unpacked(weight.values).double().unflatten(1, (weight.scales.shape[1], -1))
                numbers = numbers if weight.zeros is None else numbers - weight.zeros.double()[..., None]
                whole = (numbers * weight.scales.double()[..., None]).flatten(1)
                assert_near(found["matmuls"][f"{dtype} {shape} {kind}"], x.double() @ whole.T + bias.double(),
                            matmul(x, weight, bias))


@pytest.mark.full("every format, captured steps and the graph engine; one format stays, captured in test_nz.py")
def test_more_formats_and_the_graph_engine(checkpoint: Any, tmp_path: Path) -> None:
    assert_logits(checkpoint("qwen3", **SIZES), FORMATS, MODES[:1], tmp_path)
    assert_logits(checkpoint("qwen3", **SIZES), ("awq",), MODES[1:], tmp_path)
    assert_logits(checkpoint("qwen3", **SIZES), ("awq", "gptq-int8", "w8a16"), GRAPH_ENGINE, tmp_path)


@pytest.mark.full("two and four ranks start; ranks of linears are compared in tests/oracle/test_grouped_linears.py")
def test_ranks_are_as_near_as_one(checkpoint: Any, tmp_path: Path) -> None:
    """With biases. Of four ranks down_proj has 128 inputs, two groups; o_proj has 64, which are dequantised."""
    quantise(checkpoint("qwen2", **SIZES), tmp_path / "gptq", "gptq", group_size=64)
    settings = {"graph_mode": "eager", **SMALL, "dtype": "bfloat16"}
    whole = Case(str(tmp_path / "gptq"), settings, "texts", 4, max_tokens=2, logprobs=20)
    exact = on_cpu(dataclasses.replace(whole, settings={**settings, "dtype": "float32"}))["logprobs"]
    cases = [dataclasses.replace(whole, settings={**settings, "tensor_parallel_size": size}) for size in (1, 2, 4)]
    one, *several = (distance(found["logprobs"], exact) for found in on_npu(cases, tmp_path, num_devices=4))
    assert 0 < max(several) <= LIMIT * one, (one, several)
