"""Fills a model's parameters from a checkpoint. Every tensor must be accounted for, on both sides.

`weight_parts` of a module lists the checkpoint tensors (or slices) that make up its parameters. A parameter without an
entry is the tensor of its own name, plus the module's `weight_offset`. A module that computes something from its
parameters does so in `weights_are_loaded()`, which is called once they are filled.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import nn

from npu_runner.checkpoint.weights_reader import BY_ROW, WeightsReader, renamed_tensor
from npu_runner.errors import WeightsError
from npu_runner.layers import grouped_weights
from npu_runner.layers.grouped_weights import Held
from npu_runner.layers.linear import HeldLinear
from npu_runner.layers.parallel import WeightPart
from npu_runner.layers.weight_forms import hold_as_stored, hold_rounded
from npu_runner.platforms.quantised import FP8_BLOCK

logger = logging.getLogger(__name__)

_RANDOM_SCALE = 0.02 / 73
"""Makes random int8 as large as other random weights: even ones up to 127 deviate by 73."""
_DTYPES = ("F64", "F32", "F16", "BF16")
# Buffers that old checkpoints stored and every model computes.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)


def load_weights(model: nn.Module, reader: WeightsReader, *, ignored: tuple[str, ...] = (),
                 ignored_prefixes: tuple[str, ...] = (), renamed: Mapping[str, str] | None = None) -> int:
    """Copy this rank's slices of every tensor into `model`; returns the bytes read.

    `ignored`: checkpoint names that the model does without, or how they begin; those that begin so are logged.
    `renamed`: how names begin in the checkpoint, by how they begin here; the first that fits counts, and a `*` in both
    is the number of a layer. Raises WeightsError naming every missing, left-over or misshapen tensor before anything is
    read.
    """
    hold_as_stored(model, reader, renamed or {})
    wanted = [each._replace(part=dataclasses.replace(each.part, name=renamed_tensor(each.part.name, renamed or {})))
              for each in _wanted(model)]
    left_out = {name for name in reader.names if name.startswith(ignored_prefixes)}
    if left_out:
        logger.info("%d tensors of %s are left out: %s", len(left_out), reader.path, ", ".join(ignored_prefixes))
    _check(wanted, reader, {*ignored, *left_out})
    num_bytes = sum(_fill(each, reader) for each in wanted)
    _weights_are_loaded(model)
    return num_bytes


def expected_tensors(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name and whole shape of every checkpoint tensor that `model` is loaded from."""
    return {part.name: part.shape for _, part, *_ in _wanted(model)}


def fill_with_random_weights(model: nn.Module, seed: int, how: Held = BY_ROW) -> None:
    """Small random values for every parameter, made on its device, for real shapes and speed. `how`: as
    of `hold_rounded`."""
    hold_rounded(model, how)
    for index, (name, parameter) in enumerate(model.named_parameters()):
        generator = torch.Generator(device=parameter.device).manual_seed(seed + index)
        if name.endswith("norm.weight") or "norm" in name.rsplit(".", 2)[-2]:
            parameter.data.fill_(1.0)
        elif parameter.dtype == torch.int8:
            parameter.data.random_(-127, 128, generator=generator)
        elif parameter.dtype == torch.uint8:
            parameter.data.random_(0, 256, generator=generator)
        elif name.endswith(".zeros"):
            parameter.data.fill_(1.0)
        elif parameter.dtype == torch.float8_e4m3fn:
            whole = torch.randint(-127, 128, parameter.shape, generator=generator, device=parameter.device,
                                  dtype=torch.int8)
            parameter.data.copy_(whole.to(torch.bfloat16))
        elif name.endswith("scales"):
            parameter.data.fill_(_RANDOM_SCALE)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    _weights_are_loaded(model)


class _Wanted(NamedTuple):
    """A parameter, the tensor that fills it or a part of it, and where it is quantised its scales; where the sums of
    its rows are wanted, the parameter for them."""

    parameter: nn.Parameter
    part: WeightPart
    scales: nn.Parameter | None
    sums: nn.Parameter | None
    grouped: grouped_weights.GroupedParameters | None = None


def _fill(wanted: _Wanted, reader: WeightsReader) -> int:
    """The bytes that were copied."""
    parameter, part, scales, sums, grouped = wanted
    if part.is_elsewhere:
        return 0
    if grouped is not None:
        return grouped_weights.fill(grouped, part, reader)
    target, num_bytes = part.place(parameter.data), 0
    if scales is not None:
        own = scales.data if part.index is None else scales.data[part.index]
        if own.dim() == 2:
            return _fill_blocks(target, own, part, reader)
        scales_O = own.narrow(0, part.target_start, part.length) if part.dim == 0 else own
        for rows, values, scales_R in reader.row_pieces(part.name + part.member, part.dim, part.start, part.length):
            target[rows].copy_(values)
            scales_O[rows].copy_(scales_R)
            if sums is not None:
                sums_O = sums.data.narrow(0, part.target_start, part.length) if part.dim == 0 else sums.data
                sums_O[rows].add_(values.sum(1, dtype=torch.int32).to(sums_O.device))
            num_bytes += values.nbytes + scales_R.nbytes
        return num_bytes
    for taken, values in reader.pieces(part.name, part.dim, part.start, part.length):
        target[taken].copy_(values)
        num_bytes += values.nbytes
    if part.offset:
        target.add_(part.offset)
    return num_bytes


def _fill_blocks(target: torch.Tensor, scales: torch.Tensor, part: WeightPart, reader: WeightsReader) -> int:
    """`scales`: (rows / 128, columns / 128)."""
    asked = (part.name + part.member, part.dim, part.start, part.length)
    num_bytes = 0
    for rows, values in reader.fp8_pieces(*asked):
        target[rows].copy_(values)
        num_bytes += values.nbytes
    found = reader.fp8_scales(*asked)
    own = scales.narrow(0, part.target_start // FP8_BLOCK, len(found)) if part.dim == 0 else scales
    own.copy_(found)
    return num_bytes + found.nbytes


def _weights_are_loaded(model: nn.Module) -> None:
    for module in model.modules():
        derive = getattr(module, "weights_are_loaded", None)
        if derive is not None:
            derive()


def _wanted(model: nn.Module) -> Iterator[_Wanted]:
    """Each parameter once even where two modules share it; parts with their full checkpoint names."""
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        declared: dict[str, list[WeightPart]] = getattr(module, "weight_parts", {})
        parent, _, own_name = module_name.rpartition(".")
        prefix = f"{parent}." if parent else ""
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            offset = getattr(module, "weight_offset", 0.0)
            parts = declared.get(name, [WeightPart(f"{own_name}.{name}", tuple(parameter.shape), offset=offset)])
            scales = getattr(module, "scales" if name == "weight" else f"{name}_scales", None)
            sums = None if scales is None else getattr(module, "shifts", None)
            grouped = module.grouped if scales is not None and isinstance(module, HeldLinear) else None
            for part in parts:
                yield _Wanted(parameter, dataclasses.replace(part, name=prefix + part.name), scales, sums, grouped)


def _check(wanted: list[_Wanted], reader: WeightsReader, ignored: set[str]) -> None:
    expected = {part.name: part.shape for _, part, *_ in wanted}
    left_over = {name for name in reader.names - set(expected) - ignored if not name.endswith(_IGNORED_SUFFIXES)}
    problems = [f"missing: {name} {list(expected[name])}" for name in sorted(set(expected) - reader.names)]
    problems += [f"left over: {name} {list(reader.shape(name))}" for name in sorted(left_over)]
    for name in sorted(set(expected) & reader.names):
        actual, right = reader.shape(name), expected[name]
        if actual != right:
            turned = " (its last two dims the other way round)" if actual == (*right[:-2], *right[:-3:-1]) else ""
            problems.append(f"misshapen: {name} is {list(actual)}, config.json makes it {list(right)}{turned}")
        if reader.dtype(name) not in _DTYPES:
            problems.append(f"of another type: {name} holds {reader.dtype(name)}, and nothing in the folder says "
                            "that it is quantised")
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise WeightsError(f"{reader.path}: the weights do not fit the config:\n  {shown}")
