"""Linears that hold int8 as a checkpoint stores it: rows, slices, ranks, fused parts; and `quantization` int8, which
makes it. The product is the definition in plain torch here; what platforms make of it is compared with the same
reference (tests/npu/test_int8.py).

N outputs, K inputs, T tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.formats.rounding import RoundingReader
from npu_runner.checkpoint.quantization import Quantization, arithmetic, read_quantization
from npu_runner.checkpoint.weights_reader import BY_ROW, WeightsReader
from npu_runner.errors import ConfigError, WeightsError
from npu_runner.layers.linear import ColumnParallelLinear, HeldLinear, OutputPart, Padding, RowParallelLinear
from npu_runner.layers.weight_forms import hold_as_stored
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.quantised import INT8, INT8_STATIC
from scripts.quantised.formats import compressed_int, fp8_block, modelslim_int8, modelslim_static
from scripts.quantised.writing import quantise
from tests.oracle.family_prompts import prompts_of
from tests.oracle.int8_linears import BF16, DYNAMIC, NAMES, TOKENS, context, folder, parts, static_folder
from tests.oracle.int8_reference import rounded_product
from tests.oracle.quantised_folders import in_small_pieces, loaded, weights, write_folder
from tests.oracle.running import SMALL, greedy, runner_of


def test_fused_parts_are_one_product_of_stored_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)
    stored = {name: compressed_int(weights(size, seed=size)) for name, size in zip(NAMES, (96, 32, 48), strict=True)}
    bias = {name: torch.randn(size) for name, size in zip(NAMES, (96, 32, 48), strict=True)}
    path = folder(tmp_path, {name: {**stored[name], "bias": bias[name]} for name in NAMES})
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts((96, 32, 48)), bias=True, context=context()))
    assert torch.equal(linear.weight, torch.cat([stored[name]["weight"] for name in NAMES]))
    assert torch.equal(linear.scales, torch.cat([stored[name]["weight_scale"][:, 0] for name in NAMES]))
    assert linear.bias.dtype == torch.float32
    assert sum(parameter.nbytes for parameter in linear.parameters()) == 176 * (160 + 4 + 4)
    expected = torch.cat([rounded_product(TOKENS, stored[name]["weight"], stored[name]["weight_scale"][:, 0],
                                          bias[name]) for name in NAMES], dim=-1)
    torch.testing.assert_close(linear(TOKENS).double(), expected, rtol=1e-5, atol=1e-5)


def test_ranks_cut_rows_with_their_scales_and_columns_without(tmp_path: Path) -> None:
    stored, bias = compressed_int(weights(96)), torch.randn(96)
    path = folder(tmp_path, {"q_proj": {**stored, "bias": bias}})
    scale = stored["weight_scale"][:, 0]
    for rank in range(2):
        column = loaded(path, lambda: ColumnParallelLinear(
            160, [OutputPart("q_proj", 96, 48 * rank, 48)], bias=True, context=context(rank, 2)))  # noqa: B023
        rows = slice(48 * rank, 48 * rank + 48)
        assert torch.equal(column.weight, stored["weight"][rows])
        assert torch.equal(column.scales, scale[rows])
    summands = [loaded(path, lambda: RowParallelLinear(
        "q_proj", 160, 96, bias=True, context=context(rank, 2))) for rank in range(2)]  # noqa: B023
    found, expected = torch.zeros(5, 96).double(), bias.double().expand(5, 96).clone()
    for rank, linear in enumerate(summands):
        columns = slice(80 * rank, 80 * rank + 80)
        assert torch.equal(linear.weight, stored["weight"][:, columns])
        assert torch.equal(linear.scales, scale)
        found += linear(TOKENS[:, columns]).double()
        expected += rounded_product(TOKENS[:, columns], stored["weight"][:, columns], scale, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_room_for_padding_is_zeros(tmp_path: Path) -> None:
    stored = compressed_int(weights(96))
    path = folder(tmp_path, {"q_proj": stored})
    padding = Padding(run=12, width=16)
    linear = loaded(path, lambda: ColumnParallelLinear(160, [OutputPart("q_proj", 96, 0, 96)], bias=False,
                                                       context=context(), padding=padding))
    runs = linear.weight.unflatten(0, (8, 16)), linear.scales.unflatten(0, (8, 16))
    assert torch.equal(runs[0][:, :12].flatten(0, 1), stored["weight"])
    assert torch.equal(runs[1][:, :12].flatten(), stored["weight_scale"][:, 0])
    assert not runs[0][:, 12:].any()
    assert not runs[1][:, 12:].any()


@pytest.mark.parametrize("inputs", [None, {**DYNAMIC, "dynamic": False}, {**DYNAMIC, "strategy": "tensor"},
                                    {**DYNAMIC, "symmetric": False}, {**DYNAMIC, "num_bits": 4},
                                    {**DYNAMIC, "type": "float"}])
def test_inputs_of_another_kind_leave_weights_dequantised(inputs: dict[str, Any] | None, tmp_path: Path) -> None:
    stored = compressed_int(weights(96))
    path = folder(tmp_path, {"q_proj": stored}, inputs)
    linear = loaded(path, lambda: ColumnParallelLinear(160, [OutputPart("q_proj", 96, 0, 96)], bias=False,
                                                       context=context()))
    assert linear.scales is None
    assert torch.equal(linear.weight, stored["weight"].float() * stored["weight_scale"])


@pytest.mark.parametrize("floats", [("k_proj", "v_proj"), ("q_proj",)])
def test_a_product_of_two_kinds_is_two_products(floats: tuple[str, ...], tmp_path: Path) -> None:
    sizes = dict(zip(NAMES, (96, 32, 48), strict=True))
    bias = {name: torch.randn(size) for name, size in sizes.items()}
    made = {name: {"weight": weights(size, seed=size)} if name in floats else compressed_int(weights(size, seed=size))
            for name, size in sizes.items()}
    path = folder(tmp_path, {name: {**parts, "bias": bias[name]} for name, parts in made.items()})
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts(list(sizes.values())), bias=True, context=context()))
    assert linear.weight.dtype == torch.int8
    assert linear.rest.shape == (sum(sizes[name] for name in floats), 160)
    expected = torch.cat([
        TOKENS.double() @ made[name]["weight"].double().T + bias[name].double() if name in floats
        else rounded_product(TOKENS, made[name]["weight"], made[name]["weight_scale"][:, 0], bias[name])
        for name in NAMES], dim=-1)
    torch.testing.assert_close(linear(TOKENS).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_product_of_kinds_that_alternate_is_dequantised(tmp_path: Path) -> None:
    stored = {"q_proj": compressed_int(weights(96)), "k_proj": {"weight": weights(32)},
              "v_proj": compressed_int(weights(48))}
    path = folder(tmp_path, stored)
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts((96, 32, 48)), bias=False, context=context()))
    assert linear.scales is None
    torch.testing.assert_close(linear.weight[96:128], stored["k_proj"]["weight"])


def test_modelslims_dynamic_type_is_held_and_its_others_are_not(tmp_path: Path) -> None:
    for kind, is_held in (("W8A8_DYNAMIC", True), ("W8A16", False)):
        stored = modelslim_int8(weights(96))
        path = write_folder(tmp_path / kind, {f"q_proj.{name}": tensor for name, tensor in stored.items()},
                            description={"version": "1.0.0", **{f"q_proj.{name}": kind for name in stored}})
        linear = loaded(path, lambda: ColumnParallelLinear(160, [OutputPart("q_proj", 96, 0, 96)], bias=False,
                                                           context=context()))
        assert (linear.scales is not None) is is_held


# -- inputs of one scale -----------------------------------------------------------------------------------------------

STATIC = {"input_scale": 0.07, "input_offset": -11}


def static_product(x: Tensor, made: dict[str, Tensor], bias: Tensor | None, scale: float = 0.07, offset: int = -11
                   ) -> tuple[Tensor, float]:
    """(round(x / scale + offset) - offset) W^T * scale of the weight, and bias; the unit in which that is rounded."""
    q = (x.double() / scale + offset).round().clamp(-128, 127) - offset
    deq = made["deq_scale"].double()
    out = q @ made["weight"].double().T * deq
    return (out if bias is None else out + bias.double()), float(deq.max())


def test_inputs_of_one_scale_are_one_product_with_its_bias(tmp_path: Path) -> None:
    sizes = dict(zip(NAMES, (96, 32, 48), strict=True))
    bias = {name: torch.randn(size) for name, size in sizes.items()}
    made = {name: modelslim_static(weights(size, seed=size), **STATIC, bias_N=bias[name])
            for name, size in sizes.items()}
    path = static_folder(tmp_path, made)
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts(list(sizes.values())), bias=True, context=context()))
    assert linear.weight.dtype == torch.int8
    assert linear.bias is None
    for name, found in zip(NAMES, linear(TOKENS).split(list(sizes.values()), dim=-1), strict=True):
        expected, unit = static_product(TOKENS, made[name], bias[name])
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0.51 * unit)


def test_the_scale_of_inputs_may_round_and_the_product_stays(tmp_path: Path) -> None:
    """In bfloat16 1 / scale is off by up to 0.4 %: the products' scale makes up for it."""
    made = modelslim_static(weights(96), 0.0731, 5)
    path = static_folder(tmp_path, {"q_proj": made})
    linear = loaded(path, lambda: ColumnParallelLinear(160, [OutputPart("q_proj", 96, 0, 96)], bias=False,
                                                       context=context(dtype=BF16)))
    x = TOKENS.to(BF16)
    own = linear.input_scale.double().item()
    assert abs(own * 0.0731 - 1) > 1e-4, "this scale rounds"
    found = linear(x).double()
    q = (x.double() * own + 5).round().clamp(-128, 127) - 5
    expected = q @ made["weight"].double().T * (made["deq_scale"].double() / 0.0731 / own)
    torch.testing.assert_close(found, expected, rtol=2**-8, atol=float(made["deq_scale"].max()))


def test_one_rank_adds_the_bias_and_each_corrects_its_own_inputs(tmp_path: Path) -> None:
    bias = torch.randn(96)
    made = modelslim_static(weights(96), **STATIC, bias_N=bias)
    path = static_folder(tmp_path, {"q_proj": made})
    found = torch.zeros(5, 96).double()
    for rank in range(2):
        linear = loaded(path, lambda: RowParallelLinear(
            "q_proj", 160, 96, bias=True, context=context(rank, 2)))  # noqa: B023
        found += linear(TOKENS[:, 80 * rank: 80 * rank + 80]).double()
    expected, unit = static_product(TOKENS, made, bias)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.51 * unit)
    column = loaded(path, lambda: ColumnParallelLinear(160, [OutputPart("q_proj", 96, 48, 48)], bias=True,
                                                       context=context(1, 2)))
    torch.testing.assert_close(column(TOKENS).double(), expected[:, 48:], rtol=1e-5, atol=0.51 * unit)


def test_parts_whose_inputs_have_other_scales_are_dequantised(tmp_path: Path) -> None:
    made = {name: modelslim_static(weights(size), 0.05 if name == "q_proj" else 0.07, -11)
            for name, size in zip(NAMES, (96, 32, 48), strict=True)}
    path = static_folder(tmp_path, made)
    linear = loaded(path, lambda: ColumnParallelLinear(160, parts((96, 32, 48)), bias=False, context=context()))
    assert linear.scales is None


# -- made int8 ---------------------------------------------------------------------------------------------------------


def float_folder(path: Path, weight: Tensor) -> Path:
    return write_folder(path, {"q_proj.weight": weight})


def assert_rounds(reader: WeightsReader, weight: Tensor) -> None:
    """Equal to the definition in float64, whole and in slices; the rest is as it was."""
    scale = weight.double().abs().amax(1) / 127
    values = torch.where(scale[:, None] == 0, 0.0, weight.double() / scale[:, None])
    assert reader.int8_inputs("q_proj.weight") == BY_ROW
    for dim, start, length in ((None, 0, 0), (0, 7, 50), (1, 33, 64)):
        rows = slice(start, start + length) if dim == 0 else slice(None)
        columns = slice(start, start + length) if dim == 1 else slice(None)
        pieces = list(reader.row_pieces("q_proj.weight", dim, start, length))
        found, scales = (torch.cat([piece[index] for piece in pieces]) for index in (1, 2))
        assert found.dtype == torch.int8
        assert float((found.double() - values[rows, columns]).abs().max()) <= 0.5001
        torch.testing.assert_close(scales.double(), scale[rows], rtol=1e-6, atol=0)
        assert torch.equal(reader.read("q_proj.weight", dim, start, length), found.float() * scales[:, None])


def test_weights_of_16_bits_and_fp8_are_rounded_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)
    weight = weights(96).to(BF16)
    weight[3] = 0
    with open_weights(float_folder(tmp_path / "bf16", weight), None) as stored:
        assert_rounds(RoundingReader(stored, {"q_proj.weight"}), weight)
        assert torch.equal(RoundingReader(stored, set()).read("q_proj.weight"), weight)
    made = fp8_block(weights(96), (32, 32))
    path = write_folder(tmp_path / "fp8", {f"q_proj.{name}": tensor for name, tensor in made.items()},
                        config={"quant_method": "fp8", "weight_block_size": [32, 32]})
    with open_weights(path, read_quantization(path)) as stored:
        assert_rounds(RoundingReader(stored, {"q_proj.weight"}), stored.read("q_proj.weight"))


def test_stored_int8_stays_and_other_integers_are_refused(tmp_path: Path) -> None:
    stored = compressed_int(weights(96))
    path = folder(tmp_path / "dynamic", {"q_proj": stored})
    with open_weights(path, read_quantization(path)) as reader:
        ((_, values, _),) = RoundingReader(reader, {"q_proj.weight"}).row_pieces("q_proj.weight")
        assert torch.equal(values, stored["weight"])
    path = folder(tmp_path / "weights alone", {"q_proj": stored}, None)
    with open_weights(path, read_quantization(path)) as reader, pytest.raises(
            ConfigError, match=r"q_proj.weight is stored as int8 by row; leave it at auto"):
        RoundingReader(reader, {"q_proj.weight"})


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    weight = weights(96)
    weight[5, 7] = torch.nan
    with open_weights(float_folder(tmp_path, weight), None) as stored, pytest.raises(WeightsError, match="no numbers"):
        list(RoundingReader(stored, {"q_proj.weight"}).row_pieces("q_proj.weight"))


def test_the_cpu_computes_with_what_a_w8a8_checkpoint_holds(checkpoint: Any, tmp_path: Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    """The same linears, rounded alike: `quantization` int8 gives the tokens of the checkpoint that a tool rounded."""
    path = checkpoint("qwen3")
    quantise(path, tmp_path / "w8a8", "w8a8", group_size=8)
    outputs = []
    for model, settings in ((path, {"quantization": "int8"}), (tmp_path / "w8a8", {})):
        with caplog.at_level("INFO"), LLM(model, platform="cpu", **SMALL, **settings) as llm:
            outputs.append([output.token_ids for output in llm.generate(prompts_of(llm, "qwen3")[0], greedy())])
            described = llm.engine.describe()["quantization"]
        if settings:
            assert described == "made int8 by row at load, dequantised at load, inputs not quantised"
    assert outputs[0] == outputs[1]
    (line,) = [each for each in caplog.messages if each.startswith("quantization int8")]
    assert line == ("quantization int8: 21 weights are rounded to int8 by row while loading, and dequantised to "
                    "float32; inputs are not quantised")


@pytest.mark.parametrize("model_type", ["glm4v", "qwen3_next"])
def test_scales_go_where_a_family_moves_rows(model_type: str, checkpoint: Any, tmp_path: Path,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of pairs that turn, heads that are stored interleaved, a tower with padding, gates in 16 bits."""
    quantise(checkpoint(model_type), tmp_path / "w8a8", "w8a8", with_tower=True)
    found: list[dict[str, Tensor]] = []
    for forms in ((), (INT8,)):
        monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_, forms=forms: forms)
        with LLM(tmp_path / "w8a8", platform="cpu", **SMALL) as llm:
            linears = {name: module for name, module in runner_of(llm).model.named_modules()
                       if isinstance(module, HeldLinear)}
            assert any(linear.scales is not None for linear in linears.values()) is bool(forms)
            found.append({name: multiplied_out(linear).clone() for name, linear in linears.items()})
            assert llm.generate(prompts_of(llm, model_type)[0][:1], greedy(2))
    for name, weight in found[0].items():
        assert torch.equal(found[1][name], weight), name


def multiplied_out(linear: HeldLinear) -> Tensor:
    if linear.scales is None:
        return linear.weight
    weight = linear.weight.float() * linear.scales[:, None]
    return weight if linear.rest is None else torch.cat((weight, linear.rest))


def test_what_is_said_of_the_arithmetic(tmp_path: Path) -> None:
    path = folder(tmp_path, {"q_proj": compressed_int(weights(96))})
    found = read_quantization(path)
    assert arithmetic(None, "auto", (INT8,)) is None
    assert arithmetic(found, "auto", ()) == "compressed-tensors, dequantised at load, inputs not quantised"
    assert arithmetic(found, "auto", (INT8,)) == (
        "compressed-tensors, int8 with dynamic inputs multiplied as int8; other weights dequantised at load, inputs "
        "not quantised")
    assert arithmetic(Quantization(method="modelslim"), "auto", (INT8, INT8_STATIC)) == (
        "modelslim, int8 with dynamic and static inputs multiplied as int8; other weights dequantised at load, inputs "
        "not quantised")
    assert arithmetic(None, INT8, (INT8,)) == "made int8 by row at load, multiplied as int8, inputs rounded by row"
    with open_weights(path, found) as reader:
        assert hold_as_stored(nn.Module(), reader, {}) == set()
        assert reader.describe(BF16, {"q_proj.weight"}).endswith(  # type: ignore[attr-defined]
            "1 as int8 by row; 1 are multiplied as int8, with inputs that are rounded to int8")


@pytest.mark.parametrize("model_type", ["qwen3_vl", "glm4v"])
def test_quantization_int8_means_decoder_and_blocks_of_the_tower(model_type: str, checkpoint: Any,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """All but the merger and the last linear of a block's MLP."""
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: (INT8,))
    with LLM(checkpoint(model_type), platform="cpu", quantization="int8", **SMALL) as llm:
        linears = {name: module for name, module in runner_of(llm).model.named_modules()
                   if isinstance(module, HeldLinear)}
        assert llm.generate(prompts_of(llm, model_type)[0][:1], greedy(2))
    kinds = {".".join(name.split(".")[-2:]): linear.form for name, linear in linears.items()
             if ".visual.blocks." in name}
    assert {kind for kind, form in kinds.items() if form is None} <= {"mlp.second", "mlp.down_proj"}
    assert {kinds["attn.qkv"], kinds["attn.proj"]} == {INT8}
    assert {linear.form for name, linear in linears.items() if ".visual." not in name} == {INT8}
    assert {linear.form for name, linear in linears.items() if "merger" in name} == {None}
    stay = [linear for name, linear in linears.items() if name.endswith(("mlp.second", "mlp.down_proj"))
            and ".visual." in name]
    assert stay
    assert {linear.form for linear in stay} == {None}
