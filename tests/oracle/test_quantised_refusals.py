"""Kinds of quantised weights that are not read are refused by name, and checkpoints that lie are errors: before weights
are read, wherever headers and small tensors tell.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from npu_runner.checkpoint.formats.reader import open_weights
from npu_runner.checkpoint.quantization import read_quantization
from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError, WeightsError
from scripts.quantised.formats import (
    awq,
    compressed_int,
    fp8_block,
    fp8_rows,
    gptq,
    modelslim_int4,
    modelslim_int8,
    modelslim_static,
)
from tests.oracle.quantised_folders import MODULE, of_module, read_all, weights, write_folder

Parts = dict[str, Tensor]
PACKED = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
ASYMMETRIC = {**PACKED, "symmetric": False}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {**INT8, "type": "float"}


def compressed(form: str = "pack-quantized", weights: Any = PACKED, **more: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": form,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, **more}


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}

KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "MXFP4": ({"quant_method": "mxfp4"}, "mxfp4"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    "ModelOpt": ({"quant_method": "modelopt"}, "modelopt"),
    "NVFP4": (compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float"}), "nvfp4-pack-quantized, float of 4"),
    "MXFP8": (compressed("mxfp8-quantized", {"num_bits": 8, "type": "float"}), "mxfp8-quantized"),
    "3 bits": (compressed(weights={**PACKED, "num_bits": 3}), "pack-quantized, int of 3 bits"),
    "sparse": (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse: sparse-24-bitmask"),
    "rotations": (compressed(transform_config={"config_groups": {"R1": {}}}), "rotations at run time"),
    "not compressed": (compressed(quantization_status="frozen"), "quantization_status 'frozen'"),
    "a scheme": ({"quant_method": "compressed-tensors", "config_groups": {"NVFP4": ["Linear"]}}, "scheme 'NVFP4'"),
    "a strategy": (compressed(weights={**PACKED, "strategy": "attn_head"}), "strategy 'attn_head'"),
    "FP8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fp8, fmt e5m2"),
    "FP8 blocks": ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
    "AWQ gemv": ({**AWQ, "version": "gemv"}, "version 'gemv'"),
    "AWQ 8 bits": ({**AWQ, "bits": 8}, "8 bits"),
    "GPTQ marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
    "GPTQ 3 bits": ({**GPTQ, "bits": 3}, "gptq, 3 bits"),
}


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_that_is_not_read_is_refused_by_name(name: str, tmp_path: Path) -> None:
    config, words = KINDS[name]
    path = write_folder(tmp_path, of_module(gptq(weights(), 4, 32)), config=config)
    with pytest.raises(ModelError) as caught:
        read_all(path)
    assert words in str(caught.value)
    assert "fp8, compressed-tensors, AWQ, GPTQ and ModelSlim are read" in str(caught.value)


@pytest.mark.parametrize(("more", "words"), [
    ({f"{MODULE}.weight": "W4A4_FLATQUANT_DYNAMIC"}, f"W4A4_FLATQUANT_DYNAMIC ({MODULE}.weight)"),
    ({f"{MODULE}.weight": "W8A8_MXFP8"}, "W8A8_MXFP8"),
    ({f"{MODULE}.weight": "W8A8S"}, "W8A8S"),
    ({"fa_quant_type": "FAQuant"}, "fa_quant_type FAQuant"),
    ({"metadata": {"quarot": {"heads_rotation": {"layers": [0]}}}}, "QuaRot with heads_rotation"),
])
def test_a_type_of_modelslim_that_is_not_read_is_refused_by_name(more: dict[str, Any], words: str, tmp_path: Path
                                                                 ) -> None:
    description = {f"{MODULE}.weight": "W8A8_DYNAMIC", "version": "1.0.0", **more}
    path = write_folder(tmp_path, of_module(modelslim_int8(weights())), description=description)
    with pytest.raises(ModelError) as caught:
        read_all(path)
    assert words in str(caught.value)


@pytest.mark.parametrize(("name", "values", "words"), [
    ("model.layers.0.input_layernorm.module.weight", torch.zeros(8), r"input_layernorm\.module\.weight is no copy"),
    ("model.layers.0.input_layernorm.module.bias", torch.ones(8), r"input_layernorm\.module\.bias is no copy"),
    (f"{MODULE}.div.mul_scale", torch.ones(8), "multiplied at run time, div.mul_scale"),
])
def test_what_modelslim_would_compute_at_run_time_is_refused(name: str, values: Tensor, words: str, tmp_path: Path
                                                             ) -> None:
    tensors = {**of_module(modelslim_int8(weights())), "model.layers.0.input_layernorm.weight": torch.ones(8),
               name: values}
    path = write_folder(tmp_path, tensors, description={f"{MODULE}.weight": "W8A8_DYNAMIC"})
    with pytest.raises(ModelError, match=words):
        read_all(path)


def slim(kind: str) -> dict[str, Any]:
    return {"description": {f"{MODULE}.weight": kind, "version": "1.0.0", "group_size": 32 if kind == "W4A16" else 0}}


def cut(name: str, rows: int = 1) -> Callable[[Parts], None]:
    return lambda parts: parts.update({name: parts[name][:-rows]})


def put(name: str, values: Any) -> Callable[[Parts], None]:
    return lambda parts: parts.update({name: values(parts[name]) if callable(values) else values})


def lose(name: str) -> Callable[[Parts], None]:
    return lambda parts: parts.__delitem__(name)


PACK, ROWS8 = lambda: compressed_int(weights(), 4, 32, packed=True), lambda: compressed_int(weights())
LIES: dict[str, tuple[Callable[[], Parts], Callable[[Parts], None], dict[str, Any], str]] = {
    "float bytes under int8": (ROWS8, put("weight", weights()), {"config": compressed("int-quantized", INT8)},
                               "of another type: {}.weight holds F32, its format I8"),
    "int8 under fp8": (lambda: fp8_rows(weights(), by_tensor=False), put("weight", lambda x: x.to(torch.int8)),
                       {"config": compressed("float-quantized", FLOAT8)}, "holds I8, its format F8_E4M3"),
    "floats with a scale of fp8": (lambda: fp8_block(weights(), (32, 32)), put("weight", weights()), {"config": FP8},
                                   "{}.weight holds F32, its scale makes it F8_E4M3"),
    "float bytes under W8A8_DYNAMIC": (lambda: modelslim_int8(weights()), put("weight", weights()),
                                       slim("W8A8_DYNAMIC"), "{}.weight holds F32, its format I8"),
    "int8 under FLOAT": (lambda: modelslim_int8(weights()), lambda parts: None, slim("FLOAT"),
                         "{}.weight holds I8, its type is FLOAT"),
    "no scale": (lambda: fp8_block(weights(), (32, 32)), lose("weight_scale_inv"), {"config": FP8},
                 "missing: {}.weight_scale_inv [3, 5]"),
    "no zeros": (lambda: compressed_int(weights(), 4, 32, packed=True, symmetric=False), lose("weight_zero_point"),
                 {"config": compressed(weights=ASYMMETRIC)}, "missing: {}.weight_zero_point [12, 5]"),
    "no zeros of AWQ": (lambda: awq(weights(), 32), lose("qzeros"), {"config": AWQ}, "missing: {}.qzeros [5, 12]"),
    "no order": (lambda: gptq(weights(), 4, 32), lose("g_idx"), {"config": {**GPTQ, "desc_act": True}},
                 "missing: {}.g_idx [160]"),
    "a scale cut short": (PACK, cut("weight_scale"), {"config": compressed()},
                          "{}.weight_scale is [95, 5], its weight makes it [96, 5]"),
    "words cut short": (PACK, cut("weight_packed"), {"config": compressed()}, "{}.weight_packed is [95, 20]"),
    "a shape that is not": (PACK, put("weight_shape", torch.tensor([96, 168])), {"config": compressed()},
                            "{}.weight_packed is [96, 20], its weight makes it [96, 21]"),
    "blocks of another size": (lambda: fp8_block(weights(), (64, 64)), lambda parts: None, {"config": FP8},
                               "{}.weight_scale_inv is [2, 3], its weight makes it [3, 5]"),
    "a group that does not divide": (lambda: awq(weights(), 32), lambda parts: None,
                                     {"config": {**AWQ, "group_size": 48}}, "160 inputs do not divide into groups"),
    "groups of another size": (lambda: modelslim_int4(weights(), 80), lambda parts: None, slim("W4A16"),
                               "{}.weight_scale is [96, 2]; 160 inputs"),
    "a static scale lost": (lambda: modelslim_static(weights(), 0.1, 3), lose("deq_scale"), slim("W8A8"),
                            "missing: {}.deq_scale [96]"),
    "offsets of symmetric weights": (lambda: modelslim_int8(weights()), put("weight_offset", torch.ones(96, 1)),
                                     slim("W8A8_DYNAMIC"), "not zero: {}.weight_offset"),
    "nothing quantised": (lambda: {"weight": weights()}, lambda parts: None, {"config": GPTQ},
                          "say that weights are quantised (gptq), and no tensor is"),
    "ignored, and quantised": (PACK, lambda parts: None, {"config": compressed(ignore=["re:.*mlp.*"])},
                               "{} has quantised weights, and ignore of config.json names it"),
    "for no group": (PACK, lambda parts: None, {"config": {**compressed(), "config_groups": {
        "group_0": {"targets": ["re:lm_head"], "weights": PACKED}}}}, "no group of config.json targets it"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_checkpoint_that_lies_is_an_error_that_names_the_tensor(
        name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, spoil, files, words = LIES[name]
    parts = make()
    spoil(parts)
    path = write_folder(tmp_path, of_module(parts), **files)
    monkeypatch.setattr(CheckpointReader, "read_block", lambda *_: pytest.fail("a weight is read"))
    with pytest.raises(WeightsError) as caught, open_weights(path, read_quantization(path)):
        """Opened, it would be read."""
    assert words.format(MODULE) in str(caught.value)
    assert "copy the checkpoint again from its source" in str(caught.value)


@pytest.mark.parametrize(("make", "spoil", "files", "words"), [
    (lambda: gptq(weights(), 4, 32), put("g_idx", torch.full((160,), 9, dtype=torch.int32)), {"config": GPTQ},
     "g_idx names groups 9 to 9, and there are scales of 5"),
    (lambda: modelslim_static(weights(), 0.1, 3), put("input_scale", torch.zeros(1)), slim("W8A8"),
     "input_scale is 0.0 and .*a scale of inputs is above 0"),
    (lambda: modelslim_static(weights(), 0.1, 3), put("quant_bias", lambda x: x + 40), slim("W8A8"),
     "quant_bias holds a bias of 40 units beside the offset"),
], ids=["places", "input scale", "a bias that would be lost"])
def test_what_only_values_tell_is_an_error_while_reading(
        make: Callable[[], Parts], spoil: Callable[[Parts], None], files: dict[str, Any], words: str, tmp_path: Path
) -> None:
    parts = make()
    spoil(parts)
    path = write_folder(tmp_path, of_module(parts), **files)
    with pytest.raises(WeightsError, match=words):
        read_all(path)
