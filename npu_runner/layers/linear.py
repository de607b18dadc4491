"""Linear layers cut over tensor-parallel ranks. Know nothing of what they are used for.

I input features, O output features of this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from npu_runner.layers.parallel import LayerContext, WeightPart


@dataclass(frozen=True)
class OutputPart:
    """Rows [start, start + length) of checkpoint linear `name`, which has `total` output features in all."""

    name: str
    total: int
    start: int
    length: int


class ColumnParallelLinear(nn.Module):
    """Several checkpoint linears (or slices of one) as one matmul, output features cut over the ranks."""

    def __init__(self, in_features: int, parts: Sequence[OutputPart], *, bias: bool, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        out_features = sum(part.length for part in parts)
        self.weight = context.parameter(out_features, in_features)
        self.bias = context.parameter(out_features) if bias else None
        self.weight_parts: dict[str, list[WeightPart]] = {"weight": []}
        if bias:
            self.weight_parts["bias"] = []
        target = 0
        for part in parts:
            for kind, shape in (("weight", (part.total, in_features)), ("bias", (part.total,))):
                if kind in self.weight_parts:
                    self.weight_parts[kind].append(WeightPart(
                        f"{part.name}.{kind}", shape, dim=0, start=part.start, length=part.length, target_start=target
                    ))
            target += part.length

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.ops.linear(x_TI, self.weight, self.bias)


class RowParallelLinear(nn.Module):
    """Input features cut over the ranks; the outputs are summed."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, context: LayerContext):
        super().__init__()
        self.ops = context.ops
        self.tp = context.tp
        start, length = context.tp.share(in_features, f"{name} input features")
        self.weight = context.parameter(out_features, length)
        self.bias = context.parameter(out_features) if bias else None
        self.weight_parts = {
            "weight": [WeightPart(f"{name}.weight", (out_features, in_features), dim=1, start=start, length=length)],
            "bias": [WeightPart(f"{name}.bias", (out_features,))],
        }

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.tp.size == 1:
            return self.ops.linear(x_TI, self.weight, self.bias)
        out_TO = self.tp.all_reduce(self.ops.linear(x_TI, self.weight, None))
        return out_TO if self.bias is None else out_TO + self.bias


def qkv_parts(num_heads: int, num_kv_heads: int, head_dim: int, context: LayerContext) -> list[OutputPart]:
    """q_proj, k_proj and v_proj of this rank, in that order."""
    first_head, heads = context.tp.share(num_heads, "num_attention_heads")
    first_kv, kv_heads = context.tp.kv_head_share(num_kv_heads)
    kv = (num_kv_heads * head_dim, first_kv * head_dim, kv_heads * head_dim)
    return [
        OutputPart("q_proj", num_heads * head_dim, first_head * head_dim, heads * head_dim),
        OutputPart("k_proj", *kv),
        OutputPart("v_proj", *kv),
    ]


def split_parts(names: Sequence[str], features: int, context: LayerContext) -> list[OutputPart]:
    """Equal shares of several linears of the same width."""
    start, length = context.tp.share(features, f"{names[0]} features")
    return [OutputPart(name, features, start, length) for name in names]
