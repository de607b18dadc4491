"""int8 matmuls on the npu platform: no further from float64 than twice what the same formula in plain torch is.

One reference for all: inputs rounded by row, in float64 (tests/oracle/int8_reference.py). Plain torch computes the same
in the platform's 16 bits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.formats.rounding import RoundingReader
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import INT8, Int8Weight, NormRounding, QuantisedOps, StaticInt8Weight
from scripts.quantised.writing import quantise
from tests.npu.int8_cases import DENSE, GRAPH_ENGINE, LIMIT, MODES, assert_near, case, distance, logits, run
from tests.npu.programs.generate import Case
from tests.npu.programs.int8 import DTYPES, EPS, SHAPES, inputs_of, picture
from tests.npu.running import SMALL, on_cpu, on_npu
from tests.oracle.int8_reference import rounded_product
from tests.oracle.quantised_folders import one_range
from tests.oracle.reference import model_inputs
from tests.oracle.rounded_models import rounded_models

pytestmark = [pytest.mark.npu, pytest.mark.slow]
PLAIN = QuantisedOps(CpuOps())


def static_product(given: dict[str, Tensor], x: Tensor, step: float) -> Tensor:
    """(clamp(round(x / step + offset)) W^T + shifts) * scales, in float64."""
    q = (x.double() / step + given["offset"].double()).round().clamp(-128, 127)
    return (q @ given["values"].double().T + given["shifts"].double()) * given["scales"].double()


@pytest.fixture(scope="module")
def w8a8(checkpoint: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("int8") / "w8a8"
    quantise(checkpoint("qwen3", **DENSE), path, "w8a8")
    return path


def assert_logits(checkpoint: Path, quantised: Path, modes: list[dict[str, Any]], folder: Path, **settings: Any
                  ) -> dict[str, Any]:
    found = run([case(quantised, **mode, **settings) for mode in modes], folder)
    with open_weights(quantised, read_quantization(quantised)) as stored:
        names = {name for name in stored.names if "_proj" in name}
        reader = RoundingReader(stored, names) if settings.get("quantization") == "int8" else stored
        exact, plain = rounded_models(checkpoint, reader, getattr(torch, settings.get("dtype", "bfloat16")))
    for tokens, ours in found["logits"]:
        assert_near(ours, logits(exact, tokens), logits(plain, tokens))
    return found


def test_matmuls_and_logits_are_as_near_as_plain_torch(checkpoint: Any, w8a8: Path, tmp_path: Path) -> None:
    found = assert_logits(checkpoint("qwen3", **DENSE), w8a8, MODES[1:], tmp_path)
    assert set(found["said"]) == {
        "compressed-tensors, int8 with dynamic inputs multiplied as int8; other weights dequantised at load, inputs "
        "not quantised"}
    for dtype in DTYPES:
        for shape in SHAPES:
            given, ours = inputs_of(shape, dtype), found["linears"][f"{dtype} {shape}"]
            weight = Int8Weight(given["values"], given["scales"])
            exact = rounded_product(given["x"], *weight, given["bias"])
            assert_near(ours["matmul"], exact, PLAIN.linear(given["x"], weight, given["bias"]))
            static = StaticInt8Weight(*(given[name] for name in ("values", "shifts", "scales", "r", "offset")))
            exact = static_product(given, given["x"], 1 / float(given["r"]))
            assert_near(ours["static"], exact, PLAIN.linear(given["x"], static, None))
            assert torch.equal(ours["total"], given["x"] + given["residual"])
            total = (given["x"] + given["residual"]).double()
            normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * given["gamma"].double()
            rounding = NormRounding(given["norm_scales"], given["norm_offsets"])
            plain = PLAIN.add_rms_norm(given["x"], given["residual"], given["gamma"], EPS, rounding)[0]
            exact = static_product(given, normed, float(given["norm_scales"][0]))
            assert_near(ours["static behind a norm"], exact, PLAIN.linear(plain, static, None))
            plain = PLAIN.add_rms_norm(given["x"], given["residual"], given["gamma"], EPS, INT8)[0]
            assert_near(ours["behind a norm"], rounded_product(normed, *weight, None),
                        PLAIN.linear(plain, weight, None))


@pytest.mark.full("two formats of static inputs through a model; their matmuls by themselves stay above")
def test_static_inputs_are_as_near_as_plain_torch(checkpoint: Any, tmp_path: Path) -> None:
    """With biases; in bfloat16 as compressed-tensors stores it, in float16 as ModelSlim does."""
    plain = checkpoint("qwen2", **DENSE)
    for name, dtype in (("w8a8-static", "bfloat16"), ("modelslim-w8a8", "float16")):
        quantise(plain, tmp_path / name, name, ranges=one_range(plain))
        found = assert_logits(plain, tmp_path / name, MODES[:1], tmp_path, dtype=dtype)
        assert all("static inputs multiplied as int8" in said for said in found["said"])


@pytest.mark.full("every mode and dtype of both formats; matmuls by themselves stay, and dynamic inputs captured")
def test_static_inputs_in_more_modes(checkpoint: Any, tmp_path: Path) -> None:
    plain = checkpoint("qwen2", **DENSE)
    for name in ("w8a8-static", "modelslim-w8a8"):
        quantise(plain, tmp_path / name, name, ranges=one_range(plain))
        for dtype in DTYPES:
            assert_logits(plain, tmp_path / name, MODES, tmp_path, dtype=dtype)
            assert_logits(plain, tmp_path / name, GRAPH_ENGINE, tmp_path, dtype=dtype)


@pytest.mark.full("eager steps, int8 made while loading, the graph engine, ModelSlim; one checkpoint captured stays")
def test_more_modes_and_checkpoints(checkpoint: Any, w8a8: Path, tmp_path: Path) -> None:
    plain = checkpoint("qwen3", **DENSE)
    assert_logits(plain, w8a8, MODES[:1], tmp_path)
    assert_logits(plain, plain, MODES, tmp_path, quantization="int8")
    quantise(plain, tmp_path / "modelslim", "modelslim-w8a8-dynamic")
    assert_logits(plain, tmp_path / "modelslim", GRAPH_ENGINE, tmp_path)
    quantise(plain, tmp_path / "fp8", "fp8-block", group_size=16)
    found = run([case(tmp_path / "fp8", quantization="int8", graph_mode="eager")], tmp_path)
    assert found["said"] == ["fp8, made int8 by row at load, multiplied as int8, inputs rounded by row"]


@pytest.mark.full("two more models start; a dense one stays")
@pytest.mark.parametrize("graph_mode", ["eager", "reduce-overhead"])
def test_layers_with_a_state(graph_mode: str, checkpoint: Any, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_5_text")
    quantise(plain, tmp_path / "w8a8", "w8a8")
    assert_logits(plain, tmp_path / "w8a8", [mode for mode in MODES if mode["graph_mode"] == graph_mode], tmp_path)


@pytest.mark.full("a tower in two forms; a dense model stays")
@pytest.mark.parametrize("name", ["w8a8", "w8a8-static"])
def test_a_tower(name: str, checkpoint: Any, tmp_path: Path) -> None:
    plain = checkpoint("qwen3_vl", vision={"hidden_size": 64, "intermediate_size": 128})
    quantise(plain, tmp_path / "w8a8", name, with_tower=True, ranges=one_range(plain))
    found = run([case(tmp_path / "w8a8", prompt=None, graph_mode="eager")], tmp_path)
    with open_weights(tmp_path / "w8a8", read_quantization(tmp_path / "w8a8")) as stored:
        exact, rounded = rounded_models(plain, stored)
    (tokens, ours), prompt = found["logits"][0], found["prompts"][0]
    images = model_inputs(plain, prompt + tokens[:-1], [picture()])
    assert_near(ours, logits(exact, tokens, prompt, **images), logits(rounded, tokens, prompt, **images))


@pytest.mark.full("two and four ranks start; ranks of linears are compared in tests/oracle/test_int8_linears.py")
@pytest.mark.parametrize("name", ["w8a8", "w8a8-static"])
def test_ranks_are_as_near_to_inputs_that_are_not_rounded_as_one_is(name: str, checkpoint: Any, tmp_path: Path) -> None:
    """With biases. Each rank rounds its own inputs of a row-parallel matmul: ranks differ by that rounding alone."""
    sizes = {**DENSE, "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 256}
    plain = checkpoint("qwen2", **sizes)
    quantise(plain, tmp_path / "w8a8", name, ranges=one_range(plain))
    settings = {"graph_mode": "eager", **SMALL, "dtype": "bfloat16"}
    whole = Case(str(tmp_path / "w8a8"), settings, "texts", 4, max_tokens=2, logprobs=20)
    exact = on_cpu(dataclasses.replace(whole, settings={**settings, "dtype": "float32"}))["logprobs"]
    cases = [dataclasses.replace(whole, settings={**settings, "tensor_parallel_size": size}) for size in (1, 2, 4)]
    one, *several = (distance(found["logprobs"], exact) for found in on_npu(cases, tmp_path, num_devices=4))
    assert 0 < max(several) <= LIMIT * one, (one, several)


def test_a_linear_that_is_too_wide_for_matmuls_of_int8_is_dequantised(checkpoint: Any, tmp_path: Path) -> None:
    """Gate and up together have 65,792 outputs, and CANN's matmul takes 65,535."""
    sizes = {**DENSE, "intermediate_size": 32896, "hidden_size": 64}
    quantise(checkpoint("qwen3", **sizes), tmp_path / "w8a8", "w8a8")
    settings = {"graph_mode": "eager", **SMALL, "dtype": "bfloat16"}
    wide = Case(str(tmp_path / "w8a8"), settings, "texts", 2, max_tokens=2, logprobs=20)
    (found,) = on_npu([wide], tmp_path)
    exact = on_cpu(dataclasses.replace(wide, settings={**settings, "dtype": "float32"}))
    assert 0 < distance(found["logprobs"], exact["logprobs"]) < 0.5
