"""The weights of a layer's experts, cut over the ranks by width, from the layouts that checkpoints have. No computing.

The layout is recognised by a checkpoint's tensors; it differs by family and by the tool that wrote the file.
"per_expert" is experts.{e}.gate_proj.weight (I, D), up_proj (I, D) and down_proj (D, I); "fused" is
experts.gate_up_proj (E, 2I, D) and experts.down_proj (E, D, I); "fused_transposed" the same as (E, D, 2I) and (E, I,
D).

E experts, D hidden size, I width of an expert in all, J of it on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from torch import nn

from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.layers.parallel import LayerContext, WeightPart


class ExpertWeights(nn.Module):
    """gate_up (E, 2J, D) and down (E, D, J), or with `Ops.experts_in_out` (E, D, 2J) and (E, J, D): as kernels want."""

    def __init__(self, hidden_size: int, moe: MoEConfig, context: LayerContext):
        super().__init__()
        self.moe, self.hidden_size = moe, hidden_size
        self.is_in_out = context.ops.experts_in_out
        self.start, self.length = context.tp.share(moe.intermediate_size, "moe_intermediate_size")
        count, width = moe.num_experts, self.length
        gate_up, down = (2 * width, hidden_size), (hidden_size, width)
        self.gate_up = context.parameter(count, *self._laid_out(gate_up))
        self.down = context.parameter(count, *self._laid_out(down))
        self._declare("per_expert")

    def match_checkpoint(self, prefix: str, names: Collection[str], shape_of: Callable[[str], tuple[int, ...]]) -> None:
        """Read as the tensors whose names begin with `prefix` lie. What fits no layout is an error of the loader."""
        fused = {name: shape_of(f"{prefix}experts.{name}") for name in ("gate_up_proj", "down_proj")
                 if f"{prefix}experts.{name}" in names}
        if not fused:
            return self._declare("per_expert")
        # One of the two may be square, and says nothing then.
        right = {"gate_up_proj": (2 * self.moe.intermediate_size, self.hidden_size),
                 "down_proj": (self.hidden_size, self.moe.intermediate_size)}
        tell = [shape[1:] == (inputs, outputs) for name, shape in fused.items()
                for outputs, inputs in (right[name],) if outputs != inputs]
        return self._declare("fused_transposed" if tell and tell[0] else "fused")

    def _declare(self, layout: str) -> None:
        self.layout = layout
        self.weight_parts = {"gate_up": list(self._gate_up_parts()), "down": list(self._down_parts())}

    def _laid_out(self, out_in: tuple[int, int]) -> tuple[int, int]:
        return (out_in[1], out_in[0]) if self.is_in_out else out_in

    def _gate_up_parts(self) -> Iterator[WeightPart]:
        """Gate, then up: this rank's share of their outputs."""
        width = self.moe.intermediate_size
        for half, name in enumerate(("gate_proj", "up_proj")):
            target = half * self.length
            if self.layout == "per_expert":
                yield from self._each_expert(name, (width, self.hidden_size), output_cut=True, target=target)
            else:
                yield self._fused("gate_up_proj", (2 * width, self.hidden_size), half * width, target, cut=0)

    def _down_parts(self) -> Iterator[WeightPart]:
        """This rank's share of the inputs."""
        shape = (self.hidden_size, self.moe.intermediate_size)
        if self.layout == "per_expert":
            yield from self._each_expert("down_proj", shape, output_cut=False, target=0)
        else:
            yield self._fused("down_proj", shape, 0, 0, cut=1)

    def _each_expert(self, name: str, shape: tuple[int, int], *, output_cut: bool, target: int) -> Iterator[WeightPart]:
        dim = 0 if output_cut else 1
        for expert in range(self.moe.num_experts):
            yield WeightPart(f"experts.{expert}.{name}.weight", shape, dim=dim, start=self.start, length=self.length,
                             target_start=target, index=expert, is_transposed=self.is_in_out)

    def _fused(self, name: str, out_in: tuple[int, int], first: int, target: int, *, cut: int) -> WeightPart:
        """All experts in one tensor, (E, out, in) or (E, in, out); `cut` is 0 for outputs and 1 for inputs."""
        is_in_out = self.layout == "fused_transposed"
        shape = (out_in[1], out_in[0]) if is_in_out else out_in
        dim = 1 + (1 - cut if is_in_out else cut)
        return WeightPart(f"experts.{name}", (self.moe.num_experts, *shape), dim=dim, start=first + self.start,
                          length=self.length, target_start=target, is_transposed=is_in_out != self.is_in_out)
