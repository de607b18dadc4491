"""The names inside transformers that are not public, all of them: a release that has no more of one fails here alone.

Every function imports what it needs when it is called, as transformers is imported only for a model that it serves.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from npu_runner.checkpoint.formats.stored import NORM_SHIFT
from npu_runner.checkpoint.renamed_weights import Chunk
from npu_runner.errors import WeightsError

_STACKED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""Names of an expert's matrices in ours, by the stack that transformers makes of them."""


def keeps_states(model_class: Any) -> bool:
    """Whether the class says that its layers keep a state of another kind than keys and values."""
    return bool(getattr(model_class, "_is_stateful", False))


def calls_attention_by_name(model_class: Any) -> bool:
    """Whether its attention goes through transformers' attention interface."""
    return bool(model_class._can_set_attn_implementation())


def eager_mask() -> Callable[..., Any]:
    """The function that makes a whole mask, with the lowest number of the dtype where a key is hidden."""
    from transformers.masking_utils import eager_mask as function

    made: Callable[..., Any] = function
    return made


def own_attention_function(module: nn.Module) -> Callable[..., Any]:
    """The attention function in the file of the class of `module`, which defines what its other kernels compute."""
    function: Callable[..., Any] = sys.modules[type(module).__module__].eager_attention_forward
    return function


def lead_attention(network: Any, name: str) -> None:
    """Have the decoder call the attention function that is registered as `name`; a tower's stays as it is."""
    for module in network.get_decoder().modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = name


@contextmanager
def other_attention(network: Any, name: str, afterwards: str) -> Iterator[None]:
    """While entered, the decoder calls the attention function that is registered as `name`."""
    lead_attention(network, name)
    try:
        yield
    finally:
        lead_attention(network, afterwards)


def make_network(model_class: Any, config: Any, attention: str, dtype: torch.dtype) -> Any:
    """A network with parameters on the meta device and with real buffers, which no file has. Its decoder calls the
    attention function of the name `attention`. Parameters that
    transformers keeps in float32 beside `dtype` are of float32."""
    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter | None:
        return None if parameter.is_meta else nn.Parameter(parameter.to("meta"), requires_grad=False)

    hook = register_module_parameter_registration_hook(without_memory)
    try:
        network = model_class._from_config(config, dtype=dtype)
    finally:
        hook.remove()
    in_float32 = [re.compile(pattern.replace("*", ".*")) for pattern in network._get_dtype_plan(dtype)]
    for name, parameter in network.named_parameters():
        if any(pattern.search(name) for pattern in in_float32):
            parameter.data = parameter.data.float()
    lead_attention(network, attention)
    return network.eval()


def tp_plan(network: Any) -> dict[str, str]:
    """transformers' plan for its own tensor parallelism: a style for each linear, by name, with * for numbers."""
    return dict(network.tp_plan)


def turned_linear() -> type[nn.Module]:
    """The class of linears whose weight lies as (inputs, outputs)."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D


def experts_of(module: nn.Module) -> tuple[int, int, int] | None:
    """The number of experts, the hidden size and the width of a module of experts that computes down(silu(gate) * up),
    both of stacks that are its only parameters; None for another."""
    from transformers.activations import ACT2FN
    from transformers.integrations.moe import _default_apply_gate

    stacks, kind = dict(module.named_parameters()), type(module)
    flags = [getattr(module, name, None)
             for name in ("has_gate", "is_concatenated", "has_bias", "has_post_expert_norm")]
    is_usual = (flags == [True, True, False, False]
                and isinstance(getattr(module, "act_fn", None), (nn.SiLU, type(ACT2FN["silu"])))
                and getattr(kind, "_apply_gate", None) is _default_apply_gate)
    if not is_usual or set(stacks) != {"gate_up_proj", "down_proj"}:
        return None
    num_experts, *sizes = stacks["down_proj"].shape
    hidden_size, width = sizes[::-1] if module.is_transposed else sizes
    return num_experts, hidden_size, width


def tied_names(network: Any) -> dict[str, str]:
    """Parameters that are others of the network, by name."""
    return dict(network.all_tied_weights_keys)


def stored_names(network: Any, stored: Collection[str]) -> dict[str, str | Chunk]:
    """The stored name of each tensor, by its name in `network`, as transformers made it; tensors that transformers
    ignores are left out. A tensor that is no tensor of the network keeps its stored name.

    An expert's matrices, which the network has in stacks, are called experts.0.gate_proj.weight, up_proj and
    down_proj. Raises WeightsError for tensors that transformers converts in another way.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(network)
    renamings = [each for each in transforms if isinstance(each, WeightRenaming)]
    converters = {pattern: each for each in transforms if isinstance(each, WeightConverter)
                  for pattern in each.source_patterns}
    given = [each for each in transforms if isinstance(each, WeightConverter)]
    known, prefix, ignored = dict.fromkeys(network.state_dict(), True), network.base_model_prefix, _ignored(network)
    found: dict[str, str | Chunk] = {}
    problems = []
    for name in sorted(stored, key=_natural):
        # The reader of ModelSlim's files calls the bias of any norm so.
        as_bias = f"{name.removesuffix(NORM_SHIFT)}.bias" if name.endswith(NORM_SHIFT) else name
        ours, pattern = rename_source_key(as_bias, renamings, given, prefix, known)
        if ours not in known and name in known:
            ours, pattern = rename_source_key(name, [], [], prefix, known)
        if ours not in known and any(each.search(ours) for each in ignored):
            continue
        chunks = _chunks_of(name, ours, converters[pattern]) if pattern is not None else {}
        if chunks and chunks.keys() <= known.keys():
            problems += [f"{name} and {found[part]} are both {part}" for part in chunks.keys() & found.keys()]
            found.update(chunks)
            continue
        if pattern is not None and ours in known:
            matrix = _matrix_of_expert(name, ours, converters[pattern], pattern)
            if matrix is None:
                operations = ", ".join(type(each).__name__ for each in converters[pattern].operations)
                problems.append(f"{name}: transformers makes {ours} of it by {operations}")
            ours = matrix or name
        elif ours not in known:
            ours = name
        if ours in found:
            problems.append(f"{name} and {found[ours]} are both {ours}")
        found[ours] = name
    if problems:
        shown = "\n  ".join(problems[:20]) + (f"\n  and {len(problems) - 20} more" if len(problems) > 20 else "")
        raise WeightsError(f"these tensors are not read as they are stored, which is not supported:\n  {shown}")
    return _without_tied(found, tied_names(network))


def _chunks_of(name: str, first: str, converter: Any) -> dict[str, Chunk]:
    """The tensors that transformers makes of a stored one by cutting it; `first`: the name of the first."""
    targets = list(converter.target_patterns)
    operations = [(type(each).__name__, getattr(each, "dim", None), getattr(each, "num_shards_attribute", None))
                  for each in converter.operations]
    if operations != [("Chunk", 0, None)] or targets[0] not in first:
        return {}
    return {first.replace(targets[0], target): Chunk(name, index, len(targets)) for index, target in enumerate(targets)}


def _without_tied(found: dict[str, str | Chunk], tied: dict[str, str]) -> dict[str, str | Chunk]:
    """The file may have either of two tied tensors, or both."""
    for target, source in tied.items():
        if target in found:
            stored = found.pop(target)
            found.setdefault(source, stored)
    return found


def _matrix_of_expert(name: str, stack: str, converter: Any, pattern: str) -> str | None:
    home, _, own = stack.rpartition(".")
    operations = [(type(each).__name__, getattr(each, "dim", None)) for each in converter.operations]
    matrices = _STACKED.get(own, ())
    if operations != [("MergeModulelist", 0), ("Concatenate", 1)][:len(matrices)]:
        return None
    numbers = re.findall(r"\.(\d+)(?=\.)", name)
    place = converter.source_patterns.index(pattern)
    if not numbers or len(matrices) != len(converter.source_patterns):
        return None
    return f"{home}.{numbers[-1]}.{matrices[place]}.weight"


def _ignored(network: Any) -> list[re.Pattern[str]]:
    """Patterns of the names of stored tensors that the network does without."""
    patterns = {*(network._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return [re.compile(each) for each in patterns]


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts numbers in names by their values, as transformers does where the order of names matters."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
