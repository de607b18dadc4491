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

    def runs(self, padding: Padding) -> list[tuple[int, int, int]]:
        """(start, length, where it goes) of every run of rows, counted from the first row of this part."""
        if padding.is_none:
            return [(self.start, self.length, 0)]
        assert self.length % padding.run == 0, f"{self.length} rows are no multiple of {padding.run}"
        return [(self.start + index * padding.run, padding.run, index * padding.width)
                for index in range(self.length // padding.run)]


@dataclass(frozen=True)
class Padding:
    """Every `run` features take the room of `width`, zeros behind them. Without a number all stay side by side."""

    run: int = 0
    width: int = 0

    @property
    def is_none(self) -> bool:
        return self.run == self.width

    def padded(self, length: int) -> int:
        return length if self.is_none else length // self.run * self.width


_NO_PADDING = Padding()


class ColumnParallelLinear(nn.Module):
    """Several checkpoint linears (or slices of one) as one matmul, output features cut over the ranks."""

    def __init__(self, in_features: int, parts: Sequence[OutputPart], *, bias: bool, context: LayerContext,
                 padding: Padding = _NO_PADDING):
        super().__init__()
        self.ops = context.ops
        out_features = sum(padding.padded(part.length) for part in parts)
        self.weight = context.parameter(out_features, in_features)
        self.bias = context.parameter(out_features) if bias else None
        self.weight_parts: dict[str, list[WeightPart]] = {"weight": []}
        if bias:
            self.weight_parts["bias"] = []
        if not padding.is_none:
            for parameter in self.parameters():
                parameter.zero_()
        target = 0
        for part in parts:
            for kind, shape in (("weight", (part.total, in_features)), ("bias", (part.total,))):
                if kind in self.weight_parts:
                    self.weight_parts[kind] += [
                        WeightPart(f"{part.name}.{kind}", shape, dim=0, start=start, length=length,
                                   target_start=target + place) for start, length, place in part.runs(padding)
                    ]
            target += padding.padded(part.length)

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.ops.linear(x_TI, self.weight, self.bias)

    def gelu_forward(self, x_TI: Tensor, approximate: str) -> Tensor:
        """gelu(forward(x)); `approximate` as in Ops.gelu."""
        return self.ops.linear_gelu(x_TI, self.weight, self.bias, approximate)


class RowParallelLinear(nn.Module):
    """Input features cut over the ranks; the outputs are summed, or left to the caller to sum without `reduces`."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, context: LayerContext,
                 padding: Padding = _NO_PADDING, reduces: bool = True):
        super().__init__()
        assert reduces or not bias, "each rank would add the bias"
        self.ops = context.ops
        self.tp = context.tp
        self.reduces = reduces
        start, length = context.tp.share(in_features, f"{name} input features")
        self.weight = context.parameter(out_features, padding.padded(length))
        self.bias = context.parameter(out_features) if bias else None
        if not padding.is_none:
            self.weight.zero_()
        runs = OutputPart(name, in_features, start, length).runs(padding)
        self.weight_parts = {
            "weight": [WeightPart(f"{name}.weight", (out_features, in_features), dim=1, start=first, length=count,
                                  target_start=place) for first, count, place in runs],
            "bias": [WeightPart(f"{name}.bias", (out_features,))],
        }

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.tp.size == 1 or not self.reduces:
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
