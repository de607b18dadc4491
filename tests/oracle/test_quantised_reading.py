"""Weights that we dequantise equal, bit for bit, those that the format's own library makes of the same files.

Oracles: compressed-tensors' decompressors, its converter for AWQ, and transformers' loader for FP8 by block. What these
do not read is defined in test_quantised_definitions.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from scripts.quantised.formats import awq, compressed_int, fp8_block, fp8_rows
from tests.oracle.quantised_folders import (
    MODULE,
    WEIGHT,
    assert_reads,
    in_small_pieces,
    of_module,
    weights,
    write_folder,
)

BF16 = torch.bfloat16
library: Any = pytest.importorskip("compressed_tensors", reason="compressed-tensors needs Python 3.11")


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)


def int_args(bits: int, strategy: str, group_size: int | None = None, symmetric: bool = True) -> dict[str, Any]:
    args = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": symmetric}
    return args if group_size is None else {**args, "group_size": group_size}


def grouped_args(bits: int, group_size: int, *, symmetric: bool) -> dict[str, Any]:
    """-1: all inputs are one group."""
    if group_size == -1:
        return int_args(bits, "channel", symmetric=symmetric)
    return int_args(bits, "group", group_size, symmetric)


def float_args(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}


def config_of(form: str, args: dict[str, Any], **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": args}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}, **more}


def decompressed(form: str, args: dict[str, Any], parts: dict[str, Tensor]) -> Tensor:
    """By the library."""
    compressor: Any = library.compressors.BaseCompressor.get_value_from_registry(form)
    scheme = library.quantization.QuantizationScheme(
        targets=["Linear"], weights=library.quantization.QuantizationArgs(**args))
    weight: Tensor = compressor.decompress(dict(parts), scheme)["weight"]
    return weight


COMPRESSED: dict[str, tuple[str, dict[str, Any], dict[str, Tensor]]] = {
    "int8 by channel": ("int-quantized", int_args(8, "channel"), compressed_int(weights())),
    "int8 by channel, zeros": ("int-quantized", int_args(8, "channel", symmetric=False),
                               compressed_int(weights(), symmetric=False)),
    "int8 by tensor": ("int-quantized", int_args(8, "tensor"), {
        **(int8 := compressed_int(weights())), "weight_scale": int8["weight_scale"].amax().reshape(1)}),
    "int8 in groups": ("naive-quantized", int_args(8, "group", 32), compressed_int(weights(), 8, 32)),
    "int4 in bytes": ("int-quantized", int_args(4, "channel"), compressed_int(weights(), 4)),
    "fp8 by tensor": ("float-quantized", float_args("tensor"), fp8_rows(weights(), by_tensor=True)),
    "fp8 by channel": ("float-quantized", float_args("channel"), fp8_rows(weights(), by_tensor=False)),
    "fp8 by block, cut short": ("float-quantized", float_args("block", block_structure=[64, 128]), {
        "weight": (fp8 := fp8_block(weights(96, 160), (64, 128)))["weight"], "weight_scale": fp8["weight_scale_inv"]}),
    **{f"packed int{bits}, {'all inputs' if group == -1 else f'groups of {group}'}{'' if symmetric else ', zeros'}": (
        "pack-quantized", grouped_args(bits, group, symmetric=symmetric),
        compressed_int(weights(), bits, group, symmetric=symmetric, packed=True))
       for bits, group, symmetric in [(4, 32, True), (4, 32, False), (4, -1, True), (8, 32, False), (8, -1, True)]},
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_read_as_its_library_decompresses_them(name: str, tmp_path: Path) -> None:
    form, args, parts = COMPRESSED[name]
    path = write_folder(tmp_path, of_module(parts), config=config_of(form, args))
    assert_reads(path, {WEIGHT: decompressed(form, args, parts)})


@pytest.mark.parametrize("bits", [4, 8])
def test_scales_in_16_bits_are_multiplied_in_32_and_rounded_once(bits: int, tmp_path: Path) -> None:
    """The library computes in the scale's dtype, which rounds the same product."""
    parts = compressed_int(weights(), bits, 32, symmetric=False, packed=True, dtype=BF16)
    args = int_args(bits, "group", 32, symmetric=False)
    path = write_folder(tmp_path, of_module(parts), config=config_of("pack-quantized", args))
    assert_reads(path, {WEIGHT: decompressed("pack-quantized", args, parts)}, dtype=BF16)


def test_a_group_is_found_by_targets_ignore_and_its_own_format(tmp_path: Path) -> None:
    """An exact name before a pattern, a pattern (matched from the start) before a class; what is ignored stays."""
    layer, head = "model.layers.0", "lm_head"
    parts = {f"{layer}.self_attn.q_proj": compressed_int(weights(seed=1), 8), f"{layer}.mlp.up_proj": compressed_int(
        weights(seed=2), 4, 32, packed=True), f"{layer}.mlp.down_proj": fp8_rows(weights(seed=3), by_tensor=False)}
    args = {"packed": int_args(4, "group", 32), "fp8": float_args("channel"), "int8": int_args(8, "channel")}
    groups = {
        "all": {"targets": ["Linear"], "weights": args["int8"], "format": "int-quantized"},
        "some": {"targets": [r"re:.*mlp\.(up|down)_proj", "re:up_proj"], "weights": args["packed"],
                 "format": "pack-quantized"},
        "one": {"targets": [f"{layer}.mlp.down_proj"], "weights": args["fp8"], "format": "float-quantized"},
    }
    config = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": groups,
              "ignore": [head, "re:.*visual.*"]}
    tensors = {name: tensor for module, each in parts.items() for name, tensor in of_module(each, module).items()}
    plain = weights(seed=4)
    path = write_folder(tmp_path, {**tensors, f"{head}.weight": plain}, config=config)
    expected = {f"{module}.weight": decompressed(form, args[kind], parts[module]) for module, form, kind in (
        (f"{layer}.self_attn.q_proj", "int-quantized", "int8"), (f"{layer}.mlp.up_proj", "pack-quantized", "packed"),
        (f"{layer}.mlp.down_proj", "float-quantized", "fp8"))}
    assert_reads(path, {**expected, f"{head}.weight": plain})


def test_a_scheme_may_be_named_and_older_files_call_the_config_otherwise(tmp_path: Path) -> None:
    parts = fp8_rows(weights(), by_tensor=False)
    config = {"quant_method": "compressed-tensors", "format": "float-quantized",
              "config_groups": {"FP8_DYNAMIC": ["Linear"]}}
    expected = {WEIGHT: decompressed("float-quantized", float_args("channel"), parts)}
    assert_reads(write_folder(tmp_path / "preset", of_module(parts), config=config), expected)
    old = write_folder(tmp_path / "old", of_module(parts))
    (old / "config.json").write_text((tmp_path / "preset" / "config.json").read_text().replace(
        "quantization_config", "compression_config"))
    assert_reads(old, expected)


@pytest.mark.parametrize("group_size", [32, 80, -1])
def test_awq_reads_as_the_librarys_converter_makes_of_it(group_size: int, tmp_path: Path) -> None:
    parts = awq(weights(), group_size)
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    path = write_folder(tmp_path, of_module(parts), config=config)
    from compressed_tensors.entrypoints.convert import AutoAWQConverter

    converted = AutoAWQConverter(group_size=group_size).process(of_module(parts))
    args = grouped_args(4, group_size, symmetric=False)
    packed = {name.removeprefix(f"{MODULE}."): tensor for name, tensor in converted.items()}
    # The library computes in the scale's dtype.
    packed["weight_scale"] = packed["weight_scale"].float()
    assert_reads(path, {WEIGHT: decompressed("pack-quantized", args, packed)})


@pytest.mark.parametrize("scale_dtype", [torch.float32, BF16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize("shape", [(128, 384), (256, 128)])
def test_fp8_by_block_reads_as_transformers_loads_it(shape: tuple[int, int], scale_dtype: torch.dtype, tmp_path: Path
                                                     ) -> None:
    parts = fp8_block(weights(*shape))
    parts["weight_scale_inv"] = parts["weight_scale_inv"].to(scale_dtype)
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    path = write_folder(tmp_path, of_module(parts), config=config)
    by_transformers = Fp8Dequantize(None)._dequantize_one(parts["weight"], parts["weight_scale_inv"], torch.float32)
    assert_reads(path, {WEIGHT: by_transformers})


def test_fused_experts_in_fp8_read_as_transformers_loads_them(tmp_path: Path) -> None:
    stacked = fp8_block(torch.stack([weights(64, 96, seed) for seed in range(3)]), (32, 32))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    config = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    path = write_folder(tmp_path, {name: stacked["weight"], f"{name}_scale_inv": stacked["weight_scale_inv"]},
                        config=config)
    by_transformers = Fp8Dequantize(None)._dequantize_one(stacked["weight"], stacked["weight_scale_inv"], torch.float32)
    assert_reads(path, {name: by_transformers})
