"""Which form the weight of each linear has: as the checkpoint stores it, where the platform multiplies that. Reads no
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn

from npu_runner.checkpoint.weights_reader import BY_ROW, WeightsReader, renamed_tensor
from npu_runner.layers.grouped_weights import Held
from npu_runner.layers.linear import HeldLinear, form_of


def hold_as_stored(model: nn.Module, reader: WeightsReader, renamed: Mapping[str, str]) -> set[str]:
    """Allocate the weights of linears that wait for their form; returns the checkpoint's names of those that are held
    quantised.

    `renamed` as in `load_weights`.
    """
    there = reader.names
    return _hold(model, renamed, lambda name: how_stored(reader, name) if name in there else None)


def how_stored(reader: WeightsReader, name: str) -> Held | None:
    """None: it is dequantised on every platform, or of 16 bits."""
    return reader.int8_inputs(name) or reader.fp8_form(name) or reader.grouped_form(name)


def names_to_round(model: nn.Module, renamed: Mapping[str, str]) -> set[str]:
    """The checkpoint's names of weights that `quantization` int8 means: those of the decoder's linears, and of a
    tower's blocks.

    Embeddings, output head, routers, gates, convolutions and mergers stay as they are, and so does the last linear of a
    tower's MLPs.
    """
    parts = [getattr(model, "decoder", model)]
    if (tower := getattr(model, "visual", None)) is not None:
        parts.append(tower.blocks)
    inside = {id(module) for part in parts for module in part.modules()}
    return {stored for name, linear in _linears(model) if id(linear) in inside and not linear.stays
            for part, stored in _parts(name, linear, renamed) if part not in linear.gates}


def hold_rounded(model: nn.Module, how: Held = BY_ROW) -> None:
    """`hold_as_stored` without a checkpoint: `how`, as `HeldLinear.hold` takes it, where `quantization` int8 makes int8
    of 16 bits."""
    meant = names_to_round(model, {})
    _hold(model, {}, lambda name: how if name in meant else None)


def hold_as_floats(model: nn.Module) -> None:
    """All of the model's dtype."""
    _hold(model, {}, lambda name: None)


def _hold(model: nn.Module, renamed: Mapping[str, str],
          inputs_of: Callable[[str], Held | None]) -> set[str]:
    held: set[str] = set()
    for name, linear in _linears(model):
        if not linear.is_held:
            found = [inputs_of(stored) if linear.forms else None for _, stored in _parts(name, linear, renamed)]
            linear.hold([each if each is not None and form_of(each) in linear.forms else None for each in found])
        if linear.scales is not None:
            held |= {stored for _, stored in _parts(name, linear, renamed)}
    return held


def _linears(model: nn.Module) -> Iterator[tuple[str, HeldLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, HeldLinear))


def _parts(name: str, linear: HeldLinear, renamed: Mapping[str, str]) -> list[tuple[str, str]]:
    """Of each part of the weight its name, and the checkpoint's name of the tensor."""
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return [(part.name, renamed_tensor(prefix + part.name, renamed)) for part in linear.weight_parts["weight"]]
