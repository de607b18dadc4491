"""The parts of a network of transformers that are ours: linears, experts, embedding and head. They are cut over the
ranks, held in the checkpoint's forms and filled by our loader.

Recognises them by names, sizes and a run without weights. Knows no family and imports nothing of transformers.

N query heads, K kv heads, H head dim; of the model, and of this rank where a name says so.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.errors import ModelError
from npu_runner.layers.expert_weights import ExpertWeights
from npu_runner.layers.heads import OutputHead
from npu_runner.layers.linear import ColumnParallelLinear, HeldLinear, OutputPart, RowParallelLinear
from npu_runner.layers.parallel import LayerContext, TensorParallel, WeightPart
from npu_runner.models.transformers_model import AttentionCall
from npu_runner.platforms.meta import MetaOps

_ROLES = {
    "q": ("q_proj", "query", "wq", "q_lin"), "k": ("k_proj", "key", "wk", "k_lin"),
    "v": ("v_proj", "value", "wv", "v_lin"),
    "o": ("o_proj", "out_proj", "dense", "c_proj", "wo", "out_lin"),
    "qkv": ("qkv_proj", "query_key_value", "c_attn", "wqkv", "qkv"), "gate": ("gate_proj", "g_proj"),
}
"""Usual names of linears of attention. A `gate` is a factor for each output of a head, or for each head."""
_INTO_MLP = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc", "dense_h_to_4h", "w1", "w3", "fc_in",
             "input_linear")
_OUT_OF_MLP = ("down_proj", "fc2", "c_proj", "dense_4h_to_h", "w2", "fc_out", "output_linear")
_CUT_OUTPUTS = ("colwise", "colwise_gather_output", "packed_colwise")
_CUT_INPUTS = ("rowwise", "rowwise_split_input")
_NUM_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "num_query_heads")
_NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_heads", "n_kv_heads", "n_head_kv")
_WIDTHS = ("embed_dim", "hidden_size", "split_size", "d_model_size", "all_head_size", "inner_dim", "kv_dim")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The facts by which a network is cut: from transformers, and from a run without weights."""

    calls: tuple[AttentionCall, ...]
    halved: frozenset[str]
    """Linears whose outputs are used as two halves, side by side."""
    styles: Mapping[str, str]
    """transformers' own plan: how each linear is cut, by name, with * for numbers."""
    tied: Mapping[str, str]
    """Names of parameters that are others, by name."""
    turned: type[nn.Module]
    """The class of linears whose weight lies as (inputs, outputs)."""
    experts_of: Callable[[nn.Module], tuple[int, int, int] | None]
    """Experts, hidden size and width of a module that computes down(silu(gate) * up) of stacks; None for others."""


@dataclass(kw_only=True)
class Heads:
    """The heads of an attention module, and this rank's: (first, number)."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    here: tuple[int, int]
    kv_here: tuple[int, int]

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


class WithoutTraffic(TensorParallel):
    """A rank alone, for shapes."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather_last_dim(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


def context_without_traffic(num_ranks: int) -> LayerContext:
    """The context of one of several ranks on the meta device, for the shapes of a network."""
    return LayerContext(MetaOps(copies_rows_to_experts=False), None,  # type: ignore[arg-type]
                        WithoutTraffic(size=num_ranks), torch.bfloat16, torch.device("meta"))


class _AnyDims:
    """Inputs of any leading dims, for a linear of two."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = super().forward(x.reshape(-1, x.shape[-1]))  # type: ignore[misc]
        return out.unflatten(0, x.shape[:-1])


class Columns(_AnyDims, ColumnParallelLinear):
    pass


class Rows(_AnyDims, RowParallelLinear):
    pass


class Experts(ExpertWeights):
    """Called as transformers calls experts."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states (T, D), top_k_index and top_k_weights (T, K) to (T, D)."""
        routed = hidden_states, top_k_weights.to(hidden_states.dtype), top_k_index.int()
        if self.form is None:
            out_TD = self._context.ops.experts(*routed, self.gate_up, self.down, self.held)
        else:
            out_TD = self.ops.experts(*routed, *self.quantised, self.held)
        return self._context.tp.all_reduce(out_TD)


class Head(_AnyDims, OutputHead):
    """An LM head with a bias, where transformers' has one; that is whole on every rank."""

    def __init__(self, name: str, linear: nn.Linear, context: LayerContext, tied_to: Any):
        super().__init__(name, linear.out_features, linear.in_features, context, tied_to)
        self.bias = context.parameter(linear.out_features) if linear.bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits if self.bias is None else logits + self.bias


class _RankConfig:
    """A config that says this rank's heads; all else is the model's."""

    def __init__(self, config: Any, heads: Heads):
        self._config, self._heads = config, heads

    def __getattr__(self, name: str) -> Any:
        return _of_rank(name, getattr(self._config, name), self._heads)


def replace_parts(network: Any, recipe: Recipe, context: LayerContext) -> list[str]:
    """Put ours into the places of transformers' parts, and allocate all parameters. Returns the names of linears of the
    decoder that every rank holds whole.

    Raises ModelError, with the module's name, for a network that cannot be cut over as many ranks.
    """
    cutter = _Cutter(network, recipe, context)
    for call in recipe.calls:
        cutter.cut_attention(call)
    cutter.cut_mlps()
    cutter.replace_experts()
    cutter.cut_vocabulary()
    _allocate(network, recipe.tied, context)
    decoder = {id(module) for module in network.get_decoder().modules()}
    return [name for name, module in network.named_modules()
            if id(module) in decoder and cutter.is_linear(module)]


@dataclass
class _Cutter:
    network: Any
    recipe: Recipe
    context: LayerContext
    styles: list[tuple[re.Pattern[str], str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.styles = [(re.compile(re.escape(name).replace(r"\*", r"\d+")), style)
                       for name, style in self.recipe.styles.items()]
        self.tp = self.context.tp

    def is_linear(self, module: nn.Module) -> bool:
        kinds = (nn.Linear, self.recipe.turned)
        return type(module) in kinds and module.weight.dtype == self.context.dtype  # some are kept in float32

    def linears(self, module: nn.Module) -> dict[str, Any]:
        return {name: child for name, child in module.named_children() if self.is_linear(child)}

    def style(self, name: str) -> str | None:
        return next((style for pattern, style in self.styles if pattern.fullmatch(name)), None)

    # -- attention ----------------------------------------------------------------------------------------------------

    def cut_attention(self, call: AttentionCall) -> None:
        module = self.network.get_submodule(call.name)
        heads = Heads(num_heads=call.num_heads, num_kv_heads=call.num_kv_heads, head_dim=call.head_dim,
                      here=self.tp.share(call.num_heads, "num_attention_heads"),
                      kv_here=self.tp.kv_head_share(call.num_kv_heads))
        missing = {"q", "k", "v", "o"}
        for own, linear in self.linears(module).items():
            name = f"{call.name}.{own}"
            role = next((role for role, names in _ROLES.items() if own.lower() in names), None)
            if role is None and self.style(name) in _CUT_OUTPUTS:
                role = "gate"
            runs = None if role is None else self._runs(role, _sizes(linear), heads, call)
            if role == "o" and _sizes(linear)[1] == heads.num_heads * heads.head_dim:
                setattr(module, own, self._rows(own, linear))
            elif runs is not None:
                setattr(module, own, self._columns(own, linear, runs))
            else:
                continue
            missing -= {"q", "k", "v"} if role == "qkv" else {str(role)}
        if self.tp.size == 1:
            return
        if missing:
            raise ModelError(f"{call.name}: its linears for {', '.join(sorted(missing))} are not known by name, size "
                             f"and layout, so they cannot be cut over {self.tp.size} ranks; set tensor_parallel_size "
                             "to 1")
        self._adapt_attention(call.name, module, heads)

    def _runs(self, role: str, sizes: tuple[int, int], heads: Heads,
              call: AttentionCall) -> list[tuple[int, int]] | None:
        """(start, length) of this rank's outputs of a linear; None where its outputs are not such heads."""
        total, width = sizes[0], heads.head_dim
        num_heads, num_kv = heads.num_heads, heads.num_kv_heads
        q, kv = (_scaled(share, width) for share in (heads.here, heads.kv_here))
        if role in ("q", "gate") and total == num_heads * width:
            return [q]
        if role == "gate" and total == num_heads:
            return [heads.here]
        if role in ("k", "v") and total == num_kv * width:
            return [kv]
        if role != "qkv" or total != (num_heads + 2 * num_kv) * width:
            return None
        if self.tp.size == 1:
            return [(0, total)]
        if call.value_place == (total, (num_heads + num_kv) * width, width):  # q of all heads, then k, then v
            keys = num_heads * width
            return [q, (keys + kv[0], kv[1]), (keys + num_kv * width + kv[0], kv[1])]
        of_group = (heads.group + 2) * width
        if call.value_place == (total, (heads.group + 1) * width, of_group) and num_kv >= self.tp.size:
            return [_scaled(heads.kv_here, of_group)]
        return None

    def _adapt_attention(self, home: str, module: Any, heads: Heads) -> None:
        """Let what else is in the module work with this rank's heads."""
        widths = {heads.num_heads * heads.head_dim: _scaled(heads.here, heads.head_dim),
                  heads.num_kv_heads * heads.head_dim: _scaled(heads.kv_here, heads.head_dim)}
        for name, part in module.named_modules():
            if isinstance(part, HeldLinear):
                continue
            if isinstance(part, nn.ModuleList) or self.is_linear(part):
                raise self._uncut(f"{home}.{name}")
            for own, parameter in list(part.named_parameters(recurse=False)):
                shape = tuple(parameter.shape)
                by_head = {heads.num_heads: heads.here, heads.num_kv_heads: heads.kv_here}
                if shape == (heads.head_dim,) or parameter.numel() == 1:
                    continue
                if len(shape) == 1 and shape[0] in widths and name:
                    _gather_around(part, shape[0], widths[shape[0]], self.tp)
                elif shape[1:] == (heads.head_dim,) and shape[0] in by_head and name:
                    self._cut_parameter(name.rpartition(".")[2], part, own, by_head[shape[0]])
                elif shape == (heads.num_heads,) and not name and self.style(f"{home}.{own}") in _CUT_OUTPUTS:
                    self._cut_parameter(home.rpartition(".")[2], part, own, heads.here)
                else:
                    raise self._uncut(".".join(filter(None, (home, name, own))))
        for name, value in list(vars(module).items()):
            if isinstance(value, int) and not isinstance(value, bool):
                setattr(module, name, _of_rank(name, value, heads))
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads.here[1] // heads.kv_here[1]
        if hasattr(module, "config"):
            module.config = _RankConfig(module.config, heads)

    def _cut_parameter(self, home: str, module: Any, own: str, share: tuple[int, int]) -> None:
        parameter = getattr(module, own)
        shape = tuple(parameter.shape)
        setattr(module, own, self.context.parameter(share[1], *shape[1:], dtype=parameter.dtype))
        module.weight_parts = {**getattr(module, "weight_parts", {}), own: [
            WeightPart(f"{home}.{own}", shape, dim=0, start=share[0], length=share[1])]}

    def _uncut(self, name: str) -> ModelError:
        return ModelError(f"{name}: a part of attention that is not known to be cut over {self.tp.size} ranks; set "
                          "tensor_parallel_size to 1")

    # -- channel mixers -----------------------------------------------------------------------------------------------

    def cut_mlps(self) -> None:
        """Cut pairs of linears, into and out of one width, that lie side by side in a module."""
        of_attention = {call.name for call in self.recipe.calls}
        decoder = {id(module) for module in self.network.get_decoder().modules()}
        for home, module in list(self.network.named_modules()):
            if id(module) in decoder and home not in of_attention:
                self._cut_mlp(home, module)

    def _cut_mlp(self, home: str, module: nn.Module) -> None:
        linears = self.linears(module)
        out_of = {own: each for own, each in linears.items()
                  if own in _OUT_OF_MLP or self.style(f"{home}.{own}") in _CUT_INPUTS}
        widths = {_sizes(each)[1] for each in out_of.values()}
        width = widths.pop() if len(widths) == 1 else 0
        into = {own: (each, _sizes(each)[0] == width) for own, each in linears.items() if own not in out_of and (
            own in _INTO_MLP or self.style(f"{home}.{own}") in _CUT_OUTPUTS)}
        if not into or not width or not all(is_one or self._is_halved(f"{home}.{own}", each, width)
                                            for own, (each, is_one) in into.items()):
            return
        share = self.tp.share(width, f"{home}: width")
        for own, (linear, is_one) in into.items():
            runs = [share] if is_one else [share, (width + share[0], share[1])]
            setattr(module, own, self._columns(own, linear, runs if self.tp.size > 1 else [(0, _sizes(linear)[0])]))
        for own, linear in out_of.items():
            setattr(module, own, self._rows(own, linear))
        if self.tp.size > 1:
            self._adapt_mlp(home, module, width, share)

    def _is_halved(self, name: str, linear: Any, width: int) -> bool:
        return _sizes(linear)[0] == 2 * width and (self.tp.size == 1 or name in self.recipe.halved)

    def _adapt_mlp(self, home: str, module: nn.Module, width: int, share: tuple[int, int]) -> None:
        for part in module.children():
            if not isinstance(part, HeldLinear) and any(each.shape == (width,) for each in part.parameters()):
                _gather_around(part, width, share, self.tp)
        if any(each.shape == (width,) for each in module.parameters(recurse=False)):
            raise self._uncut(home)

    def replace_experts(self) -> None:
        for name, module in list(self.network.named_modules()):
            home, _, own = name.rpartition(".")
            sizes = self.recipe.experts_of(module) if own == "experts" else None
            if sizes is not None:
                moe = MoEConfig(num_experts=sizes[0], top_k=0, intermediate_size=sizes[2], renormalise=False)
                setattr(self.network.get_submodule(home), own, Experts(sizes[1], moe, self.context))

    # -- embedding and head -------------------------------------------------------------------------------------------

    def cut_vocabulary(self) -> None:
        embedding, head = self.network.get_input_embeddings(), self.network.get_output_embeddings()
        if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
            return
        names = {id(module): name for name, module in self.network.named_modules()}
        home, _, own = names[id(head)].rpartition(".")
        is_tied = f"{names[id(head)]}.weight" in self.recipe.tied
        _cut_embedding(names[id(embedding)].rpartition(".")[2], embedding, self.context)
        setattr(self.network.get_submodule(home), own, Head(own, head, self.context, embedding if is_tied else None))

    # -- linears ------------------------------------------------------------------------------------------------------

    def _columns(self, own: str, linear: Any, runs: list[tuple[int, int]]) -> Columns:
        total, inputs = _sizes(linear)
        made = Columns(inputs, [OutputPart(own, total, *run) for run in runs], bias=linear.bias is not None,
                       context=self._context_of(linear))
        return self._turned(made, linear)

    def _rows(self, own: str, linear: Any) -> Rows:
        outputs, inputs = _sizes(linear)
        return self._turned(Rows(own, inputs, outputs, bias=linear.bias is not None,
                                 context=self._context_of(linear)), linear)

    def _context_of(self, linear: nn.Module) -> LayerContext:
        """A weight that lies as (inputs, outputs) has no quantised forms."""
        return self.context if type(linear) is nn.Linear else dataclasses.replace(self.context, weight_forms=())

    def _turned(self, made: Any, linear: nn.Module) -> Any:
        if type(linear) is not nn.Linear:
            made.stays = True
            made.weight_parts["weight"] = [
                dataclasses.replace(part, shape=part.shape[::-1], dim=1 - part.dim, is_transposed=True)
                for part in made.weight_parts["weight"]]
        return made


def _sizes(linear: Any) -> tuple[int, int]:
    """Outputs and inputs."""
    outputs, inputs = linear.weight.shape if type(linear) is nn.Linear else linear.weight.shape[::-1]
    return outputs, inputs


def _scaled(share: tuple[int, int], width: int) -> tuple[int, int]:
    return share[0] * width, share[1] * width


def _of_rank(name: str, value: Any, heads: Heads) -> Any:
    """This rank's number, where an attribute of this name is a number of heads or of their features."""
    if name in _NUM_HEADS and value == heads.num_heads:
        return heads.here[1]
    if name in _NUM_KV_HEADS and value == heads.num_kv_heads:
        return heads.kv_here[1]
    if name in _WIDTHS and value == heads.num_heads * heads.head_dim:
        return heads.here[1] * heads.head_dim
    if name in _WIDTHS and value == heads.num_kv_heads * heads.head_dim:
        return heads.kv_here[1] * heads.head_dim
    return value


def _gather_around(module: Any, full: int, share: tuple[int, int], tp: TensorParallel) -> None:
    """Let a module over `full` features, such as a norm, be called with this rank's share of them, too."""
    own = module.forward
    copies = share[1] * tp.size // full  # of kv heads that neighbours share

    def forward(x: Tensor) -> Tensor:
        if x.shape[-1] == full:
            return own(x)  # type: ignore[no-any-return]
        whole = tp.all_gather_last_dim(x)
        if copies > 1:
            whole = whole.unflatten(-1, (tp.size, share[1]))[..., ::copies, :].flatten(-2)
        return own(whole).narrow(-1, *share)  # type: ignore[no-any-return]

    module.forward = forward


def _cut_embedding(own: str, embedding: Any, context: LayerContext) -> None:
    """Leave this rank's rows of the vocabulary, and the module's own scale."""
    tp, (num_tokens, width) = context.tp, embedding.weight.shape
    rows = -(-num_tokens // tp.size)
    first = min(num_tokens, tp.rank * rows)
    count = min(num_tokens - first, rows)
    embedding.weight = context.parameter(rows, width, dtype=embedding.weight.dtype)
    embedding.weight_parts = {"weight": [WeightPart(f"{own}.weight", (num_tokens, width), dim=0, start=first,
                                                    length=count)]}
    if tp.size == 1:
        return
    if count < rows:
        embedding.weight.data.zero_()
    embedding.padding_idx, look_up = None, embedding.forward

    def forward(input_ids: Tensor) -> Tensor:
        places = input_ids - first
        is_here = (places >= 0) & (places < count)
        x = look_up(places * is_here)
        return tp.all_reduce(x * is_here[..., None].to(x.dtype))

    embedding.forward = forward


def _allocate(network: nn.Module, tied: Mapping[str, str], context: LayerContext) -> None:
    """Allocate the parameters that are transformers', and those that files have of buffers; move other buffers."""
    stored = set(network.state_dict())
    for home, module in network.named_modules():
        if not isinstance(module, (HeldLinear, ExpertWeights, Head)):
            declared = getattr(module, "weight_parts", {})
            for name, parameter in list(module.named_parameters(recurse=False)):
                if name not in declared and f"{home}.{name}" not in tied:
                    setattr(module, name, context.parameter(*parameter.shape, dtype=parameter.dtype))
        for name, buffer in list(module.named_buffers(recurse=False)):
            moved = buffer.to(context.device)
            if f"{home}.{name}" in stored and buffer.is_floating_point():
                del module._buffers[name]
                module.register_parameter(name, nn.Parameter(moved, requires_grad=False))
            else:
                setattr(module, name, moved)
    for target, source in tied.items():
        home, _, name = target.rpartition(".")
        setattr(network.get_submodule(home), name, network.get_parameter(source))


def match_stacks(network: nn.Module, names: Collection[str]) -> None:
    """Let transformers' experts, which lie in stacks, be filled from a tensor for each matrix, where the checkpoint's
    `names` are so."""
    for name, module in network.named_modules():
        if f"{name}.0.down_proj.weight" in names and not isinstance(module, ExpertWeights):
            _declare_stacks(name.rpartition(".")[2], module)


def _declare_stacks(own: str, module: Any) -> None:
    gate_up, down = module.gate_up_proj, module.down_proj
    num_experts, width = len(down), down.shape[2]
    module.weight_parts = {
        "gate_up_proj": [WeightPart(f"{own}.{expert}.{name}.weight", (width, gate_up.shape[2]), dim=0, length=width,
                                    target_start=place * width, index=expert)
                         for expert in range(num_experts) for place, name in enumerate(("gate_proj", "up_proj"))],
        "down_proj": [WeightPart(f"{own}.{expert}.down_proj.weight", tuple(down.shape[1:]), index=expert)
                      for expert in range(num_experts)]}
