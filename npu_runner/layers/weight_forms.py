"""Chooses the form of the weights of each linear and of each layer's experts: the checkpoint's, where the platform
multiplies it. Reads no weight."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from torch import nn

from npu_runner.checkpoint.formats.stored import NORM_SHIFT
from npu_runner.checkpoint.weights_reader import BY_ROW, WeightsReader, renamed_tensor
from npu_runner.layers.expert_weights import FORMS_OF_EXPERTS, ExpertWeights
from npu_runner.layers.grouped_weights import Held
from npu_runner.layers.linear import ColumnParallelLinear, HeldLinear, form_of
from npu_runner.layers.norm import RMSNorm
from npu_runner.platforms.quantised import FP8, FP8_BLOCKS, INT8

MADE_AT_LOAD: Mapping[str, Held] = {INT8: BY_ROW, FP8: FP8}
"""The form of weights that the setting `quantization` makes."""


def match_experts(model: nn.Module, reader: WeightsReader, renamed: Mapping[str, str]) -> None:
    """Let experts be read as they lie in the checkpoint. `renamed` as in `load_weights`."""
    for name, experts in _experts(model):
        found = renamed_tensor(name.removesuffix("experts"), renamed)
        experts.match_checkpoint(found, reader.names, reader.shape)


def hold_as_stored(model: nn.Module, reader: WeightsReader, renamed: Mapping[str, str]) -> set[str]:
    """Allocate the weights of linears and experts that wait for their form; returns the checkpoint's names of those
    that are held quantised.

    `renamed` as in `load_weights`.
    """
    there = reader.names
    match_experts(model, reader, renamed)
    _add_shifts(model, there, renamed)
    return _hold(model, renamed, lambda name: how_stored(reader, name) if name in there else None)


def _add_shifts(model: nn.Module, there: Collection[str], renamed: Mapping[str, str]) -> None:
    """Where a quantiser moved the outputs of norms, these have a shift, and linears behind them biases of their own."""
    if not any(name.endswith(NORM_SHIFT) for name in there):
        return
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm) and renamed_tensor(f"{name}{NORM_SHIFT}", renamed) in there:
            module.add_shift()
    for name, linear in _linears(model):
        stored = [each.removesuffix("weight") for _, each in _parts(name, linear, renamed)]
        if isinstance(linear, ColumnParallelLinear) and any(f"{each}bias" in there for each in stored):
            linear.add_bias()


def how_stored(reader: WeightsReader, name: str) -> Held | None:
    """None means that it is dequantised on every platform, or of 16 bits."""
    return reader.int8_inputs(name) or reader.fp8_form(name) or reader.grouped_form(name)


def names_to_round(model: nn.Module, renamed: Mapping[str, str], how: Held = BY_ROW) -> set[str]:
    """The checkpoint's names of weights that `quantization` means: those of the decoder's linears and experts, as
    `match_experts` found them, and of a tower's blocks, as far as weights that are held as `how` have matmuls.

    Embeddings, output head, routers, gates, convolutions and mergers stay as they are, and so does the last linear of a
    tower's MLPs.
    """
    parts = [getattr(model, "decoder", model)]
    if (tower := getattr(model, "visual", None)) is not None:
        parts.append(tower.blocks)
    inside = {id(module) for part in parts for module in part.modules()}
    of_linears = {stored for name, linear in _linears(model) if id(linear) in inside and linear.can_be_quantized(how)
                  for part, stored in _parts(name, linear, renamed) if part not in linear.gates}
    if form_of(how) not in FORMS_OF_EXPERTS:
        return of_linears | names_in_blocks(model, renamed, how)
    return of_linears | {stored for name, experts in _experts(model) if id(experts) in inside
                         for stored in _expert_names(name, experts, renamed)}


def names_in_blocks(model: nn.Module, renamed: Mapping[str, str], how: Held) -> set[str]:
    """The names among `names_to_round` that get scales of blocks: FP8 of experts, without a matmul of FP8 by row."""
    if form_of(how) != FP8:
        return set()
    inside = set(getattr(model, "decoder", model).modules())
    return {stored for name, experts in _experts(model) if experts in inside and experts.has_whole_blocks
            for stored in _expert_names(name, experts, renamed)}


def turned_stacks(model: nn.Module, renamed: Mapping[str, str]) -> set[str]:
    """The checkpoint's names of experts' tensors that lie as (experts, inputs, outputs)."""
    return {stored for name, experts in _experts(model) if experts.layout == "fused_transposed"
            for stored in _expert_names(name, experts, renamed)}


def forms_of_random(how: Held | None, weight_forms: Collection[str], *, is_made: bool) -> tuple[str, ...]:
    """The forms of a model with random weights. `how` as of `hold_rounded`; `weight_forms`: of the platform. `is_made`:
    by `quantization`, and not what the checkpoint has."""
    form = "" if how is None else form_of(how)
    of_experts = FORMS_OF_EXPERTS.get(FP8_BLOCKS if is_made and form == FP8 else form)
    return tuple(each for each in (form, of_experts) if each is not None and each in weight_forms)


def hold_rounded(model: nn.Module, how: Held = BY_ROW) -> None:
    """`hold_as_stored` without a checkpoint: `how`, as `HeldLinear.hold` takes it, where `quantization` makes
    such weights of 16 bits."""
    meant, in_blocks = names_to_round(model, {}, how), names_in_blocks(model, {}, how)
    _hold(model, {}, lambda name: FP8_BLOCKS if name in in_blocks else how if name in meant else None)


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
    for name, experts in _experts(model):
        stored_names = _expert_names(name, experts, renamed)
        if not experts.is_held:
            found = [inputs_of(stored) for stored in stored_names]
            experts.hold([None if each is None else form_of(each) for each in found])
        if experts.form is not None:
            held |= stored_names
    return held


def _linears(model: nn.Module) -> Iterator[tuple[str, HeldLinear]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, HeldLinear))


def _experts(model: nn.Module) -> Iterator[tuple[str, ExpertWeights]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, ExpertWeights))


def _expert_names(name: str, experts: ExpertWeights, renamed: Mapping[str, str]) -> set[str]:
    """The checkpoint's names of all experts' tensors."""
    prefix = name.removesuffix("experts")
    return {renamed_tensor(prefix + part.name, renamed) for parts in experts.weight_parts.values() for part in parts}


def _parts(name: str, linear: HeldLinear, renamed: Mapping[str, str]) -> list[tuple[str, str]]:
    """The name of each part of the weight, and the checkpoint's name of its tensor."""
    parent = name.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    return [(part.name, renamed_tensor(prefix + part.name, renamed)) for part in linear.weight_parts["weight"]]
