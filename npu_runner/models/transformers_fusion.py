"""Modules of transformers replaced by ours that compute the same with fewer operators: attention with one qkv GEMM and
one kernel for norms, rotary embedding and cache write; gated MLPs with one GEMM for gate and up; RMS norms; layers that
add and norm at once.

Chosen by children and shapes, and by the outputs of the start's run (transformers_check.py): a module that differs from
ours stays as it is. Knows no family and imports nothing of transformers.

T tokens, D hidden size, N query heads, K kv heads, H head dim, R dims that turn, O output features.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from npu_runner.layers.linear import ColumnParallelLinear, OutputPart, RowParallelLinear
from npu_runner.layers.norm import Float32RMSNorm, RMSNorm, ZeroCentredRMSNorm
from npu_runner.layers.parallel import LayerContext
from npu_runner.models.transformers_model import AttentionPort, TransformersModel
from npu_runner.platforms.ops import HeadNorms
from npu_runner.platforms.step_inputs import AttentionMetadata

logger = logging.getLogger(__name__)

_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_EPSILONS = ("variance_epsilon", "eps")
Steps = Sequence[tuple[slice, AttentionMetadata]]
"""Tokens of a prompt, step by step."""


class OneOfSeveral(nn.Module):
    """The outputs [start, stop) of linears that are one GEMM, in the place of one of them."""

    def __init__(self, merged: ColumnParallelLinear, start: int, stop: int):
        super().__init__()
        self._merged = (merged,)  # whose parameters have their names elsewhere
        self.start, self.stop = start, stop

    def forward(self, x: Tensor) -> Tensor:
        merged, rows = self._merged[0], slice(self.start, self.stop)
        x_TI = x.reshape(-1, x.shape[-1])
        if merged.scales is None:
            out_TO = merged.ops.linear(x_TI, merged.weight[rows], None if merged.bias is None else merged.bias[rows])
        else:
            out_TO = merged(x_TI)[:, rows]
        return out_TO.unflatten(0, x.shape[:-1])


def merge_linears(network: nn.Module, context: LayerContext) -> None:
    """Make linears that read the same one GEMM each, before their weights are loaded: `qkv_proj` and `gate_up_proj`."""
    for module in list(network.modules()):
        for names, merged, beside in ((_QKV, "qkv_proj", "o_proj"), (_GATE_UP, "gate_up_proj", "down_proj")):
            linears = [getattr(module, name, None) for name in names]
            if hasattr(module, beside) and all(isinstance(each, ColumnParallelLinear) for each in linears):
                _merge(module, names, merged, linears, context)


def _merge(module: nn.Module, names: Sequence[str], name: str, linears: Sequence[Any], context: LayerContext) -> None:
    weights = [each.weight_parts["weight"] for each in linears]
    biases = {"bias" in each.weight_parts for each in linears}
    if len(biases) > 1 or any(len(parts) > 1 for parts in weights):
        return
    rows = [OutputPart(own, part.shape[0], part.start, part.length)
            for own, (part,) in zip(names, weights, strict=True)]
    merged = ColumnParallelLinear(weights[0][0].shape[1], rows, bias=biases == {True}, context=context)
    setattr(module, name, merged)
    start = 0
    for part in rows:
        setattr(module, part.name, OneOfSeveral(merged, start, start + part.length))
        start += part.length


class FusedNorm(nn.Module):
    """In the place of an RMS norm, for inputs of any leading dims."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.reshape(-1, x.shape[-1])).view(x.shape)  # type: ignore[no-any-return]


class FusedAttention(nn.Module):
    """In the place of attention with q_proj, k_proj, v_proj and o_proj."""

    def __init__(self, own: Any, norms: tuple[RMSNorm, RMSNorm] | None):
        super().__init__()
        self.qkv_proj, self.o_proj, self.attention_port = own.qkv_proj, own.o_proj, own.attention_port
        self.sizes = [each.stop - each.start for each in (own.q_proj, own.k_proj, own.v_proj)]
        self.q_norm: Any = norms and norms[0]
        self.k_norm: Any = norms and norms[1]

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor],
                **more: Any) -> tuple[Tensor, None]:
        """hidden_states (1, T, D), position_embeddings cos and sin (1, T, R); returns (1, T, D)."""
        port: AttentionPort = self.attention_port
        parts = self.qkv_proj(hidden_states[0]).split(self.sizes, dim=-1)
        q_TNH, k_TKH, v_TKH = (x.unflatten(-1, (-1, port.call.head_dim)) for x in parts)
        norms = None if self.q_norm is None else HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        cos_TR, sin_TR = (x[0] for x in position_embeddings)
        if port.step.second_run is not None:
            out_TNH = _second_run(port, q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR)
        else:
            assert port.step.metadata is not None, "a step says where its tokens lie"
            out_TNH = port.paged.norm_rotary_forward(q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR, port.step.metadata)
        return self.o_proj(out_TNH.flatten(-2))[None], None


def _second_run(port: AttentionPort, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
              cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    ops = port.paged.ops
    if norms is not None:
        q_TNH = ops.rms_norm(q_TNH, norms.q_weight_H, norms.eps)
        k_TKH = ops.rms_norm(k_TKH, norms.k_weight_H, norms.eps)
    q_TNH, k_TKH = ops.rotary(q_TNH, k_TKH, cos_TR, sin_TR)
    out: Tensor = port.step.second_run.attend(port, *(x.transpose(0, 1)[None] for x in (q_TNH, k_TKH, v_TKH)))
    return out[0]


class FusedMLP(nn.Module):
    """In the place of an MLP with gate_proj, up_proj and down_proj. `activation`: None is silu."""

    def __init__(self, own: Any, context: LayerContext, activation: Callable[[Tensor], Tensor] | None):
        super().__init__()
        self.gate_up_proj, self.down_proj = own.gate_up_proj, own.down_proj
        self.quantised, self.activation = context.quantised, activation

    def forward(self, x: Tensor) -> Tensor:
        gate_up_T2I = self.gate_up_proj(x.reshape(-1, x.shape[-1]))
        if self.activation is None:
            between: Any = self.quantised.silu_and_mul(gate_up_T2I, self.down_proj.form)
        else:
            gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
            between = self.activation(gate_TI) * up_TI
        return RowParallelLinear.forward(self.down_proj, between).view(x.shape)


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + channel(norm(x)). `passes_on`: what comes next adds its two results."""

    def __init__(self, attention: nn.Module, channel: nn.Module, norms: Sequence[RMSNorm]):
        super().__init__()
        self.self_attn, self.mlp = attention, channel
        self.input_layernorm, self.post_attention_layernorm = norms
        self.passes_on = False

    def forward(self, hidden_states: Tensor | tuple[Tensor, Tensor], **more: Any) -> Tensor | tuple[Tensor, Tensor]:
        """hidden_states (1, T, D), or those and a residual (T, D) each."""
        if isinstance(hidden_states, tuple):
            x_TD, residual_TD = self.input_layernorm.add_forward(*hidden_states)
        else:
            residual_TD = hidden_states[0]
            x_TD = self.input_layernorm(residual_TD)
        mixed_TD = self.self_attn(hidden_states=x_TD[None], **more)[0][0]
        x_TD, residual_TD = self.post_attention_layernorm.add_forward(mixed_TD, residual_TD)
        out = self.mlp(x_TD[None])[0], residual_TD
        return out if self.passes_on else (out[0] + out[1])[None]


class LastNorm(nn.Module):
    """The norm behind the last layer, which adds that layer's results."""

    def __init__(self, norm: RMSNorm):
        super().__init__()
        self.norm = norm

    def forward(self, hidden_states: tuple[Tensor, Tensor]) -> Tensor:
        normed_TD: Tensor = self.norm.add_forward(*hidden_states)[0]
        return normed_TD[None]


@dataclass
class Fusion:
    """The replacements of one network. `watch` a run of it, then `apply` what was equal."""

    model: TransformersModel
    steps: Steps
    bound: float
    distance: Callable[[Tensor, Tensor], float]
    """Between our rows (1, T, D) and those of the module that is replaced; the worst row counts."""
    made: dict[nn.Module, nn.Module] = field(default_factory=dict)
    """Ours, by the module that it replaces."""
    left: set[nn.Module] = field(default_factory=set)
    """Modules that differ from ours."""
    undone: list[tuple[nn.Module, str, nn.Module]] = field(default_factory=list)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Compares each module that looks like one of ours with ours, over its own inputs."""
        handles = [module.register_forward_hook(partial(self._compare, compare), with_kwargs=True)
                   for module in self.model.base.modules() if (compare := self._comparison(module)) is not None]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def apply(self) -> None:
        """Put ours into their places."""
        layers = [module for module in self.made.values() if isinstance(module, FusedLayer)]
        self._connect(layers)
        for parent in list(self.model.causal_lm.modules()):
            for name, child in list(parent.named_children()):
                if child in self.made and not isinstance(parent, FusedLayer | LastNorm | FusedAttention):
                    self.undone.append((parent, name, child))
                    setattr(parent, name, self.made[child])

    def undo(self) -> None:
        while self.undone:
            setattr(*self.undone.pop())

    def describe(self) -> str:
        counts = Counter(type(module).__name__ for module in self.made.values())
        kinds = {"FusedLayer": "layers", "FusedAttention": "attentions", "FusedMLP": "MLPs"}
        found = [f"{counts[name]} {what}" for name, what in kinds.items()]
        norms = sum(isinstance(module, FusedNorm) for module in self.made.values())
        differing = Counter(type(module).__name__ for module in self.left)
        left = "".join(f"; {count} of class {name} differ from ours and stay" for name, count in differing.items())
        return f"{', '.join(found)} and {norms} norms are computed by our operators{left}"

    def _compare(self, compare: Callable[..., None], module: nn.Module, *call: Any) -> None:
        if module not in self.made and module not in self.left:  # ours call those that stay
            compare(module, *call)

    # -- one comparison for each kind of module -----------------------------------------------------------------------

    def _comparison(self, module: Any) -> Callable[..., None] | None:
        names = {name for name, _ in module.named_children()}
        if "forward" in vars(module):  # one that gathers the features of all ranks
            return None
        if {"qkv_proj", *_QKV, "o_proj", "attention_port"} <= names:
            return self._compare_attention
        if {"gate_up_proj", *_GATE_UP} <= names and isinstance(module.down_proj, RowParallelLinear):
            return self._compare_mlp
        if not names and [name for name, _ in module.named_parameters()] == ["weight"] and module.weight.dim() == 1:
            return self._compare_norm if _epsilon(module) is not None else None
        return self._compare_layer if len(_norms(module)) == 2 and len(names) >= 4 else None

    def _compare_norm(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        epsilon, context = _epsilon(module), self.model.context
        if len(args) != 1 or kwargs or epsilon is None:
            return
        candidates: list[tuple[float, int, FusedNorm]] = []
        for kind in (RMSNorm, Float32RMSNorm, ZeroCentredRMSNorm):
            norm = kind(len(module.weight), epsilon, context)
            norm.weight.copy_(module.weight.float() + kind.weight_offset)
            if kind is RMSNorm and module.weight.dtype == context.dtype:
                norm.weight = module.weight
            ours = FusedNorm(norm)
            candidates.append((self._error(ours(args[0]), output), len(candidates), ours))
        self._accept(module, *min(candidates)[::2])

    def _compare_mlp(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if len(args) != 1 or kwargs or not isinstance(output, Tensor):
            return
        activations = [None, *(child for name, child in module.named_children() if name.startswith("act"))]
        for activation in activations:
            fused = FusedMLP(module, self.model.context, activation)
            error = self._error(fused(args[0]), output)
            if error <= self.bound or activation is activations[-1]:
                self._accept(module, error, fused)
                return

    def _compare_attention(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        turning = kwargs.get("position_embeddings")
        given = kwargs.get("hidden_states", args[0] if len(args) == 1 else None)
        is_usual = isinstance(turning, tuple) and isinstance(output, tuple) and len(output) == len(turning) == 2
        head_dim = module.attention_port.call.head_dim
        if given is None or len(args) > 1 or not is_usual or turning[0].shape[:2] != given.shape[:2]:
            return
        norms = [self._norm(getattr(module, name, None)) for name in ("q_norm", "k_norm")]
        are_ours = all(norm is not None and len(norm.weight) == head_dim for norm in norms)
        if (hasattr(module, "q_norm") and not are_ours) or turning[0].shape[-1] > head_dim:
            return
        fused = FusedAttention(module, tuple(norms) if are_ours else None)  # type: ignore[arg-type]
        found = self._by_step(fused, given, turning)
        self._accept(module, self._error(found, output[0]), fused)

    def _compare_layer(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        children = [child for child in module.children() if any(True for _ in child.parameters())]
        attention = next((child for child in children if isinstance(self.made.get(child), FusedAttention)), None)
        norms = [self._norm(norm) for norm in _norms(module)]
        channels = [child for child in children if child is not attention and child not in _norms(module)]
        turning, given = kwargs.get("position_embeddings"), kwargs.get("hidden_states", args[0] if args else None)
        if attention is None or None in norms or len(channels) != 1 or not isinstance(output, Tensor) or len(args) > 1:
            return
        fused = FusedLayer(self.made[attention], self.made.get(channels[0], channels[0]), norms)  # type: ignore[arg-type]
        found = self._by_step(fused, given, turning)
        # What a layer adds may be small beside its input: compared by itself, or else within the input's rounding.
        is_same = self._error(found, output) <= 2 * torch.finfo(output.dtype).eps
        self._accept(module, 0.0 if is_same else self._error(found - given, output - given), fused)

    def _norm(self, module: Any) -> RMSNorm | None:
        """Ours in the place of `module`, if it has one."""
        found = self.made.get(module)
        return found.norm if isinstance(found, FusedNorm) else None

    def _by_step(self, fused: nn.Module, hidden: Tensor, turning: tuple[Tensor, Tensor]) -> Tensor:
        found = []
        for rows, metadata in self.steps:
            self.model.step.metadata = metadata
            out = fused(hidden_states=hidden[:, rows], position_embeddings=tuple(x[:, rows] for x in turning))
            found.append(out[0] if isinstance(out, tuple) else out)
        self.model.step.metadata = None
        return torch.cat(found, dim=1)

    def _error(self, found: Tensor, output: Tensor) -> float:
        if found.shape != output.shape:
            return float("inf")
        return self.distance(*(x.reshape(1, -1, x.shape[-1]) for x in (found, output)))

    def _accept(self, module: nn.Module, error: float, fused: nn.Module) -> None:
        if error <= self.bound:
            self.made[module] = fused
        else:
            self.left.add(module)

    def _connect(self, layers: Sequence[FusedLayer]) -> None:
        """Let layers pass their two results on where the next adds them."""
        base = self.model.base
        for stack in base.children():
            fused = [self.made.get(layer) for layer in stack] if isinstance(stack, nn.ModuleList) else []
            if not fused or set(map(id, fused)) != set(map(id, layers)):
                continue
            norms = _norms(base)
            last = self._norm(norms[0]) if len(norms) == 1 else None
            for layer, following in zip(layers, [*layers[1:], last], strict=True):
                layer.passes_on = following is not None
            if last is not None:
                self.made[norms[0]] = LastNorm(last)


def _norms(module: nn.Module) -> list[nn.Module]:
    """Children that have one weight (D,), in their order."""
    return [child for child in module.children()
            if [tuple(each.shape[1:]) for each in child.parameters()] == [()] and _epsilon(child) is not None]


def _epsilon(module: nn.Module) -> float | None:
    values = vars(module)
    return next((values[name] for name in _EPSILONS if isinstance(values.get(name), float)), None)
