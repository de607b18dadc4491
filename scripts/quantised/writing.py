"""A quantised copy of a checkpoint's folder: which weights are quantised, in which format, and the files. Knows no
layout of a format (formats.py).

N outputs, K inputs, E experts.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from npu_runner.checkpoint.weights_reader import CheckpointReader
from npu_runner.errors import ModelError

from . import formats

_STAY = re.compile(r"embed|lm_head|norm|mlp\.gate\.|shared_expert_gate|pos_embed|merger|in_proj_(a|b|ba)\.|conv1d")
_TOWER = re.compile(r"(^|\.)visual\.")
_FUSED = re.compile(r"\.experts\.(gate_up_proj|down_proj)$")
_DYNAMIC = re.compile(r"\.experts\.|\.down_proj\.weight$")
_SHARD_BYTES = 4 << 30
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
Config = dict[str, Any]
Ranges = Mapping[str, formats.Range | None]
Static = dict[str, formats.Range]


@dataclass(frozen=True)
class Format:
    """`write`: the tensors of one weight (N, K). `config`: quantization_config of config.json; for ModelSlim, what its
    description says of the whole folder, and `modelslim`, the type of each tensor.

    `write_static`: of a weight whose inputs have a static scale, of what these reach, and of its bias, if it has one.
    Experts and down_proj keep dynamic inputs: those weights are `write`'s, of type `dynamic_type`. A row reaches only
    some of the experts, and what down_proj multiplies has a few values that are many times larger than the rest.
    """

    write: Callable[[Tensor], formats.Tensors]
    config: Config
    modelslim: str | None = None
    fuses_experts: bool = False
    write_static: Callable[[Tensor, formats.Range, Tensor | None], formats.Tensors] | None = None
    dynamic_type: str | None = None


_Make = Callable[[int], Format]


def _gptq(bits: int) -> _Make:
    return lambda size: Format(partial(formats.gptq, bits=bits, group_size=size), {
        "quant_method": "gptq", "bits": bits, "group_size": size, "sym": True, "desc_act": False})


def _packed(bits: int, *, symmetric: bool = True) -> _Make:
    return lambda size: _compressed(
        partial(formats.compressed_int, bits=bits, group_size=size, packed=True, symmetric=symmetric), "pack-quantized",
        bits, size, symmetric=symmetric)


def _compressed(write: Callable[[Tensor], formats.Tensors], form: str, bits: int, group_size: int, *,
                symmetric: bool = True, kind: str = "int") -> Format:
    weights: Config = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": "channel", "dynamic": False}
    if group_size > 0:
        weights |= {"strategy": "group", "group_size": group_size}
    inputs = None
    if form != "pack-quantized":
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return Format(write, {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
                          "config_groups": {"group_0": group}, "kv_cache_scheme": None})


def _static() -> Format:
    """Experts and down_proj are a group of their own, found by name before class."""
    dynamic = _compressed(formats.compressed_int, "int-quantized", 8, -1)
    (group,) = dynamic.config["config_groups"].values()
    inputs = {**group["input_activations"], "strategy": "tensor", "dynamic": False}
    groups = {"group_0": {**group, "input_activations": inputs},
              "group_1": {**group, "targets": [r"re:.*\.experts\..*", r"re:.*\.down_proj"]}}
    return replace(dynamic, config={**dynamic.config, "config_groups": groups},
                   write_static=formats.compressed_static)


def _modelslim(write: Callable[[Tensor], formats.Tensors], kind: str, group_size: int = 0) -> Format:
    return Format(write, {"model_quant_type": kind, "version": "1.0.0", "group_size": group_size}, modelslim=kind)


FORMATS: dict[str, _Make] = {
    "fp8-block": lambda size: Format(partial(formats.fp8_block, block=(size, size)),
                                     {**_FP8, "weight_block_size": [size, size]}, fuses_experts=True),
    "fp8-tensor": lambda size: Format(partial(formats.fp8_rows, by_tensor=True), _FP8),
    "fp8-dynamic": lambda size: _compressed(partial(formats.fp8_rows, by_tensor=False), "float-quantized", 8, -1,
                                            kind="float"),
    "w8a8": lambda size: _compressed(formats.compressed_int, "int-quantized", 8, -1),
    "w8a8-static": lambda size: _static(),
    "w8a16": _packed(8), "w4a16": _packed(4), "w4a16-asym": _packed(4, symmetric=False),
    "awq": lambda size: Format(partial(formats.awq, group_size=size), {
        "quant_method": "awq", "bits": 4, "group_size": size, "zero_point": True, "version": "gemm"}),
    "gptq": _gptq(4), "gptq-int8": _gptq(8),
    "modelslim-w8a8": lambda size: replace(
        _modelslim(formats.modelslim_int8, "W8A8"), write_static=formats.modelslim_static_of_range,
        dynamic_type="W8A8_DYNAMIC"),
    "modelslim-w8a8-dynamic": lambda size: _modelslim(formats.modelslim_int8, "W8A8_DYNAMIC"),
    "modelslim-w8a16": lambda size: _modelslim(partial(formats.modelslim_int8, symmetric=False), "W8A16"),
    "modelslim-w4a16": lambda size: _modelslim(partial(formats.modelslim_int4, group_size=size), "W4A16", size),
    "modelslim-w4a8-dynamic": lambda size: _modelslim(formats.modelslim_int4, "W4A8_DYNAMIC"),
}  # fmt: skip
"""By their names on the command line; each takes the size of a group, or of a block's side."""
STATIC = tuple(name for name, make in FORMATS.items() if make(128).write_static is not None)
"""Those whose inputs have scales of their own, which are measured."""


def quantise(source: Path, target: Path, name: str, *, group_size: int = 128, with_tower: bool = False,
             ranges: Ranges | None = None) -> int:
    """Write the checkpoint; returns how many weights are quantised. `ranges`: of the inputs of linears, by name, for
    the formats in STATIC; None where no row went through one.

    Raises ModelError for a size that does not divide, for a linear without a range, and where nothing is to be done.
    """
    form = FORMATS[name](group_size)
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and ".safetensors" not in file.name:
            shutil.copy(file, target / file.name)
    with CheckpointReader(source) as reader:
        chosen = {tensor for tensor in reader.names if _is_chosen(tensor, reader.shape(tensor), with_tower=with_tower)}
        static = _static_weights(form, chosen, ranges or {})
        if form.write_static is not None:  # what the network leaves out stays as it is
            chosen = {tensor for tensor in chosen if tensor in static or _DYNAMIC.search(tensor)}
        if not chosen:
            raise ModelError(f"{source}: no weight is one that {name} is for")
        left = _write(target, reader, form, chosen, static)
    _write_config(target, form, left)
    return len(chosen)


def _is_chosen(name: str, shape: tuple[int, ...], *, with_tower: bool) -> bool:
    is_linear = (len(shape) == 2 and name.endswith(".weight")) or (len(shape) == 3 and _FUSED.search(name) is not None)
    return is_linear and not _STAY.search(name) and (with_tower or not _TOWER.search(name))


def _static_weights(form: Format, chosen: set[str], ranges: Ranges) -> Static:
    """The weights with static inputs, and what these reach."""
    if form.write_static is None:
        return {}
    found = {name: ranges[name.removesuffix(".weight")] for name in chosen
             if name.removesuffix(".weight") in ranges and not _DYNAMIC.search(name)}
    unseen = sorted(name for name, inputs in found.items() if inputs is None)
    if unseen:
        raise ModelError(f"no row went through {unseen[0]} and {len(unseen) - 1} more, so their inputs have no scale; "
                         "calibrate with rows that do (with images, for a tower)")
    return {name: inputs for name, inputs in found.items() if inputs is not None}


def _write(target: Path, reader: CheckpointReader, form: Format, chosen: set[str], static: Static) -> list[str]:
    """In shards of some GiB; returns the linears that stay as they are."""
    weight_map: dict[str, str] = {}
    types: Config = {}
    shard: formats.Tensors = {}
    kind = "quant_model_weights" if form.modelslim else "model"

    def flush() -> None:
        file = f"{kind}-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    with_their_weights = {f"{name.removesuffix('.weight')}.bias" for name in static}
    for name in sorted(reader.names - with_their_weights):
        tensors = _tensors(name, reader, form, static.get(name)) if name in chosen else {name: reader.read(name)}
        tensor_type = form.modelslim if name in static else form.dynamic_type or form.modelslim
        for stored_name, tensor in tensors.items():
            shard[stored_name] = tensor.contiguous()
            types[stored_name] = tensor_type if name in chosen and not stored_name.endswith(".bias") else "FLOAT"
        if sum(tensor.nbytes for tensor in shard.values()) > _SHARD_BYTES:
            flush()
    if shard:
        flush()
    (target / f"{kind}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if form.modelslim:
        (target / "quant_model_description.json").write_text(json.dumps(form.config | types, indent=1))
    return [name.removesuffix(".weight") for name in sorted(reader.names - chosen)
            if name.endswith(".weight") and len(reader.shape(name)) == 2]


def _tensors(name: str, reader: CheckpointReader, form: Format, inputs: formats.Range | None) -> formats.Tensors:
    """The tensors of a quantised weight, by name. `inputs`: of a static one."""
    weight, module = reader.read(name), name.removesuffix(".weight")
    if inputs is not None:
        assert form.write_static is not None, "only such formats have static weights"
        bias_N = reader.read(f"{module}.bias") if f"{module}.bias" in reader.names else None
        return {f"{module}.{suffix}": tensor for suffix, tensor in form.write_static(weight, inputs, bias_N).items()}
    if weight.ndim == 3 and form.fuses_experts:
        written = form.write(weight)
        return {name: written["weight"], f"{name}_scale_inv": written["weight_scale_inv"]}
    found: formats.Tensors = {}
    for part, matrix in _single(name, weight, reader.path) if weight.ndim == 3 else [(name, weight)]:
        try:
            written = form.write(matrix)
        except RuntimeError as error:  # of torch, where groups do not divide
            raise ModelError(f"{part} {list(matrix.shape)} does not divide into such groups: {error}") from error
        found |= {f"{part.removesuffix('.weight')}.{suffix}": tensor for suffix, tensor in written.items()}
    return found


def _single(name: str, experts: Tensor, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Experts of a fused tensor one by one; (E, in, out) and (E, out, in) both occur."""
    prefix, _, kind = name.rpartition(".")
    config = json.loads((folder / "config.json").read_text())
    outputs_first = (experts.shape[2 if kind == "gate_up_proj" else 1]
                     == config.get("text_config", config)["hidden_size"])
    for number, expert in enumerate(experts if outputs_first else experts.transpose(1, 2)):
        halves = zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True)
        for part, matrix in halves if kind == "gate_up_proj" else [(kind, expert)]:
            yield f"{prefix}.{number}.{part}.weight", matrix


def _write_config(target: Path, form: Format, left: list[str]) -> None:
    if form.modelslim:
        return
    config = json.loads((target / "config.json").read_text())
    stay = "ignore" if form.config["quant_method"] == "compressed-tensors" else "modules_to_not_convert"
    config["quantization_config"] = {**form.config, **({} if form.config["quant_method"] == "gptq" else {stay: left})}
    (target / "config.json").write_text(json.dumps(config, indent=2))
