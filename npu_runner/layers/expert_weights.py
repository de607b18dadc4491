"""The weights of a layer's experts, cut over the ranks by width or shared out whole, from the layouts that checkpoints
have. No computing.

The layout is recognised by a checkpoint's tensors; it differs by family and by the tool that wrote the file.
"per_expert" is experts.{e}.gate_proj.weight (I, D), up_proj (I, D) and down_proj (D, I); "fused" is
experts.gate_up_proj (E, 2I, D) and experts.down_proj (E, D, I); "fused_transposed" the same as (E, D, 2I) and (E, I,
D). Quantised experts are read one by one from all of them.

E experts, F of them on this rank, D hidden size, I width of an expert in all, J of it on this rank. With whole experts
J is I, else F is E.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator

import torch
from torch import nn

from npu_runner.checkpoint.model_config import MoEConfig
from npu_runner.checkpoint.weights_reader import Member
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.platforms.ops import HeldExperts
from npu_runner.platforms.quantised import FP8_BLOCK, FP8_BLOCKS, FP8_EXPERTS, INT8, INT8_EXPERTS, QuantisedExperts

FORMS_OF_EXPERTS = {INT8: INT8_EXPERTS, FP8_BLOCKS: FP8_EXPERTS}
"""The forms of experts, by the form of each matrix."""


class ExpertWeights(nn.Module):
    """gate_up (F, 2J, D) and down (F, D, J), or with `Ops.experts_in_out` (F, D, 2J) and (F, J, D): as kernels want.

    `held`: which experts are here; None: all. `form`: INT8_EXPERTS or FP8_EXPERTS; None: the model's dtype. `forms`:
    those that `hold` may choose; where there are some, it allocates the weights.
    """

    gate_up: nn.Parameter
    down: nn.Parameter
    gate_up_scales: nn.Parameter | None
    down_scales: nn.Parameter | None
    form: str | None

    def __init__(self, hidden_size: int, moe: MoEConfig, context: LayerContext):
        super().__init__()
        self.moe, self.hidden_size = moe, hidden_size
        self.ops, self.is_in_out = context.quantised, context.ops.experts_in_out
        self.first, self.count = context.tp.expert_share(moe.num_experts)
        self.start, self.length = (0, moe.intermediate_size) if context.tp.has_whole_experts else context.tp.share(
            moe.intermediate_size, "moe_intermediate_size", "; enable_expert_parallel leaves experts whole")
        is_whole = self.count == moe.num_experts
        self.held = None if is_whole else HeldExperts(first=self.first, total=moe.num_experts)
        self._context = context
        self.forms = tuple(form for form in FORMS_OF_EXPERTS.values() if form in context.weight_forms)
        self.is_held, self.layout = not self.forms, "per_expert"
        self._allocate(None, context if self.is_held else
                       dataclasses.replace(context, device=torch.device("meta")))

    def hold(self, forms: Collection[str | None]) -> None:
        """Allocate the weights. `forms`: of the matrices of all experts, on whichever rank; None: 16 bits, or one
        without matmuls. Where they differ, or where there is no matmul for this shape, all are of the model's dtype.
        """
        self.is_held, kinds = True, set(forms)
        form = FORMS_OF_EXPERTS.get(kinds.pop() or "") if len(kinds) == 1 else None
        self._allocate(form if form in self.forms and self._accepts(form) else None, self._context)

    @property
    def quantised(self) -> tuple[QuantisedExperts, QuantisedExperts]:
        """gate_up and down, of one that has a `form`."""
        assert self.gate_up_scales is not None and self.down_scales is not None, "these are not quantised"  # noqa: PT018
        return QuantisedExperts(self.gate_up, self.gate_up_scales), QuantisedExperts(self.down, self.down_scales)

    @property
    def has_whole_blocks(self) -> bool:
        """FP8 by block may be made of the experts, on whatever number of ranks."""
        sizes = (self.hidden_size, self.moe.intermediate_size)
        return self.layout != "fused_transposed" and not any(size % FP8_BLOCK for size in sizes)

    def weights_are_loaded(self) -> None:
        if self.form is not None:
            (self.gate_up, self.gate_up_scales), (self.down, self.down_scales) = (
                (nn.Parameter(values, requires_grad=False), nn.Parameter(scales, requires_grad=False))
                for values, scales in self.ops.prepare_experts(*self.quantised, self._context.dtype))

    def _accepts(self, form: str | None) -> bool:
        """Slices that cut a block of FP8 have none, nor have stacks of it that lie the other way round."""
        return form != FP8_EXPERTS or (
            self.has_whole_blocks and not any(size % FP8_BLOCK for size in (self.start, self.length)))

    def _allocate(self, form: str | None, context: LayerContext) -> None:
        self.form = form
        dtype = None if form is None else torch.int8 if form == INT8_EXPERTS else torch.float8_e4m3fn
        gate_up, down = (2 * self.length, self.hidden_size), (self.hidden_size, self.length)
        self.gate_up = context.parameter(self.count, *self._laid_out(gate_up), dtype=dtype)
        self.down = context.parameter(self.count, *self._laid_out(down), dtype=dtype)
        self.gate_up_scales = self.down_scales = None
        if form is not None:
            self.gate_up_scales = context.parameter(self.count, *_grid(form, gate_up), dtype=torch.float32)
            self.down_scales = context.parameter(self.count, *_grid(form, down), dtype=torch.float32)
        self._declare(self.layout)

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
        self.weight_parts = {"gate_up": list(self._gate_up_parts()), "down": list(self._down_parts()),
                             "gate_up_scales": [], "down_scales": []}

    def _laid_out(self, out_in: tuple[int, int]) -> tuple[int, int]:
        return (out_in[1], out_in[0]) if self.is_in_out else out_in

    def _gate_up_parts(self) -> Iterator[WeightPart]:
        """Gate, then up: this rank's share of their outputs."""
        width = self.moe.intermediate_size
        if self.layout != "per_expert" and self.held is not None and self.form is None:
            yield self._whole("gate_up_proj", (2 * width, self.hidden_size))
            return
        for half, name in enumerate(("gate_proj", "up_proj")):
            target = half * self.length
            if self.layout == "per_expert":
                yield from self._each_expert(name, (width, self.hidden_size), output_cut=True, target=target)
            elif self.form is not None:
                yield from self._members("gate_up_proj", (2 * width, self.hidden_size), half * width, target, cut=0)
            else:
                yield self._fused("gate_up_proj", (2 * width, self.hidden_size), half * width, target, cut=0)

    def _down_parts(self) -> Iterator[WeightPart]:
        """This rank's share of the inputs."""
        shape = (self.hidden_size, self.moe.intermediate_size)
        if self.layout == "per_expert":
            yield from self._each_expert("down_proj", shape, output_cut=False, target=0)
        elif self.form is not None:
            yield from self._members("down_proj", shape, 0, 0, cut=1)
        elif self.held is not None:
            yield self._whole("down_proj", shape)
        else:
            yield self._fused("down_proj", shape, 0, 0, cut=1)

    def _each_expert(self, name: str, shape: tuple[int, int], *, output_cut: bool, target: int) -> Iterator[WeightPart]:
        dim = 0 if output_cut else 1
        for expert in range(self.moe.num_experts):
            place = expert - self.first
            yield WeightPart(f"experts.{expert}.{name}.weight", shape, dim=dim, start=self.start, length=self.length,
                             target_start=target, index=place, is_transposed=self.is_in_out,
                             is_elsewhere=not 0 <= place < self.count)

    def _members(self, name: str, out_in: tuple[int, int], first: int, target: int, *,
                 cut: int) -> Iterator[WeightPart]:
        """This rank's experts of a tensor that has all of them, each by itself; arguments as of `_fused`."""
        is_turned = self.layout == "fused_transposed"
        shape = (self.moe.num_experts, *(out_in[::-1] if is_turned else out_in))
        for place in range(self.count):
            yield WeightPart(f"experts.{name}", shape, dim=cut, start=first + self.start, length=self.length,
                             target_start=target, index=place, is_transposed=self.is_in_out,
                             member=Member(self.first + place, is_turned).suffix)

    def _fused(self, name: str, out_in: tuple[int, int], first: int, target: int, *, cut: int) -> WeightPart:
        """All experts in one tensor, (E, out, in) or (E, in, out); `cut` is 0 for outputs and 1 for inputs."""
        dim = 1 + (1 - cut if self.layout == "fused_transposed" else cut)
        return self._stacked_part(name, out_in, dim, first + self.start, self.length, target)

    def _whole(self, name: str, out_in: tuple[int, int]) -> WeightPart:
        """This rank's experts of such a tensor."""
        return self._stacked_part(name, out_in, 0, self.first, self.count)

    def _stacked_part(self, name: str, out_in: tuple[int, int], dim: int, start: int, length: int,
                      target: int = 0) -> WeightPart:
        is_in_out = self.layout == "fused_transposed"
        shape = (out_in[1], out_in[0]) if is_in_out else out_in
        return WeightPart(f"experts.{name}", (self.moe.num_experts, *shape), dim=dim, start=start, length=length,
                          target_start=target, is_transposed=is_in_out != self.is_in_out)


def _grid(form: str, out_in: tuple[int, int]) -> tuple[int, ...]:
    """The extents of an expert's scales: one for each output, or for each block."""
    return out_in[:1] if form == INT8_EXPERTS else (out_in[0] // FP8_BLOCK, out_in[1] // FP8_BLOCK)
