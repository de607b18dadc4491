"""Which form the weight of each linear has: as the checkpoint stores it, where the platform multiplies that. Reads no
weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from npu_runner.checkpoint.weights_reader import WeightsReader, renamed_tensor
from npu_runner.layers.linear import HeldLinear
from npu_runner.platforms.ops import INT8


def hold_as_stored(model: nn.Module, reader: WeightsReader, renamed: Mapping[str, str]) -> set[str]:
    """Allocate the weights of linears that wait for their form; returns the checkpoint's names of those held as int8.

    A product is int8 where all that it is made of is, else of the model's dtype. `renamed` as in `load_weights`.
    """
    held: set[str] = set()
    for name, linear in _linears(model):
        stored = _stored_names(name, linear, renamed)
        if not linear.is_held:
            is_int8 = INT8 in linear.forms and stored <= reader.names and all(map(reader.is_int8, stored))
            linear.hold(INT8 if is_int8 else None)
        if linear.scales is not None:
            held |= stored
    return held


def names_to_round(model: nn.Module, renamed: Mapping[str, str]) -> set[str]:
    """The checkpoint's names of weights that `quantization` int8 means: those of the decoder's linears.

    Embeddings, output head, routers, gates, convolutions and towers stay as they are.
    """
    decoder = getattr(model, "decoder", model)
    inside = {id(module) for module in decoder.modules()}
    return {stored for name, linear in _linears(model) if id(linear) in inside and not linear.has_gates
            for stored in _stored_names(name, linear, renamed)}


def hold_rounded(model: nn.Module) -> None:
    """`hold_as_stored` of a checkpoint in 16 bits, without one: int8 where `quantization` int8 makes it so."""
    meant = names_to_round(model, {})
    for name, linear in _linears(model):
        if not linear.is_held:
            linear.hold(INT8 if INT8 in linear.forms and _stored_names(name, linear, {}) <= meant else None)


def hold_as_floats(model: nn.Module) -> None:
    """All of the model's dtype."""
    for _, linear in _linears(model):
        if not linear.is_held:
            linear.hold(None)


def _linears(model: nn.Module) -> Iterator[tuple[str, HeldLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, HeldLinear))


def _stored_names(name: str, linear: HeldLinear, renamed: Mapping[str, str]) -> set[str]:
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return {renamed_tensor(prefix + part.name, renamed) for part in linear.weight_parts["weight"]}
