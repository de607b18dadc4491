"""GPTQ, ModelSlim, scattered groups and FP8 by tensor: weights equal their definition in float64, element by element.

No library that runs here reads these. The definitions are loops over the stored tensors, written from the formats'
documents and not from our reader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from scripts.quantised.formats import (
    compressed_int,
    fp8_block,
    fp8_rows,
    gptq,
    modelslim_int4,
    modelslim_int8,
    modelslim_static,
)
from tests.oracle.quantised_folders import (
    MODULE,
    WEIGHT,
    assert_reads,
    in_small_pieces,
    of_module,
    read_all,
    weights,
    write_folder,
)

N, K = 96, 160


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    in_small_pieces(monkeypatch)


def define(value: Callable[[int, int], float], num_outputs: int = N, num_inputs: int = K) -> Tensor:
    """The weight whose element (n, k) is float64 `value(n, k)`, rounded once."""
    table = [[value(n, k) for k in range(num_inputs)] for n in range(num_outputs)]
    return torch.from_numpy(np.array(table, dtype=np.float64).astype(np.float32))


def bits_of(word: int, width: int, place: int) -> int:
    return (word % (1 << 32)) >> (width * place) & ((1 << width) - 1)


def nibble(byte: int, high: bool) -> int:
    """Two's complement."""
    value = (byte % 256) >> 4 if high else byte % 16
    return value - 16 if value > 7 else value


ORDER = torch.randperm(K, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("bits", "group", "symmetric", "is_v2", "order"), [
    (4, 32, True, False, None), (4, 32, False, False, None), (4, 80, False, True, None), (4, -1, True, False, None),
    (8, 32, True, False, None), (8, 32, False, True, None), (4, 32, True, False, ORDER), (8, 32, False, True, ORDER),
])
def test_gptq(bits: int, group: int, symmetric: bool, is_v2: bool, order: Tensor | None, tmp_path: Path) -> None:
    parts = gptq(weights(), bits, group, symmetric=symmetric, is_v2=is_v2, order_K=order)
    words, zeros, scales, places = (parts[name].tolist() for name in ("qweight", "qzeros", "scales", "g_idx"))
    per = 32 // bits

    def value(n: int, k: int) -> float:
        g = places[k]
        zero = bits_of(zeros[g][n // per], bits, n % per) + (0 if is_v2 else 1)
        return (bits_of(words[k // per][n], bits, k % per) - zero) * scales[g][n]

    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric,
              "desc_act": order is not None, "checkpoint_format": "gptq_v2" if is_v2 else "gptq"}
    assert_reads(write_folder(tmp_path, of_module(parts), config=config), {WEIGHT: define(value)})


def test_gptq_without_a_config_of_transformers_and_with_modules_of_their_own(tmp_path: Path) -> None:
    """quantize_config.json alone, another name of the file, no g_idx; `dynamic` has other bits for one module."""
    other = "model.layers.0.mlp.down_proj"
    parts = {MODULE: gptq(weights(seed=1), 4, 32), other: gptq(weights(seed=2), 8, 80)}
    for each in parts.values():
        del each["g_idx"]
    tensors = {name: tensor for module, each in parts.items() for name, tensor in of_module(each, module).items()}
    path = write_folder(tmp_path, tensors, file="gptq_model-4bit-32g.safetensors")
    (path / "quantize_config.json").write_text(
        '{"bits": 4, "group_size": 32, "dynamic": {"-:.*lm_head": {}, "+:.*down": {"bits": 8, "group_size": 80}}}')

    def value(n: int, k: int, module: str, bits: int, group: int) -> float:
        per, tensors = 32 // bits, parts[module]
        zero = bits_of(int(tensors["qzeros"][k // group, n // per]), bits, n % per) + 1
        scale = float(tensors["scales"][k // group, n])
        return (bits_of(int(tensors["qweight"][k // per, n]), bits, k % per) - zero) * scale

    assert_reads(path, {WEIGHT: define(lambda n, k: value(n, k, MODULE, 4, 32)),
                        f"{other}.weight": define(lambda n, k: value(n, k, other, 8, 80))})


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_weights_whose_columns_are_scattered_over_groups(symmetric: bool, tmp_path: Path) -> None:
    parts = compressed_int(weights(), 4, 32, symmetric=symmetric, packed=True)
    parts["weight_g_idx"] = (ORDER // 32).int()
    words, scales, places = (parts[name].tolist() for name in ("weight_packed", "weight_scale", "weight_g_idx"))
    zeros = None if symmetric else parts["weight_zero_point"].tolist()

    def value(n: int, k: int) -> float:
        zero = 8 if zeros is None else bits_of(zeros[n // 8][places[k]], 4, n % 8)
        return (bits_of(words[n][k // 8], 4, k % 8) - zero) * scales[n][places[k]]

    args = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": symmetric,
            "actorder": "group"}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized",
              "config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}
    assert_reads(write_folder(tmp_path, of_module(parts), config=config), {WEIGHT: define(value)})


def test_fp8_whose_last_blocks_are_cut_short_and_fp8_by_tensor(tmp_path: Path) -> None:
    parts = fp8_block(weights(), (64, 48))
    values, scales = parts["weight"].float().tolist(), parts["weight_scale_inv"].tolist()
    config = {"quant_method": "fp8", "weight_block_size": [64, 48]}
    assert_reads(write_folder(tmp_path / "block", of_module(parts), config=config),
                 {WEIGHT: define(lambda n, k: values[n][k] * scales[n // 64][k // 48])})
    whole = fp8_rows(weights(), by_tensor=True)
    numbers, scale = whole["weight"].float().tolist(), whole["weight_scale"].item()
    path = write_folder(tmp_path / "tensor", of_module({**whole, "input_scale": torch.ones(1)}),
                        config={"quant_method": "fp8", "activation_scheme": "static"})
    assert_reads(path, {WEIGHT: define(lambda n, k: numbers[n][k] * scale)})


# -- ModelSlim ---------------------------------------------------------------------------------------------------------


def folder(path: Path, kind: str, parts: dict[str, Tensor], more: dict[str, Any] | None = None, **files: Any) -> Path:
    description = {f"{MODULE}.{name}": "FLOAT" if name == "bias" else kind for name in parts}
    about = {"model_quant_type": kind, "version": "1.0.0", **description, **(more or {})}
    about = {name: value for name, value in about.items() if value is not None}
    return write_folder(path, of_module(parts), description=about, **files)


@pytest.mark.parametrize("kind", ["W8A8_DYNAMIC", "W8A8_MIX", "W8A16"])
def test_modelslim_int8_by_row(kind: str, tmp_path: Path) -> None:
    parts = modelslim_int8(weights(), symmetric=kind != "W8A16")
    values, scales, offsets = (parts[name].tolist() for name in ("weight", "weight_scale", "weight_offset"))
    expected = {WEIGHT: define(lambda n, k: (values[n][k] - offsets[n][0]) * scales[n][0])}
    if kind == "W8A8_MIX":
        parts = {**modelslim_static(weights(), 0.1, 3), **parts}
    assert_reads(folder(tmp_path, kind, parts, file="quant_model_weight_w8a8.safetensors"), expected)


@pytest.mark.parametrize("group", [32, 80])
def test_modelslim_int8_in_groups(group: int, tmp_path: Path) -> None:
    parts = modelslim_int8(weights(), group, symmetric=False)
    values, scales, offsets = (parts[name].tolist() for name in ("weight", "weight_scale", "weight_offset"))
    path = folder(tmp_path, "W8A16", parts, {"group_size": group})
    assert_reads(path, {WEIGHT: define(lambda n, k: (values[n][k] - offsets[n][k // group]) * scales[n][k // group])})


@pytest.mark.parametrize(("layout", "group"), [("rows", 32), ("columns", -1), ("bytes", 32), ("bytes", -1)])
def test_modelslim_int4_weights(layout: str, group: int, tmp_path: Path) -> None:
    parts = modelslim_int4(weights(), group, layout=layout)
    stored, scales = parts["weight"].tolist(), parts["weight_scale"].tolist()
    numbers = {"rows": lambda n, k: nibble(stored[n // 2][k], bool(n % 2)), "bytes": lambda n, k: stored[n][k],
               "columns": lambda n, k: nibble(stored[n][k // 2], bool(k % 2))}[layout]
    version = None if layout == "bytes" else "1.0.0"
    path = folder(tmp_path, "W4A16", parts, {"version": version, "group_size": max(0, group)})
    assert_reads(path, {WEIGHT: define(lambda n, k: numbers(n, k) * scales[n][0 if group == -1 else k // group])})


@pytest.mark.parametrize(("layout", "two_scales"), [("rows", False), ("rows", True), ("bytes", True)])
def test_modelslim_int4_with_inputs_of_8_bits(layout: str, two_scales: bool, tmp_path: Path) -> None:
    parts = modelslim_int4(weights(), layout=layout)
    stored, scales = parts["weight"].tolist(), parts["weight_scale"].numpy()
    second = np.ones((N, 1), dtype=np.float32)
    if two_scales:
        second = torch.rand(N, K // 32, generator=torch.Generator().manual_seed(3)).numpy()
        parts |= {"weight_scale_second": torch.from_numpy(second), "weight_offset_second": torch.zeros(N, K // 32)}
    if layout == "rows":
        parts["scale_bias"] = torch.ones(N, 1)
    groups = K // second.shape[1]
    # Both scales are float32, and so is what they make together.
    scale = (scales.astype(np.float64) * second).astype(np.float32)

    def value(n: int, k: int) -> float:
        number = nibble(stored[n // 2][k], bool(n % 2)) if layout == "rows" else stored[n][k]
        return number * float(scale[n, k // groups])

    path = folder(tmp_path, "W4A8_DYNAMIC", parts, {"group_size": 32 if two_scales else 0})
    assert_reads(path, {WEIGHT: define(value)})


@pytest.mark.parametrize("as_integers", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_modelslim_static_weights_are_free_of_the_scale_and_the_offset_of_inputs(
        with_bias: bool, as_integers: bool, tmp_path: Path) -> None:
    bias = weights(1, N, seed=5)[0] if with_bias else None
    parts = modelslim_static(weights(), 0.0371, -17, bias, as_integers=as_integers)
    deq = parts["deq_scale"]
    scales = (deq.numpy().astype(np.uint32).view(np.float32) if as_integers else deq.numpy()).astype(np.float64)
    values, integers = parts["weight"].numpy().astype(np.int64), parts["quant_bias"].numpy().astype(np.int64)
    # A scale is float32; weights are products with it, rounded once more.
    row_scale = (scales / np.float64(parts["input_scale"].item())).astype(np.float32)
    expected = {WEIGHT: define(lambda n, k: int(values[n, k]) * float(row_scale[n]))}
    own = (integers - 17 * values.sum(1)) * scales
    if bias is not None:
        assert np.abs(own - bias.numpy()).max() <= scales.max(), "it is the float bias, rounded to a unit"
        expected[f"{MODULE}.bias"] = torch.from_numpy(own.astype(np.float32))
    else:
        assert not own.any()
    parts |= {"weight_scale": torch.ones(N, 1), "weight_offset": torch.zeros(N, 1)}  # newer savers
    assert_reads(folder(tmp_path, "W8A8", parts), expected)


def test_a_modelslim_folder_reads_beside_all_that_it_may_hold_more(tmp_path: Path) -> None:
    """An index under another name, copies of norms, scales of the KV cache, a float file that was left."""
    parts, norm = modelslim_int8(weights()), "model.layers.0.input_layernorm"
    own = torch.ones(8)
    tensors = {**of_module(parts), f"{norm}.weight": own, f"{norm}.module.weight": own, f"{norm}.module.bias": 0 * own,
               f"{norm}.bias": 0 * own, "model.layers.0.self_attn.k_proj.kv_cache_scale": own,
               "model.layers.0.self_attn.k_proj.kv_cache_offset": own}
    description = {name: "W8A8_DYNAMIC" for name in tensors} | {
        f"{norm}.weight": "FLOAT", "version": "1.0.0", "kv_cache_type": "C8", "group_size": 0, "metadata": {"quarot": {
            "max_tp_size": 4, "heads_rotation": {"layers": []}}}, "optional": {"quarot": {"rotation_map": {}}},
        "mtp.layers.0.mlp.up_proj.weight": "W8A8_DYNAMIC"}
    name = "quant_model_weights-00001-of-00001.safetensors"
    path = write_folder(tmp_path, tensors, description=description, file=name)
    weight_map = ", ".join(f'"{tensor}": "{name}"' for tensor in tensors)
    (path / "quant_model_weights.safetensors.index.json").write_text(f'{{"weight_map": {{{weight_map}}}}}')
    write_folder(tmp_path / "optional", {"global_rotation": own}, file="quarot.safetensors")
    write_folder(tmp_path / "float", {"left": own})
    (tmp_path / "float" / "model.safetensors").rename(path / "model.safetensors")
    assert set(read_all(path)) == {WEIGHT, f"{norm}.weight"}
