"""Linears that hold FP8 as a checkpoint stores it: by row, by tensor, by block; slices, ranks, fused parts, and what is
dequantised. The product is the definition in plain torch here, against float64; kernels are compared in tests/cuda.

N outputs, K inputs, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import arithmetic, read_quantization
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, Padding, RowParallelLinear
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, INT8, Fp8Weight, QuantisedOps, fp8_rows
from scripts.quantised.formats import compressed_int, fp8_block
from scripts.quantised.formats import fp8_rows as stored_rows
from tests.oracle.fp8_reference import fp8_product, multiplied_out, nearest_fp8, rounded_fp8
from tests.oracle.int8_linears import Parts
from tests.oracle.quantised_folders import in_small_pieces, loaded, write_folder

NAMES = ("q_proj", "k_proj", "v_proj")
NUM_INPUTS = 1024
TOKENS = torch.randn(5, NUM_INPUTS, generator=torch.Generator().manual_seed(9)) * 3
BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
BY_TENSOR = {"quant_method": "fp8"}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def by_row(inputs: dict[str, Any] | None = DYNAMIC, strategy: str = "channel") -> dict[str, Any]:
    group = {"targets": ["Linear"], "input_activations": inputs, "format": "float-quantized",
             "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}


def context(rank: int = 0, size: int = 1) -> LayerContext:
    return LayerContext(CpuOps(), None, Parts(rank, size), torch.float32, torch.device("cpu"),  # type: ignore[arg-type]
                        weight_forms=(INT8, FP8, FP8_BLOCKS), quantised=QuantisedOps(CpuOps()))


def weights(size: int, num_inputs: int = NUM_INPUTS) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, num_inputs, generator=generator) * torch.rand(size, 1, generator=generator)


def folder(path: Path, config: dict[str, Any], tensors: dict[str, dict[str, Tensor]]) -> Path:
    named = {f"{name}.{suffix}": tensor for name, parts in tensors.items() for suffix, tensor in parts.items()}
    return write_folder(path, named, config=config)


def parts(*sizes: int) -> list[OutputPart]:
    return [OutputPart(name, size, 0, size) for name, size in zip(NAMES, sizes, strict=False)]


def bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)


def assert_computes(linear: Any, x_TK: Tensor, values: Tensor, scales: Tensor, bias: Tensor | None) -> None:
    expected = fp8_product(x_TK, values, scales, bias)
    found = linear(x_TK).double()
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_the_definition_rounds_to_the_nearest_number_of_the_format() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    numbers = numbers[numbers.isfinite()]
    assert torch.equal(nearest_fp8(numbers), numbers)
    x_TK = torch.randn(64, 512) * torch.logspace(-6, 3, 64)[:, None]
    x_TK[7] = 0
    for in_blocks in (False, True):
        rows = fp8_rows(x_TK, in_blocks=in_blocks)
        scales = rows.scales if in_blocks else rows.scales[:, None]
        found = rows.values_TI.double() * scales.double().repeat_interleave(512 // scales.shape[1], 1)
        exact = rounded_fp8(x_TK, 128 if in_blocks else 512)
        step = scales.double().repeat_interleave(512 // scales.shape[1], 1) * 32
        assert bool(((found - exact).abs() <= step).all())
        assert float(((found - exact).abs() > 1e-6 * step).double().mean()) < 1e-3  # ties of a scale in float32


@pytest.mark.parametrize("kind", ["row", "tensor", "block"])
def test_fused_parts_are_one_product_of_stored_rows(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)
    sizes = (256, 128, 384)
    make = {"row": lambda w: stored_rows(w, by_tensor=False), "tensor": lambda w: stored_rows(w, by_tensor=True),
            "block": fp8_block}[kind]
    stored = [make(weights(size)) for size in sizes]
    bias = [torch.randn(size) for size in sizes]
    config = {"row": by_row(), "tensor": BY_TENSOR, "block": BY_BLOCK}[kind]
    path = folder(tmp_path, config, {name: {**each, "bias": b} for name, each, b in zip(NAMES, stored, bias,
                                                                                        strict=True)})
    linear = loaded(path, lambda: ColumnParallelLinear(NUM_INPUTS, parts(*sizes), bias=True, context=context()))
    assert linear.form == (FP8_BLOCKS if kind == "block" else FP8)
    values = torch.cat([each["weight"] for each in stored])
    assert torch.equal(bits(linear.weight), bits(values))
    if kind == "block":
        scales = torch.cat([each["weight_scale_inv"] for each in stored])
    else:
        scales = torch.cat([each["weight_scale"].flatten().expand(size) for each, size in zip(stored, sizes,
                                                                                              strict=True)])
    assert torch.equal(linear.scales, scales)
    assert_computes(linear, TOKENS, values, scales, torch.cat(bias))


@pytest.mark.parametrize("kind", ["row", "block"])
def test_ranks_cut_rows_and_columns_with_their_scales(kind: str, tmp_path: Path) -> None:
    stored = fp8_block(weights(512)) if kind == "block" else stored_rows(weights(512), by_tensor=False)
    values, scales = stored["weight"], stored["weight_scale_inv" if kind == "block" else "weight_scale"]
    bias, half = torch.randn(512), NUM_INPUTS // 2
    path = folder(tmp_path, BY_BLOCK if kind == "block" else by_row(), {"q_proj": {**stored, "bias": bias}})
    found, expected = torch.zeros(5, 512).double(), bias.double().expand(5, 512).clone()
    for rank in range(2):
        column = loaded(path, lambda: ColumnParallelLinear(
            NUM_INPUTS, [OutputPart("q_proj", 512, 256 * rank, 256)], bias=True, context=context(rank, 2)))  # noqa: B023
        assert torch.equal(bits(column.weight), bits(values[256 * rank:256 * rank + 256]))
        own = scales[2 * rank:2 * rank + 2] if kind == "block" else scales[256 * rank:256 * rank + 256, 0]
        assert torch.equal(column.scales, own)
        row = loaded(path, lambda: RowParallelLinear(
            "q_proj", NUM_INPUTS, 512, bias=True, context=context(rank, 2)))  # noqa: B023
        columns = slice(half * rank, half * rank + half)
        assert torch.equal(bits(row.weight), bits(values[:, columns]))
        own = scales[:, 4 * rank:4 * rank + 4] if kind == "block" else scales[:, 0]
        assert torch.equal(row.scales, own)
        found += row(TOKENS[:, columns]).double()
        expected += fp8_product(TOKENS[:, columns], values[:, columns], own, None)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_a_product_of_two_kinds_is_two_products(tmp_path: Path) -> None:
    stored, floats = fp8_block(weights(256)), weights(96)
    path = folder(tmp_path, BY_BLOCK, {"q_proj": stored, "k_proj": {"weight": floats}})
    linear = loaded(path, lambda: ColumnParallelLinear(NUM_INPUTS, parts(256, 96), bias=False, context=context()))
    assert (linear.form, linear.rest.shape) == (FP8_BLOCKS, (96, NUM_INPUTS))
    expected = torch.cat((fp8_product(TOKENS, stored["weight"], stored["weight_scale_inv"], None),
                          TOKENS.double() @ floats.double().T), dim=1)
    assert float((linear(TOKENS).double() - expected).abs().max()) < 1e-5 * float(expected.abs().max())


DEQUANTISED: dict[str, tuple[dict[str, Any], Callable[[Tensor], Any], int, int, Padding]] = {
    "other blocks": ({**BY_BLOCK, "weight_block_size": [64, 64]}, lambda w: fp8_block(w, (64, 64)), 256, 1024,
                     Padding()),
    "rows that cut a block": (BY_BLOCK, fp8_block, 192, 1024, Padding()),
    "inputs of three blocks": (BY_BLOCK, fp8_block, 256, 384, Padding()),
    "padding": (BY_BLOCK, fp8_block, 256, 1024, Padding(run=128, width=256)),
    "inputs in 16 bits": (by_row(None), lambda w: stored_rows(w, by_tensor=False), 256, 1024, Padding()),
    "rows that no 16 divides": (by_row(), lambda w: stored_rows(w, by_tensor=False), 200, 1024, Padding()),
}


@pytest.mark.parametrize("case", DEQUANTISED)
def test_what_has_no_product_is_dequantised(case: str, tmp_path: Path) -> None:
    config, make, num_outputs, num_inputs, padding = DEQUANTISED[case]
    stored = make(weights(num_outputs, num_inputs))
    path = folder(tmp_path, config, {"q_proj": stored})
    linear = loaded(path, lambda: ColumnParallelLinear(num_inputs, parts(num_outputs), bias=False, context=context(),
                                                       padding=padding))
    assert (linear.form, linear.scales) == (None, None)
    assert linear.weight.dtype == torch.float32
    if case == "inputs in 16 bits":
        assert torch.equal(linear.weight.double(), multiplied_out(
            stored["weight"], stored["weight_scale"][:, 0]).float().double())


def test_blocks_whose_rows_are_moved_later_are_dequantised(tmp_path: Path) -> None:
    path = folder(tmp_path, BY_BLOCK, {"q_proj": fp8_block(weights(256))})

    def make() -> nn.Module:
        linear = ColumnParallelLinear(NUM_INPUTS, parts(256), bias=False, context=context())
        linear.splits = False
        return linear

    assert loaded(path, make).form is None


def test_parts_of_int8_and_of_fp8_are_dequantised(tmp_path: Path) -> None:
    config = by_row()
    int8 = {"targets": ["re:k_proj"], "format": "int-quantized", "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"},
        "input_activations": {**DYNAMIC, "type": "int"}}
    config["config_groups"]["group_0"]["targets"] = ["re:q_proj"]
    config["config_groups"]["group_1"] = int8
    path = folder(tmp_path, config, {"q_proj": stored_rows(weights(256), by_tensor=False),
                                     "k_proj": compressed_int(weights(128))})
    linear = loaded(path, lambda: ColumnParallelLinear(NUM_INPUTS, parts(256, 128), bias=False, context=context()))
    assert linear.form is None


def test_the_definition_in_16_bits_is_one_rounding_from_float64() -> None:
    stored = fp8_block(weights(256))
    x_TK = TOKENS.bfloat16()
    found = QuantisedOps(CpuOps()).linear(x_TK, Fp8Weight(stored["weight"], stored["weight_scale_inv"]), None)
    expected = fp8_product(x_TK, stored["weight"], stored["weight_scale_inv"], None)
    assert found.dtype == torch.bfloat16
    assert float((found.double() - expected).abs().max()) < 2.0**-8 * float(expected.abs().max())


def test_what_is_said_of_the_arithmetic(tmp_path: Path) -> None:
    path = folder(tmp_path, BY_BLOCK, {"q_proj": fp8_block(weights(256)), "k_proj": fp8_block(weights(128))})
    found = read_quantization(path)
    assert arithmetic(found, "auto", (INT8,)) == "fp8, dequantised at load, inputs not quantised"
    assert arithmetic(found, "auto", (INT8, FP8, FP8_BLOCKS)) == (
        "fp8, fp8 with 8-bit inputs multiplied as fp8, inputs rounded by row or by groups of 128; other weights "
        "dequantised at load, inputs not quantised")
    with open_weights(path, found) as reader:
        said = reader.describe(torch.bfloat16, {"q_proj.weight"})  # type: ignore[attr-defined]
    assert said.startswith("quantised weights (fp8): 2 as fp8 by block of 128 x 128; 1 are multiplied as FP8, with "
                           "inputs that are rounded to FP8 in groups of 128; the other 1 become ")
