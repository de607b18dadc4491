"""`quantization` fp8: which weights become FP8 by row while they are read, and how. The oracles are the definition in
float64, and a checkpoint that a tool has rounded alike. Kernels are compared in tests/cuda.

N outputs, K inputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner import LLM
from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.formats.rounding import TO_FP8, RoundingReader
from npu_runner.checkpoint.quantization import arithmetic, read_quantization
from npu_runner.checkpoint.weights_reader import WeightsReader
from npu_runner.errors import ConfigError, WeightsError
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.linear import HeldLinear
from npu_runner.platforms import find_platform
from npu_runner.platforms.cpu.platform import CpuPlatform
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, FP8_EXPERTS, INT8
from npu_runner.runner.estimate import estimate_memory
from npu_runner.runner.memory import weights_bytes
from npu_runner.strategies import pick_strategy
from scripts.quantised.formats import compressed_int, fp8_block
from scripts.quantised.writing import quantise
from tests.oracle.fp8_reference import LARGEST, multiplied_out, nearest_fp8
from tests.oracle.quantised_folders import in_small_pieces, write_folder
from tests.oracle.running import SMALL, greedy, runner_of

NAME = "q_proj.weight"
BF16 = torch.bfloat16
ALIGNED = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4,
           "num_key_value_heads": 2}
MADE = "made FP8 by row, of experts by block at load, dequantised at load, inputs not quantised"
SAYS = "quantization fp8: 21 weights are rounded to FP8 by row while loading, and "


def weights(dtype: torch.dtype = BF16) -> Tensor:
    """A row of zeros, one with an outlier that leaves the rest below the format's normal numbers, one of tiny ones."""
    generator = torch.Generator().manual_seed(3)
    weight_NK = torch.randn(96, 160, generator=generator) * torch.rand(96, 1, generator=generator)
    weight_NK[3] = 0
    weight_NK[5, 7], weight_NK[6] = 3e4, weight_NK[6] * 1e-20
    return weight_NK.to(dtype)


def rounding(reader: WeightsReader, *names: str) -> RoundingReader:
    return RoundingReader(reader, names, target=TO_FP8)


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_rows_are_rounded_to_the_nearest_bit_for_bit(dtype: torch.dtype, tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, some rows, some columns: scales are those of whole rows."""
    in_small_pieces(monkeypatch)
    weight = weights(dtype).nan_to_num(posinf=0)
    most_N, largest_N = weight.double().abs().amax(1), weight.float().abs().amax(1)
    scale_N = largest_N / LARGEST
    values = nearest_fp8(weight.double() * LARGEST / torch.where(most_N == 0, 1.0, most_N)[:, None])
    with open_weights(write_folder(tmp_path, {NAME: weight, "norm.weight": weight}), None) as stored:
        reader = rounding(stored, NAME)
        assert (reader.fp8_form(NAME), reader.int8_inputs(NAME)) == (FP8, None)
        for dim, start, length in ((None, 0, 0), (0, 7, 50), (1, 33, 64)):
            rows, columns = (slice(start, start + length) if dim == axis else slice(None) for axis in (0, 1))
            pieces = list(reader.row_pieces(NAME, dim, start, length))
            found, scales = (torch.cat([piece[place] for piece in pieces]) for place in (1, 2))
            assert found.dtype == torch.float8_e4m3fn
            assert torch.equal(found.double(), values[rows, columns])
            assert torch.equal(scales, scale_N[rows])
            assert torch.equal(reader.read(NAME, dim, start, length), found.float() * scales[:, None])
        assert reader.fp8_form("norm.weight") is None
        assert torch.equal(reader.read("norm.weight"), weight)


def test_fp8_stays_as_it_is_and_integers_are_refused(tmp_path: Path) -> None:
    made = fp8_block(weights(torch.float32), (128, 128))
    path = write_folder(tmp_path / "fp8", {f"q_proj.{name}": tensor for name, tensor in made.items()},
                        config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    with open_weights(path, read_quantization(path)) as stored:
        reader = rounding(stored, NAME)
        assert reader.fp8_form(NAME) == FP8_BLOCKS
        assert torch.equal(reader.read(NAME), stored.read(NAME))
    made = compressed_int(weights(torch.float32))
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": group}}
    path = write_folder(tmp_path / "int8", {f"q_proj.{name}": tensor for name, tensor in made.items()}, config=config)
    with open_weights(path, read_quantization(path)) as stored, pytest.raises(
            ConfigError, match=r"quantization fp8 makes FP8 weights of 16 bits, and q_proj.weight is stored as int8"):
        rounding(stored, NAME)


def test_weights_that_are_no_numbers_are_an_error(tmp_path: Path) -> None:
    weight = weights()
    weight[5, 7] = torch.inf
    path = write_folder(tmp_path, {NAME: weight})
    with open_weights(path, None) as stored, pytest.raises(WeightsError, match="no numbers"):
        list(rounding(stored, NAME).row_pieces(NAME))


def test_the_cpu_computes_with_what_an_fp8_checkpoint_holds(checkpoint: Any, tmp_path: Path,
                                                            caplog: pytest.LogCaptureFixture) -> None:
    """The same linears, rounded alike by a tool; such a checkpoint with fp8 is as it is with auto."""
    path = checkpoint("qwen3", **ALIGNED)
    quantise(path, tmp_path / "fp8", "fp8-dynamic", group_size=8)
    answers, said = [], []
    for model, asked in ((path, "fp8"), (tmp_path / "fp8", "auto"), (tmp_path / "fp8", "fp8")):
        with caplog.at_level("INFO"), LLM(model, platform="cpu", quantization=asked, **SMALL) as llm:
            answers.append([output.token_ids for output in llm.generate(["which picture", "a b a b a"], greedy())])
            said.append(llm.engine.describe()["quantization"])
    assert answers[0] == answers[1] == answers[2]
    assert said[0] == MADE
    assert said[1] == said[2] == "compressed-tensors, dequantised at load, inputs not quantised"
    (line,) = [each for each in caplog.messages if each.startswith("quantization fp8")]
    assert line == f"{SAYS}dequantised to float32; inputs are not quantised"


def test_bytes_are_counted_before_and_after_loading(checkpoint: Any, monkeypatch: pytest.MonkeyPatch,
                                                    caplog: pytest.LogCaptureFixture) -> None:
    """A float32 twin less three bytes a value, and a scale of four a row."""
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: (INT8, FP8, FP8_BLOCKS))
    path = checkpoint("qwen3", **ALIGNED)
    with LLM(path, platform="cpu", **SMALL) as llm:
        whole = weights_bytes(runner_of(llm).model)
    for settings in ({}, {"load_format": "dummy"}):
        with caplog.at_level("INFO"), LLM(path, platform="cpu", quantization="fp8", **SMALL, **settings) as llm:
            linears = [module for module in runner_of(llm).model.modules() if isinstance(module, HeldLinear)]
            assert {linear.form for linear in linears} == {FP8}
            shapes = [linear.weight.shape for linear in linears]
            expected = whole - sum(rows * (3 * columns - 4) for rows, columns in shapes)
            assert weights_bytes(runner_of(llm).model) == expected
            assert llm.generate(["which"], greedy(2))[0].token_ids
            config = runner_of(llm).config
            assert "multiplied as fp8, inputs rounded by row" in llm.engine.describe()["quantization"]
    found = estimate_memory(pick_strategy(path), config, find_platform("cpu"), 64 << 30)
    assert found.profile.weights_bytes == expected
    assert f"{SAYS}multiplied with inputs that are rounded to FP8 by row, too" in caplog.messages


def test_experts_and_odd_sizes_stay_and_the_start_says_so(checkpoint: Any, monkeypatch: pytest.MonkeyPatch,
                                                          caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: (INT8, FP8, FP8_BLOCKS))
    with caplog.at_level("INFO"), LLM(checkpoint("qwen3_moe", **ALIGNED), platform="cpu", quantization="fp8",
                                      **SMALL) as llm:
        modules = list(runner_of(llm).model.modules())
        assert {module.form for module in modules if isinstance(module, HeldLinear)} == {FP8}
        experts = [module for module in modules if isinstance(module, ExpertWeights)]
        assert {module.form for module in experts} == {None}
        assert llm.generate(["which"], greedy(2))[0].token_ids
    num = sum(len(parts) for module in experts for parts in module.weight_parts.values())
    assert (f"quantization fp8: {num} weights of sizes that 16 (of experts 128) does not divide, or of stacks that lie "
            "the other way round, have no such matmuls and stay as they are") in caplog.messages


@pytest.mark.parametrize("is_fused", [False, True], ids=["one by one", "stacked"])
def test_blocks_of_experts_are_those_of_an_fp8_checkpoint(is_fused: bool, tmp_path: Path) -> None:
    """Whole, some rows of blocks and some columns of blocks, of a matrix and of one of a stack."""
    generator = torch.Generator().manual_seed(5)
    weight_ENK = torch.randn((2, 256, 384), generator=generator) * torch.rand((2, 256, 1), generator=generator)
    weight_ENK[1, :128, :128] = 0
    weight_ENK = weight_ENK.to(BF16)
    made = fp8_block(weight_ENK)
    name = "experts.gate_up_proj" if is_fused else "experts.1.up_proj.weight"
    stored = weight_ENK if is_fused else weight_ENK[1]
    right, scales = multiplied_out(made["weight"][1], made["weight_scale_inv"][1]), made["weight_scale_inv"][1]
    with open_weights(write_folder(tmp_path, {name: stored}), None) as base:
        reader = RoundingReader(base, [name], target=TO_FP8, in_blocks=[name])
        assert reader.fp8_form(name) == FP8_BLOCKS
        matrix = f"{name}[1]" if is_fused else name
        for dim, start, length in ((None, 0, 0), (0, 128, 128), (1, 128, 256)):
            rows, columns = (slice(start, start + length) if dim == axis else slice(None) for axis in (0, 1))
            ((taken, values),) = reader.fp8_pieces(matrix, dim, start, length)
            found = reader.fp8_scales(matrix, dim, start, length)
            in_blocks = tuple(slice(None) if each.start is None else slice(each.start // 128, each.stop // 128)
                              for each in (rows, columns))
            assert taken == slice(0, len(values))
            torch.testing.assert_close(found, scales[in_blocks].clamp_min(0), rtol=1e-6, atol=1e-12)
            spread = scales[in_blocks].repeat_interleave(128, 0).repeat_interleave(128, 1).double()
            error = multiplied_out(values, found) - weight_ENK[1].double()[rows, columns]
            assert ((error / spread).abs() <= 16 * (1 + 1e-6)).all(), "half a step of the largest numbers"
            same = multiplied_out(values, found).sub(right[rows, columns]).abs() <= 1e-6 * right.abs().max()
            assert same.float().mean() > 0.999, "a tie may go the other way where the quotient is rounded first"
        whole = reader.read(name)
        ((_, values),) = reader.fp8_pieces(matrix)
        torch.testing.assert_close((whole[1] if is_fused else whole).double(),
                                   multiplied_out(values, reader.fp8_scales(matrix)))


def test_experts_of_whole_blocks_are_held_as_fp8(checkpoint: Any, monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    """As many bytes as the estimate says; on a platform without products the answers are those of the same weights."""
    path = checkpoint("qwen3_moe", **ALIGNED | {"hidden_size": 128, "moe_intermediate_size": 128})
    with caplog.at_level("INFO"), LLM(path, platform="cpu", quantization="fp8", **SMALL) as llm:
        plain = [module.down.data.clone() for module in runner_of(llm).model.modules()
                 if isinstance(module, ExpertWeights)]
    monkeypatch.setattr(CpuPlatform, "forms_with", lambda self, *_: (INT8, FP8, FP8_BLOCKS, FP8_EXPERTS))
    for settings in ({}, {"load_format": "dummy"}):
        with LLM(path, platform="cpu", quantization="fp8", **SMALL, **settings) as llm:
            experts = [module for module in runner_of(llm).model.modules() if isinstance(module, ExpertWeights)]
            assert {module.form for module in experts} == {FP8_EXPERTS}
            held, config = weights_bytes(runner_of(llm).model), runner_of(llm).config
            if not settings:
                for module, right_EDI in zip(experts, plain, strict=True):
                    _, down = module.quantised
                    for values, scales, right in zip(down.values, down.scales, right_EDI, strict=True):
                        torch.testing.assert_close(multiplied_out(values, scales).float(), right)
            assert llm.generate(["which"], greedy(2))[0].token_ids
    assert estimate_memory(pick_strategy(path), config, find_platform("cpu"), 64 << 30).profile.weights_bytes == held
    assert any(" of experts by block of 128 x 128 while loading" in message for message in caplog.messages)


def test_platforms_without_such_products_refuse_it_by_name(checkpoint: Any) -> None:
    path = checkpoint("qwen3", **ALIGNED)
    strategy = pick_strategy(path)
    with LLM(path, platform="cpu", **SMALL) as llm:
        config = runner_of(llm).config
    with pytest.raises(ConfigError, match=r"quantization 'fp8': platform npu has no matmuls for such weights with "
                                          r"inputs of bfloat16 \(it has int8,"):
        estimate_memory(strategy, config.replace(quantization="fp8", dtype="bfloat16", platform="npu"),
                        find_platform("npu"), 64 << 30)


def test_what_is_said_of_the_arithmetic() -> None:
    assert arithmetic(None, "fp8", ()) == MADE
    assert arithmetic(None, "fp8", (FP8,)) == ("made FP8 by row, of experts by block at load, multiplied as fp8, "
                                               "inputs rounded by row, of experts in groups of 128")
