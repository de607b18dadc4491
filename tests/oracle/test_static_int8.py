"""int8 with inputs of one scale, as compressed-tensors stores it, and behind a norm that rounds: by the definition in
float64. ModelSlim's are in test_int8_linears.py.

N outputs, K inputs, T tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.formats.rounding import RoundingReader
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.weights_reader import BY_ROW, Int8Inputs
from npu_runner.errors import WeightsError
from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from npu_runner.layers.norm import Float32RMSNorm, RMSNorm
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.quantised import QuantisedOps, StaticRows
from scripts.quantised.formats import Range, compressed_static, modelslim_static
from tests.oracle.int8_linears import BF16, NAMES, TOKENS, compressed, context, folder, parts, static_folder
from tests.oracle.int8_reference import static_product
from tests.oracle.quantised_folders import loaded, weights, write_folder

STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
SIZES = dict(zip(NAMES, (96, 32, 48), strict=True))
INPUTS = Range(-9.0, 8.0)
SCALE = 9.0 / 127


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def single(name: str = "q_proj", size: int = 96) -> list[OutputPart]:
    return [OutputPart(name, size, 0, size)]


def column(path: Path, size: int = 96, **of_context: Any) -> ColumnParallelLinear:
    found: ColumnParallelLinear = loaded(path, lambda: ColumnParallelLinear(160, single(size=size), bias=False,
                                                                            context=context(**of_context)))
    return found


@pytest.mark.parametrize("inputs", [STATIC, {**STATIC, "strategy": None}, {**STATIC, "dynamic": None}])
def test_one_scale_of_inputs_is_held_and_multiplied(inputs: dict[str, Any], tmp_path: Path) -> None:
    """With a bias, by channel; fused parts share the scale."""
    bias = {name: torch.randn(size) for name, size in SIZES.items()}
    made = {name: compressed_static(weights(size, seed=size), INPUTS, bias[name]) for name, size in SIZES.items()}
    path = folder(tmp_path, made, inputs)
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts(list(SIZES.values())), bias=True, context=context()))
    assert linear.weight.dtype == torch.int8
    for name, found in zip(NAMES, linear(TOKENS).split(list(SIZES.values()), dim=-1), strict=True):
        scale_N = made[name]["weight_scale"][:, 0]
        expected = static_product(TOKENS, made[name]["weight"], scale_N, bias[name], SCALE, 0)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.51 * SCALE * float(scale_N.max()))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float32])
def test_a_zero_point_and_scales_by_tensor_in_16_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    made = compressed_static(weights(96), INPUTS)
    made |= {"weight_scale": torch.tensor([0.013], dtype=BF16), "input_scale": made["input_scale"].to(BF16),
             "input_zero_point": torch.tensor([-17], dtype=dtype)}
    named = {f"q_proj.{suffix}": tensor for suffix, tensor in made.items()}
    settings = compressed({**STATIC, "symmetric": False}, strategy="tensor")
    linear = column(write_folder(tmp_path, named, config=settings))
    scale_N = made["weight_scale"].float().expand(96)
    expected = static_product(TOKENS, made["weight"], scale_N, None, made["input_scale"].item(), -17)
    torch.testing.assert_close(linear(TOKENS).double(), expected, rtol=1e-5, atol=1e-4)


def test_ranks_add_the_bias_once(tmp_path: Path) -> None:
    bias = torch.randn(96)
    made = compressed_static(weights(96), INPUTS, bias)
    path, found = folder(tmp_path, {"q_proj": made}, STATIC), torch.zeros(5, 96).double()
    for rank in range(2):
        linear = loaded(path, lambda: RowParallelLinear(
            "q_proj", 160, 96, bias=True, context=context(rank, 2)))  # noqa: B023
        found += linear(TOKENS[:, 80 * rank: 80 * rank + 80]).double()
    scale_N = made["weight_scale"][:, 0]
    expected = static_product(TOKENS, made["weight"], scale_N, bias, SCALE, 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.51 * SCALE * float(scale_N.max()))


def test_parts_of_other_scales_are_dequantised(tmp_path: Path) -> None:
    made = {name: compressed_static(weights(size), Range(-3.0, 1.0 if name == "q_proj" else 4.0))
            for name, size in SIZES.items()}
    path = folder(tmp_path, made, STATIC)
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts(list(SIZES.values())), bias=False, context=context()))
    assert linear.scales is None
    assert torch.equal(linear.weight[:96], made["q_proj"]["weight"].float() * made["q_proj"]["weight_scale"])


@pytest.mark.parametrize(("change", "words"), [
    ({"input_scale": None}, r"missing: q_proj.input_scale \[1\]"),
    ({"input_scale": torch.tensor([1])}, "of another type: q_proj.input_scale holds I64"),
    ({"input_scale": torch.ones(96)}, r"misshapen: q_proj.input_scale is \[96\]"),
    ({"input_scale": torch.tensor([0.0])}, "q_proj.input_scale is 0.0 and its offset 0.0; a scale of inputs is above"),
    ({"input_scale": torch.tensor([torch.nan])}, "q_proj.input_scale is nan"),
    ({"input_zero_point": torch.tensor([0.5])}, "q_proj.input_zero_point 0.5"),
    ({"input_zero_point": torch.tensor([300])}, "of another type: q_proj.input_zero_point holds I64"),
    ({"input_zero_point": torch.tensor([300], dtype=torch.int32)}, "a whole number of at most 256"),
    ({"input_zero_point": torch.zeros(2, dtype=torch.int8)}, "misshapen: q_proj.input_zero_point"),
])
def test_scales_that_are_none_are_named(change: dict[str, Tensor | None], words: str, tmp_path: Path) -> None:
    made = {name: tensor for name, tensor in {**compressed_static(weights(96), INPUTS), **change}.items()
            if tensor is not None}
    path = folder(tmp_path, {"q_proj": made}, STATIC)
    with pytest.raises(WeightsError, match=words):
        open_weights(path, read_quantization(path))


def test_a_scale_that_float16_does_not_hold_is_named(tmp_path: Path) -> None:
    for scale in (1e-6, 1e9):
        made = {**compressed_static(weights(96), INPUTS), "input_scale": torch.tensor([scale])}
        path = folder(tmp_path / str(scale), {"q_proj": made}, STATIC)
        with pytest.raises(WeightsError, match=r"inputs beside q_proj.weight is .*float16 does not hold its recip"):
            column(path, dtype=torch.float16)
        assert column(path, dtype=BF16).scales is not None


def test_quantization_int8_means_inputs_by_row_of_such_weights_too(tmp_path: Path) -> None:
    """As its name says in a manifest; the values stay as they are stored."""
    made = compressed_static(weights(96), INPUTS)
    static = static_folder(tmp_path / "modelslim", {"q_proj": modelslim_static(weights(96), 0.07, -11)})
    for path in (folder(tmp_path / "compressed", {"q_proj": made}, STATIC), static):
        with open_weights(path, read_quantization(path)) as stored:
            assert stored.int8_inputs("q_proj.weight") != BY_ROW
            reader = RoundingReader(stored, {"q_proj.weight"})
            assert reader.int8_inputs("q_proj.weight") == BY_ROW
            ((_, values, scales),) = reader.row_pieces("q_proj.weight")
        assert torch.equal(values, made["weight"])
        torch.testing.assert_close(scales, made["weight_scale"][:, 0])


# -- behind a norm -----------------------------------------------------------------------------------------------------


class Fusing(QuantisedOps):
    fuses_rounding = True


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
@pytest.mark.parametrize("inputs", [Int8Inputs(0.0731, -11.0), Int8Inputs(0.0123, 0.0)])
def test_a_norm_rounds_by_a_scale_of_its_own_and_the_product_gives_back(dtype: torch.dtype, inputs: Int8Inputs,
                                                                        tmp_path: Path) -> None:
    """The same linear takes both: rows of such a norm, and inputs that it rounds itself."""
    assert inputs.scale is not None
    made = modelslim_static(weights(96), inputs.scale, int(inputs.offset), torch.randn(96))
    path = static_folder(tmp_path, {"q_proj": made})
    norm = RMSNorm(160, 1e-6, context(dtype=dtype))
    norm.quantised = Fusing(CpuOps())
    norm.weight.copy_(1 + 0.1 * torch.randn(160))

    def build() -> ColumnParallelLinear:
        linear = ColumnParallelLinear(160, single(), bias=True, context=context(dtype=dtype))
        loading = linear.weights_are_loaded

        def as_a_layer_does() -> None:
            norm.feed(linear)
            loading()

        linear.weights_are_loaded = as_a_layer_does  # type: ignore[method-assign]
        return linear

    linear = loaded(path, build)
    x, residual = TOKENS.to(dtype), torch.randn(5, 160).to(dtype)
    rows, total = norm.add_forward(x, residual)
    assert isinstance(rows, StaticRows)
    assert torch.equal(total, x + residual)
    scale = float(norm._rounding.scales_D[0]) if norm._rounding is not None else 0.0
    assert (scale == inputs.scale) is False or dtype == torch.float16
    normed = norm(total)
    weight_N = made["deq_scale"].double() / torch.tensor(inputs.scale).double()
    for found, given, step in ((linear(rows), normed, scale), (linear(x), x, 1 / float(linear.input_scale))):
        expected = static_product(given, made["weight"], weight_N, made["bias"], step, inputs.offset)
        unit = float(made["deq_scale"].max())
        torch.testing.assert_close(found.double(), expected, rtol=2**-8 if dtype == BF16 else 2**-10, atol=unit)


def test_a_norm_with_float32_weights_or_other_readers_does_not_round(tmp_path: Path) -> None:
    linear = column(static_folder(tmp_path, {"q_proj": modelslim_static(weights(96), 0.07, -11)}), dtype=BF16)
    for norm, reader in ((Float32RMSNorm(160, 1e-6, context(dtype=BF16)), linear),
                         (RMSNorm(160, 1e-6, context(dtype=BF16)), None)):
        norm.quantised = Fusing(CpuOps())
        norm.weight.fill_(1.0)
        norm.feed(reader)
        assert linear.behind_norm is None
        assert isinstance(norm.add_forward(TOKENS.to(BF16), TOKENS.to(BF16))[0], Tensor)
