"""Linears that hold 4 and 8 bit integers in groups, or by row, as a checkpoint stores them: every format, slices,
ranks, fused parts, and what is dequantised. The product is the definition in plain torch here; operators and kernels
are compared with the same numbers (tests/npu/test_grouped.py, tests/cuda/test_grouped_matmuls.py).

N outputs, K inputs, T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import arithmetic, read_quantization
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.cli.main import main
from npu_runner.errors import WeightsError
from npu_runner.layers.linear import ColumnParallelLinear, HeldLinear, OutputPart, Padding, RowParallelLinear
from npu_runner.layers.parallel import LayerContext
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.grouped import GROUPED, GroupedWeight, dequantised, packed, unpacked
from npu_runner.platforms.quantised import INT8, QuantisedOps
from npu_runner.runner.memory import weights_bytes
from scripts.quantised.formats import awq, compressed_int, fp8_block, gptq, integers, modelslim_int4, modelslim_int8
from scripts.quantised.writing import quantise
from tests.full_set import only_full
from tests.oracle.family_prompts import prompts_of
from tests.oracle.int8_linears import Parts
from tests.oracle.quantised_folders import in_small_pieces, loaded, weights, write_folder
from tests.oracle.running import SMALL, greedy, runner_of

K = 256
TOKENS = torch.randn(5, K, generator=torch.Generator().manual_seed(9)) * 3
NAMES = ("q_proj", "k_proj", "v_proj")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def compressed(bits: int, size: int, *, symmetric: bool = True, form: str = "pack-quantized", inputs: Any = None
               ) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if size == -1 else {"strategy": "group", "group_size": size}
    group = {"targets": ["Linear"], "input_activations": inputs, "format": form,
             "weights": {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


def of_gptq(bits: int, size: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": True, "desc_act": False, **more}


Made = dict[str, Tensor]
Case = tuple[Callable[[Tensor], Made], dict[str, Any] | str, int, int, bool]
"""What writes a weight; config.json's part, or ModelSlim's type; bits, group size, whether there are zeros."""


def asymmetric_gptq(weight: Tensor, bits: int, size: int, **more: Any) -> Made:
    return gptq(weight, bits, size, symmetric=False, **more)


CASES: dict[str, Case] = {
    "awq": (lambda w: awq(w, 64), {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, 4, 64, True),
    "gptq": (lambda w: gptq(w, 4, 32), of_gptq(4, 32), 4, 32, False),
    "gptq, v1 with zeros": (lambda w: asymmetric_gptq(w, 4, 128), of_gptq(4, 128, sym=False), 4, 128, True),
    "gptq, v2 of 8 bits": (lambda w: asymmetric_gptq(w, 8, 64, is_v2=True),
                           of_gptq(8, 64, sym=False, checkpoint_format="gptq_v2"), 8, 64, True),
    "gptq by row": (lambda w: gptq(w, 8, -1), of_gptq(8, -1), 8, 0, False),
    "packed": (lambda w: compressed_int(w, 4, 64, packed=True), compressed(4, 64), 4, 64, False),
    "packed with zeros": (lambda w: compressed_int(w, 4, 32, packed=True, symmetric=False),
                          compressed(4, 32, symmetric=False), 4, 32, True),
    "packed, 8 bits by row": (lambda w: compressed_int(w, 8, packed=True), compressed(8, -1), 8, 0, False),
    "int8 by row, no inputs": (compressed_int, compressed(8, -1, form="int-quantized"), 8, 0, False),
    "W8A16": (modelslim_int8, "W8A16", 8, 0, False),
    "W8A16 with offsets": (lambda w: modelslim_int8(w, 64, symmetric=False), "W8A16", 8, 64, True),
    "W4A16": (lambda w: modelslim_int4(w, 32), "W4A16", 4, 32, False),
    "W4A16 by row": (lambda w: modelslim_int4(w, layout="columns"), "W4A16", 4, 0, False),
}


def context(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> LayerContext:
    return LayerContext(CpuOps(), None, Parts(rank, size), dtype, torch.device("cpu"),  # type: ignore[arg-type]
                        weight_forms=(INT8, GROUPED), quantised=QuantisedOps(CpuOps()))


def folder(path: Path, tensors: Mapping[str, Made], config: dict[str, Any] | str) -> Path:
    named = {f"{name}.{suffix}": tensor for name, parts in tensors.items() for suffix, tensor in parts.items()}
    if isinstance(config, dict):
        return write_folder(path, named, config=config)
    return write_folder(path, named, description={"version": "1.0.0", **{
        name: "FLOAT" if name.endswith("bias") or tensors[name.split(".")[0]].keys() == {"weight"} else config
        for name in named}})


def column(num_outputs: int = 96, num_inputs: int = K, name: str = "q_proj", *, start: int = 0, length: int = 0,
           bias: bool = False, of: LayerContext | None = None, padding: Padding | None = None) -> ColumnParallelLinear:
    more = {} if padding is None else {"padding": padding}
    return ColumnParallelLinear(num_inputs, [OutputPart(name, num_outputs, start, length or num_outputs)], bias=bias,
                                context=of or context(), **more)


def whole_weight(path: Path, name: str = "q_proj") -> Tensor:
    """As every platform without products has it; tests/oracle/test_quantised_*.py hold these to the definitions."""
    with open_weights(path, read_quantization(path)) as reader:
        return reader.read(f"{name}.weight")


def held(linear: HeldLinear) -> Tensor:
    """The weight that the parameters stand for, in float64 and computed anew."""
    values = unpacked(linear.weight).double().unflatten(1, (linear.scales.shape[1], -1))
    zeros = 0 if linear.zeros is None else linear.zeros.double()[..., None]
    return ((values - zeros) * linear.scales.double()[..., None]).flatten(1)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert float((found.double() - expected.double()).abs().max()) < 2e-6 * float(expected.abs().max())


def test_nibbles_are_twos_complement_with_even_inputs_low() -> None:
    values = torch.tensor([[-8, 7, -1, 0], [1, 2, 3, -4]], dtype=torch.int8)
    assert packed(values).tolist() == [[0x78, 0x0F], [0x21, 0xC3]]
    assert torch.equal(unpacked(packed(values)), values)
    every = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(packed(unpacked(every)), every)


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_held_and_multiplied(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)
    write, config, bits, group_size, has_zeros = CASES[name]
    made, bias = write(weights(96, K)), torch.randn(96)
    path = folder(tmp_path, {"q_proj": {**made, "bias": bias}}, config)
    linear = loaded(path, lambda: column(bias=True))
    assert linear.form == GROUPED
    assert linear.weight.dtype == (torch.uint8 if bits == 4 else torch.int8)
    groups = K // (group_size or K)
    assert linear.scales.shape == (96, groups)
    assert (linear.zeros is not None) is has_zeros
    assert sum(each.nbytes for each in linear.parameters()) == 96 * (K * bits // 8 + 4 * groups * (1 + has_zeros) + 4)
    assert_near(held(linear), whole_weight(path))
    assert_near(linear(TOKENS), TOKENS.double() @ held(linear).T + bias.double())
    for rank in range(2):
        rows = loaded(path, lambda: column(start=48 * rank, length=48, bias=True, of=context(rank, 2)))  # noqa: B023
        assert torch.equal(held(rows), held(linear)[48 * rank:48 * rank + 48])
    sums = torch.zeros(5, 96).double()
    for rank in range(2):
        half = slice(K // 2 * rank, K // 2 * (rank + 1))
        part = loaded(path, lambda: RowParallelLinear("q_proj", K, 96, bias=True, context=context(rank, 2)))  # noqa: B023
        assert part.form == GROUPED
        assert torch.equal(held(part), held(linear)[:, half])
        sums += part(TOKENS[:, half]).double()
    assert_near(sums, TOKENS.double() @ held(linear).T + bias.double())


def test_four_ranks_have_whole_groups(tmp_path: Path) -> None:
    path = folder(tmp_path, {"q_proj": gptq(weights(96, 512), 4, 128)}, of_gptq(4, 128))
    for rank in range(4):
        part = loaded(path, lambda: RowParallelLinear("q_proj", 512, 96, bias=False, context=context(rank, 4)))  # noqa: B023
        assert_near(held(part), whole_weight(path)[:, 128 * rank:128 * rank + 128])


def test_fused_parts_are_one_product_whichever_has_zeros(tmp_path: Path) -> None:
    sizes = dict(zip(NAMES, (96, 32, 48), strict=True))
    made = {name: gptq(weights(size, K, seed=size), 4, 64, symmetric=name != "k_proj") for name, size in sizes.items()}
    path = folder(tmp_path, made, of_gptq(4, 64, sym=False))
    linear = loaded(path, lambda: ColumnParallelLinear(
        K, [OutputPart(name, size, 0, size) for name, size in sizes.items()], bias=False, context=context()))
    assert linear.zeros is not None
    assert not linear.zeros[:96].any()
    assert linear.zeros[96:128].any()
    assert_near(held(linear), torch.cat([whole_weight(path, name) for name in NAMES]))


def test_parts_in_16_bits_are_a_product_of_their_own(tmp_path: Path) -> None:
    floats = weights(24, K)
    path = folder(tmp_path, {"q_proj": awq(weights(96, K), 64), "k_proj": {"weight": floats}},
                  {"quant_method": "awq", "bits": 4, "group_size": 64})
    linear = loaded(path, lambda: ColumnParallelLinear(
        K, [OutputPart("q_proj", 96, 0, 96), OutputPart("k_proj", 24, 0, 24)], bias=False, context=context()))
    assert linear.rest.shape == (24, K)
    assert_near(linear(TOKENS), torch.cat((TOKENS.double() @ held(linear).T, TOKENS.double() @ floats.double().T), 1))


def test_room_for_padding_is_zeros(tmp_path: Path) -> None:
    path = folder(tmp_path, {"q_proj": awq(weights(96, K), 64)}, {"quant_method": "awq", "bits": 4, "group_size": 64})
    linear = loaded(path, lambda: column(padding=Padding(run=12, width=16)))
    runs = held(linear).unflatten(0, (8, 16))
    assert_near(runs[:, :12].flatten(0, 1), whole_weight(path))
    assert not runs[:, 12:].any()


def scattered(weight: Tensor) -> Made:
    return gptq(weight, 4, 64, order_K=torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1)))


def with_half_a_zero(weight: Tensor) -> Made:
    made = modelslim_int8(weight, 64, symmetric=False)
    made["weight_offset"][3, 1] += 0.5
    return made


DEQUANTISED: dict[str, tuple[Callable[[Tensor], Made], dict[str, Any] | str, Callable[[], nn.Module]]] = {
    "scattered groups": (scattered, of_gptq(4, 64, desc_act=True), column),
    "zeros that are no whole numbers": (with_half_a_zero, "W8A16", column),
    "a rank's slice cuts a group": (lambda w: gptq(w, 4, 256), of_gptq(4, 256), lambda: RowParallelLinear(
        "q_proj", 512, 96, bias=False, context=context(1, 4))),
    "groups of 16": (lambda w: gptq(w, 4, 16), of_gptq(4, 16), column),
    "groups of 96": (lambda w: gptq(w, 4, 96), of_gptq(4, 96), lambda: column(num_inputs=384)),
    "inputs that no 128 divides": (lambda w: gptq(w, 4, -1), of_gptq(4, -1), lambda: column(num_inputs=192)),
    "outputs that no 8 divides": (lambda w: compressed_int(w, 4, 64, packed=True), compressed(4, 64),
                                  lambda: column(num_outputs=100)),
    "inputs with padding": (lambda w: gptq(w, 4, 64), of_gptq(4, 64), lambda: RowParallelLinear(
        "q_proj", K, 96, bias=False, context=context(), padding=Padding(run=32, width=64))),
    "W4A8": (lambda w: modelslim_int4(w), "W4A8_DYNAMIC", column),
    "fp8": (fp8_block, {"quant_method": "fp8", "weight_block_size": [128, 128]}, column),
}


@pytest.mark.parametrize("case", DEQUANTISED)
def test_what_has_no_product_is_dequantised(case: str, tmp_path: Path) -> None:
    write, config, make = DEQUANTISED[case]
    shape = {"a rank's slice cuts a group": (96, 512), "groups of 96": (96, 384),
             "inputs that no 128 divides": (96, 192), "outputs that no 8 divides": (100, K)}.get(case, (96, K))
    path = folder(tmp_path, {"q_proj": write(weights(*shape))}, config)
    linear = loaded(path, make)
    assert (linear.form, linear.scales, linear.zeros) == (None, None, None)
    assert linear.weight.dtype == torch.float32
    whole = whole_weight(path)
    if case == "a rank's slice cuts a group":
        whole = whole[:, 128:256]
    if case != "inputs with padding":
        assert torch.equal(linear.weight, whole)


def test_parts_of_two_group_sizes_are_dequantised(tmp_path: Path) -> None:
    config = of_gptq(4, 64, dynamic={"+:k_proj": {"group_size": 128}})
    path = folder(tmp_path, {"q_proj": gptq(weights(96, K), 4, 64), "k_proj": gptq(weights(32, K), 4, 128)}, config)
    linear = loaded(path, lambda: ColumnParallelLinear(
        K, [OutputPart("q_proj", 96, 0, 96), OutputPart("k_proj", 32, 0, 32)], bias=False, context=context()))
    assert linear.form is None
    assert torch.equal(linear.weight, torch.cat([whole_weight(path, name) for name in ("q_proj", "k_proj")]))


def test_scales_that_the_dtype_does_not_hold_are_an_error(tmp_path: Path) -> None:
    path = folder(tmp_path, {"q_proj": compressed_int(weights(96, K) * 1e-9, 4, 64, packed=True)}, compressed(4, 64))
    assert loaded(path, lambda: column(of=context(dtype=torch.bfloat16))).form == GROUPED
    with pytest.raises(WeightsError, match=r"the scales of q_proj.weight are from .* float16 does not hold"):
        loaded(path, lambda: column(of=context(dtype=torch.float16)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_definition_rounds_a_weight_once(dtype: torch.dtype) -> None:
    values, scales, zeros = integers(weights(96, K), 8, 64, symmetric=False, dtype=dtype)
    weight = GroupedWeight(values.to(torch.int8), scales, zeros.to(dtype))
    numbers = values.double().unflatten(1, (-1, 64)) - zeros.double()[..., None]
    exact = (numbers * scales.double()[..., None]).flatten(1)
    assert torch.equal(dequantised(weight, dtype), exact.to(dtype))
    bias = torch.randn(96).to(torch.float32 if dtype == torch.bfloat16 else dtype)
    found = QuantisedOps(CpuOps()).linear(TOKENS.to(dtype), weight, bias)
    expected = TOKENS.to(dtype).double() @ exact.T + bias.double()
    assert found.dtype == dtype
    assert float((found.double() - expected).abs().max()) < 2 * torch.finfo(dtype).eps * float(expected.abs().max())


def test_what_is_said_of_the_arithmetic(tmp_path: Path) -> None:
    config = {"quant_method": "awq", "bits": 4, "group_size": 64}
    path = folder(tmp_path, {name: awq(weights(96, K), 64) for name in ("q_proj", "k_proj")}, config)
    found = read_quantization(path)
    assert arithmetic(found, "auto", (INT8,)) == "awq, dequantised at load, inputs not quantised"
    assert arithmetic(found, "auto", (INT8, GROUPED)) == (
        "awq, int4 and int8 with 16-bit inputs multiplied as they are stored; other weights dequantised at load, "
        "inputs not quantised")
    with open_weights(path, found) as reader:
        said = reader.describe(torch.bfloat16, {"q_proj.weight"})  # type: ignore[attr-defined]
    assert said.startswith("quantised weights (awq): 2 as int4 in groups of 64; 1 are multiplied as they are stored, "
                           "with inputs in 16 bits; the other 1 become ")


# -- models ------------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.mark.parametrize(("model_type", "name"), [
    ("qwen3", "awq"), *only_full("other families, which ask for the same products", ("glm4v", "gptq-int8"),
                                 ("qwen3_next", "w4a16"))])
def test_a_model_computes_as_with_dequantised_weights(model_type: str, name: str, checkpoint: Any, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a family moves rows: of pairs that turn, and of heads that are stored interleaved."""
    more = {"qwen3_next": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
            "glm4v": {"num_attention_heads": 16, "head_dim": 16}}.get(model_type, {})
    quantise(checkpoint(model_type, **{**SIZES, **more}), tmp_path / name, name, group_size=32)
    found = []
    for forms in ((), (GROUPED,)):
        monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_, forms=forms: forms)
        with LLM(tmp_path / name, platform="cpu", **SMALL) as llm:
            linears = {name: module for name, module in runner_of(llm).model.named_modules()
                       if isinstance(module, HeldLinear)}
            assert any(linear.form == GROUPED for linear in linears.values()) is bool(forms)
            weight_of = {name: multiplied_out(linear).clone() for name, linear in linears.items()}
            found.append((weight_of, [output.token_ids for output in llm.generate(
                prompts_of(llm, model_type)[0], greedy(4))]))
    for linear, weight in found[0][0].items():
        assert torch.equal(found[1][0][linear], weight), linear
    assert found[0][1] == found[1][1]


def multiplied_out(linear: HeldLinear) -> Tensor:
    if linear.form != GROUPED:
        return linear.weight
    weight = dequantised(GroupedWeight(linear.weight, linear.scales, linear.zeros), torch.float32)
    if linear.rest is None:
        return weight
    return torch.cat((weight, linear.rest) if linear._is_form_first else (linear.rest, weight))


def test_bytes_are_counted_before_and_after_loading(checkpoint: Any, tmp_path: Path, capsys: Any,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    plain, path = checkpoint("qwen3", **SIZES), tmp_path / "awq"
    quantise(plain, path, "awq", group_size=32)
    with CheckpointReader(path) as reader:
        values = sum(8 * reader.shape(name)[0] * reader.shape(name)[1] for name in reader.names
                     if name.endswith("qweight"))
    asked = ["doctor", "--device-memory", "64G", "--platform", "npu", "--max-model-len", "1024", "--dtype", "bfloat16",
             "--json", "--fits"]
    found = []
    for model in (plain, path):
        assert main([*asked, str(model)]) == 0
        found.append(json.loads(capsys.readouterr().out)["weights_bytes"])
    assert found[0] - found[1] == 2 * values - (values // 2 + 2 * 2 * values // 32)
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: (GROUPED,))
    loaded_bytes = []
    for model, settings in ((plain, {}), (path, {}), (path, {"load_format": "dummy"})):
        with LLM(model, platform="cpu", **SMALL, **settings) as llm:
            loaded_bytes.append(weights_bytes(runner_of(llm).model))
            assert llm.generate(["which"], greedy(2))[0].token_ids
    saved = 4 * values - (values // 2 + 2 * 4 * values // 32)
    assert loaded_bytes[0] - saved == loaded_bytes[1] == loaded_bytes[2]
