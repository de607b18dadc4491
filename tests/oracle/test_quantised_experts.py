"""Experts that hold int8 or FP8 as a checkpoint stores it, or int8 that `quantization` makes: layouts of files, slices
and whole experts of ranks, what is dequantised. The products are the definition in plain torch here, against float64;
those of platforms are compared in tests/npu and tests/cuda.

E experts, D hidden size, I width.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import DequantisingReader, open_weights
from npu_runner.checkpoint.formats.rounding import RoundingReader
from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.weights_reader import CheckpointReader, WeightsReader
from npu_runner.errors import ConfigError
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.parallel import LayerContext, TensorParallel
from npu_runner.layers.weight_forms import hold_as_stored, match_experts, names_to_round, turned_stacks
from npu_runner.layers.weights_loader import load_weights
from npu_runner.platforms.cpu.ops import CpuOps
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.quantised import FP8_EXPERTS, INT8, INT8_EXPERTS, QuantisedOps
from scripts.quantised.formats import compressed_int, fp8_block
from scripts.quantised.writing import quantise
from tests.oracle.expert_reference import mixture
from tests.oracle.int8_linears import DYNAMIC, compressed
from tests.oracle.quantised_folders import in_small_pieces, write_folder
from tests.oracle.running import SMALL, greedy, runner_of

BY_BLOCK = {"quant_method": "fp8", "weight_block_size": [128, 128]}
LAYOUTS = ("per_expert", "fused", "fused_transposed")
NAMES = ("gate_proj", "up_proj", "down_proj")
NUM_EXPERTS = 3


class InOut(CpuOps):
    experts_in_out = True


def drawn(hidden: int, width: int) -> dict[str, Tensor]:
    """By name (E, O, I); rows differ in size."""
    generator = torch.Generator().manual_seed(hidden + width)
    shapes = {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}
    return {name: torch.randn(NUM_EXPERTS, *shape, generator=generator)
            * (torch.rand(NUM_EXPERTS, shape[0], 1, generator=generator) + 0.1) for name, shape in shapes.items()}


def laid_out(drawn: dict[str, Tensor], layout: str) -> dict[str, Tensor]:
    if layout == "per_expert":
        return {f"experts.{e}.{name}.weight": drawn[name][e] for e in range(NUM_EXPERTS) for name in NAMES}
    fused = {"experts.gate_up_proj": torch.cat((drawn["gate_proj"], drawn["up_proj"]), 1),
             "experts.down_proj": drawn["down_proj"]}
    return {name: x.transpose(1, 2) if layout == "fused_transposed" else x for name, x in fused.items()}


def made(hidden: int, width: int, tp: TensorParallel | None = None, ops: CpuOps | None = None) -> nn.Module:
    model = nn.Module()
    moe = MoEConfig(num_experts=NUM_EXPERTS, top_k=2, intermediate_size=width, renormalise=True)
    context = LayerContext(ops or CpuOps(), None, tp or TensorParallel(), torch.float32,  # type: ignore[arg-type]
                           torch.device("cpu"), weight_forms=(INT8_EXPERTS, FP8_EXPERTS),
                           quantised=QuantisedOps(CpuOps()))
    model.experts = ExpertWeights(hidden, moe, context)
    return model


def rounding(model: nn.Module, reader: WeightsReader) -> RoundingReader:
    match_experts(model, reader, {})
    return RoundingReader(reader, names_to_round(model, {}), turned_stacks(model, {}))


def rounded(weight_EOI: Tensor) -> tuple[Tensor, Tensor]:
    """QUANT's definition: s = max|w| / 127 of each row, q = round(w / s)."""
    scales_EO = weight_EOI.abs().amax(2) / 127
    return (weight_EOI / scales_EO[..., None]).round().to(torch.int8), scales_EO


def of_rank(stored: dict[str, tuple[Tensor, Tensor]], tp: TensorParallel, width: int, block: int = 1
            ) -> list[tuple[Tensor, Tensor]]:
    """(values, scales) of gate_up and down as a rank holds them. `block`: rows and columns of a scale."""
    first, count = tp.expert_share(NUM_EXPERTS)
    start, length = (0, width) if tp.has_whole_experts else tp.share(width, "width")
    kept, rows, of_rows = slice(first, first + count), slice(start, start + length), slice(
        start // block, (start + length) // block)
    both = [torch.cat([stored[name][place][kept, (rows, of_rows)[place]] for name in NAMES[:2]], 1) for place in (0, 1)]
    values, scales = (x[kept] for x in stored["down_proj"])
    return [(both[0], both[1]), (values[:, :, rows], scales if scales.dim() == 2 else scales[:, :, of_rows])]


def assert_held(model: Any, expected: list[tuple[Tensor, Tensor]], form: str, *, in_out: bool = False) -> None:
    assert model.experts.form == form
    for found, (values, scales) in zip(model.experts.quantised, expected, strict=True):
        ours = found.values.transpose(1, 2) if in_out else found.values
        assert found.values.is_contiguous()
        assert torch.equal(ours.contiguous().view(torch.int8), values.contiguous().view(torch.int8))
        torch.testing.assert_close(found.scales.data, scales, rtol=0, atol=0)


@pytest.mark.parametrize("tp", [TensorParallel(), TensorParallel(1, 2), TensorParallel(0, 2, has_whole_experts=True)],
                         ids=["alone", "a slice", "whole experts"])
def test_int8_is_made_of_every_layout_alike(tp: TensorParallel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    in_small_pieces(monkeypatch)
    weights = drawn(48, 40)
    expected = of_rank({name: rounded(x) for name, x in weights.items()}, tp, 40)
    for layout in LAYOUTS:
        path = write_folder(tmp_path / layout, laid_out(weights, layout))
        for ops in (CpuOps(), InOut()):
            model = made(48, 40, tp, ops)
            with CheckpointReader(path) as reader:
                load_weights(model, rounding(model, reader))
            assert_held(model, expected, INT8_EXPERTS, in_out=ops.experts_in_out)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_int8_makes_is_dequantised_where_nothing_multiplies_it(layout: str, tmp_path: Path) -> None:
    """Whole, and in slices of each dim, the tensors are those of the rounded weights."""
    weights = drawn(48, 40)
    exact = {name: (lambda values, scales: values.float() * scales[..., None])(*rounded(x))
             for name, x in weights.items()}
    model = made(48, 40)
    with CheckpointReader(write_folder(tmp_path, laid_out(weights, layout))) as stored:
        reader = rounding(model, stored)
        for name, right in laid_out(exact, layout).items():
            torch.testing.assert_close(reader.read(name), right, rtol=0, atol=0)
            for dim in range(right.dim()):
                torch.testing.assert_close(reader.read(name, dim, 1, 2), right.narrow(dim, 1, 2), rtol=0, atol=0)


def test_int8_of_a_checkpoint_is_held_as_it_is_stored(tmp_path: Path) -> None:
    stored = {name: [compressed_int(x[e]) for e in range(NUM_EXPERTS)] for name, x in drawn(48, 40).items()}
    tensors = {f"experts.{e}.{name}.{suffix}": tensor for name, each in stored.items()
               for e, parts in enumerate(each) for suffix, tensor in parts.items()}
    path = write_folder(tmp_path, tensors, config=compressed(DYNAMIC))
    expected = {name: (torch.stack([parts["weight"] for parts in each]),
                       torch.stack([parts["weight_scale"][:, 0] for parts in each])) for name, each in stored.items()}
    for tp in (TensorParallel(), TensorParallel(1, 2)):
        model = load(path, 48, 40, tp)
        assert_held(model, of_rank(expected, tp, 40), INT8_EXPERTS)
    bytes_of_int8 = NUM_EXPERTS * (3 * 48 * 40 + 4 * (2 * 40 + 48))
    assert sum(parameter.nbytes for parameter in load(path, 48, 40).parameters()) == bytes_of_int8


def load(path: Path, hidden: int, width: int, tp: TensorParallel | None = None) -> Any:
    model = made(hidden, width, tp)
    with open_weights(path, read_quantization(path)) as reader:
        load_weights(model, reader)
    return model


def fp8(weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Values and scales of blocks, by name."""
    parts = {name: [fp8_block(x[e]) for e in range(NUM_EXPERTS)] for name, x in weights.items()}
    return {name: (torch.stack([each["weight"] for each in found]),
                   torch.stack([each["weight_scale_inv"] for each in found])) for name, found in parts.items()}


def fp8_folder(path: Path, stored: dict[str, tuple[Tensor, Tensor]], layout: str) -> Path:
    values, scales = ({name: pair[place] for name, pair in stored.items()} for place in (0, 1))
    tensors = laid_out({name: x.view(torch.uint8) for name, x in values.items()}, layout)
    named = {name: x.contiguous().view(torch.float8_e4m3fn) for name, x in tensors.items()}
    return write_folder(path, {**named, **{f"{name}_scale_inv": x for name, x in laid_out(scales, layout).items()}},
                        config=BY_BLOCK)


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("tp", [TensorParallel(), TensorParallel(1, 2), TensorParallel(1, 2, has_whole_experts=True)],
                         ids=["alone", "a slice", "whole experts"])
def test_fp8_by_block_is_held_with_whole_blocks(tp: TensorParallel, layout: str, tmp_path: Path) -> None:
    stored = fp8(drawn(256, 256))
    path = fp8_folder(tmp_path, stored, layout)
    assert_held(load(path, 256, 256, tp), of_rank(stored, tp, 256, block=128), FP8_EXPERTS)


def test_slices_that_cut_a_block_are_dequantised(tmp_path: Path) -> None:
    stored = fp8(drawn(256, 384))
    path = fp8_folder(tmp_path, stored, "per_expert")
    model = load(path, 256, 384, TensorParallel(1, 2))
    assert model.experts.form is None
    exact = {name: values.float() * scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
             for name, (values, scales) in stored.items()}
    torch.testing.assert_close(model.experts.down.data, exact["down_proj"][:, :, 192:], rtol=0, atol=0)


def test_experts_that_differ_in_form_are_dequantised_and_said_to_be(tmp_path: Path) -> None:
    weights = drawn(48, 40)
    tensors = {f"experts.{e}.{name}.{suffix}": tensor for name, x in weights.items() for e in range(NUM_EXPERTS)
               for suffix, tensor in (compressed_int(x[e]).items() if (e, name) != (2, "up_proj") else
                                      [("weight", x[e].bfloat16())])}
    path = write_folder(tmp_path, tensors, config=compressed(DYNAMIC))
    model = made(48, 40)
    with open_weights(path, read_quantization(path)) as reader:
        assert isinstance(reader, DequantisingReader)
        assert hold_as_stored(model, reader, {}) == set()
        assert "8 as int8 by row; " in reader.describe(torch.bfloat16)
        load_weights(model, reader)
    torch.testing.assert_close(model.experts.gate_up.data[2, 40:], weights["up_proj"][2].bfloat16().float())


@pytest.mark.parametrize("form", [INT8_EXPERTS, FP8_EXPERTS])
def test_the_definition_is_as_near_to_float64_as_float32_is(form: str) -> None:
    """With an expert that nobody chose, and on a rank that holds two of three."""
    weights, ops = drawn(256, 128), QuantisedOps(CpuOps())
    stored = fp8(weights) if form == FP8_EXPERTS else {name: rounded(x) for name, x in weights.items()}
    gate_up, down = of_rank(stored, TensorParallel(), 128, block=128 if form == FP8_EXPERTS else 1)
    model = made(256, 128)
    model.experts.hold([INT8 if form == INT8_EXPERTS else "fp8_blocks"])
    for found, (values, scales) in zip(model.experts.quantised, (gate_up, down), strict=True):
        found.values.copy_(values)
        found.scales.copy_(scales)
    generator = torch.Generator().manual_seed(0)
    x_TD, weights_TK = torch.randn(7, 256, generator=generator), torch.rand(7, 2, generator=generator)
    for experts_TK in (torch.tensor([[0, 2]] * 7), torch.tensor([[1, 0], [2, 1]] * 3 + [[0, 2]])):
        found_TD = ops.experts(x_TD, weights_TK, experts_TK.int(), *model.experts.quantised)
        expected_TD = mixture(x_TD, weights_TK, experts_TK, gate_up, down)
        assert float((found_TD.double() - expected_TD).abs().max()) < 1e-4 * float(expected_TD.abs().max())


class Rounding(CpuPlatform):
    """The cpu platform as one with products of int8 experts, by the definition."""

    weight_forms = (INT8, INT8_EXPERTS)

    def forms_with(self, dtype: str, graph_mode: str) -> tuple[str, ...]:
        return self.weight_forms


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_vl_moe"])
def test_quantization_int8_holds_experts_as_int8(model_type: str, checkpoint: Any, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    """One by one in the file, and in one tensor. Without products the answers are those of dequantised weights."""
    path, params = checkpoint(model_type), greedy(6)
    with LLM(path, platform="cpu", quantization="int8", **SMALL) as llm:
        dequantised = llm.generate(["which of the two pictures"], params)[0].token_ids
        experts = [each for each in runner_of(llm).get_model().modules() if isinstance(each, ExpertWeights)]
        assert {each.form for each in experts} == {None}
        whole = [each.down.data for each in experts]
    monkeypatch.setattr(CpuPlatform, "weight_forms", Rounding.weight_forms)
    monkeypatch.setattr(CpuPlatform, "forms_with", Rounding.forms_with)
    with LLM(path, platform="cpu", quantization="int8", **SMALL) as llm:
        experts = [each for each in runner_of(llm).get_model().modules() if isinstance(each, ExpertWeights)]
        assert {each.form for each in experts} == {INT8_EXPERTS}
        for each, right in zip(experts, whole, strict=True):
            held = each.quantised[1]
            torch.testing.assert_close(held.values.float() * held.scales[..., None], right)
        assert len(llm.generate(["which of the two pictures"], params)[0].token_ids) == len(dequantised)


def test_experts_in_other_integers_are_refused_by_name(checkpoint: Any, tmp_path: Path) -> None:
    quantise(checkpoint("qwen3_moe"), tmp_path / "w4a16", "w4a16", group_size=8)
    with pytest.raises(ConfigError, match=r"experts\.0\.down_proj\.weight is stored as int4 in groups of 8"):
        LLM(tmp_path / "w4a16", platform="cpu", quantization="int8", **SMALL)
