"""Linear layers, cut over tensor-parallel ranks. Know nothing of what they are used for.

I input features, O output features of this rank, T tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from npu_runner.checkpoint.weights_reader import GroupedForm, Int8Inputs
from npu_runner.errors import WeightsError
from npu_runner.layers import grouped_weights
from npu_runner.layers.grouped_weights import Held
from npu_runner.layers.parallel import LayerContext, WeightPart
from npu_runner.layers.static_inputs import MOST_ROWS_WITH_ONES, BehindNorm, StaticTerms
from npu_runner.platforms.grouped import GROUPED, GroupedWeight
from npu_runner.platforms.quantised import (
    FP8,
    FP8_ALIGNMENT,
    FP8_BLOCK,
    FP8_BLOCKS,
    INT8,
    INT8_STATIC,
    Fp8Weight,
    Int8Weight,
    NormRounding,
    QuantisedWeight,
    RoundedRows,
    StaticInt8Weight,
    StaticRows,
)


@dataclass(frozen=True)
class OutputPart:
    """Rows [start, start + length) of checkpoint linear `name`, which has `total` output features in all."""

    name: str
    total: int
    start: int
    length: int
    is_gate: bool = False
    """Its few outputs are gates: it stays in 16 bits where others are quantized at load."""

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
_OF_INT8 = (INT8, INT8_STATIC)


def form_of(inputs: Held) -> str:
    """The form of a weight that is held so."""
    if isinstance(inputs, GroupedForm):
        return GROUPED
    return inputs if isinstance(inputs, str) else INT8 if inputs.scale is None else INT8_STATIC


class HeldLinear(nn.Module):
    """A weight (O, I) and a bias in the form that `hold` is told.

    It may be of the model's dtype, int8 with scales by row, FP8 with scales by row or by block, or integers in groups.
    Some rows may be of the model's dtype and the others in one more form. Inputs of int8 are rounded by row or by one
    scale.

    `weight_parts` are what the checkpoint calls the float tensors, whatever the form.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    """float32 of int8, and of groups beside bfloat16: the matmul adds it before it rounds."""
    scales: nn.Parameter | None
    """float32, of quantised rows or blocks; of groups in the model's dtype."""
    zeros: nn.Parameter | None
    """Zero points of groups, if there are any."""
    shifts: nn.Parameter | None
    """int32, for inputs of one scale: the loader adds up each row's integers here; `weights_are_loaded` makes them what
    StaticInt8Weight has. So it makes `scales`."""
    behind_norm: BehindNorm | None
    """Parameters of a norm that rounds inputs of one scale."""
    rest: nn.Parameter | None
    """Rows of the model's dtype beside quantised ones, and their bias."""
    rest_bias: nn.Parameter | None
    form: str | None
    """The weight's form; None: the model's dtype."""
    weight_parts: dict[str, list[WeightPart]]
    gates: frozenset[str] = frozenset()
    """The names among `weight_parts` whose OutputPart `is_gate`."""
    stays: bool = False
    """Its inputs have outliers: it is left in 16 bits where other weights are made int8 or FP8."""
    splits: bool = True
    """Rows may be of both kinds. Not where others than the loader move rows."""

    def __init__(self, out_features: int, in_features: int, *, bias: bool, context: LayerContext, padding: Padding):
        super().__init__()
        self.ops, self.quantised = context.ops, context.quantised
        self._context, self._is_padded = context, not padding.is_none
        self._shape, self._has_bias = (out_features, in_features), bias
        self.rest = self.rest_bias = self.shifts = self.zeros = self.behind_norm = None
        self._grouped_form: GroupedForm | None = None
        self.adds_bias = True
        # With forms the checkpoint says which one it is, and so how many bytes.
        self.is_held = not context.weight_forms
        self._allocate(None, out_features, context if self.is_held else
                       dataclasses.replace(context, device=torch.device("meta")))

    @property
    def forms(self) -> tuple[str, ...]:
        """The forms of quantised weights that it may be told to hold."""
        return self._context.weight_forms

    def hold(self, inputs: Sequence[Held | None]) -> None:
        """Allocate weight and bias. `inputs`: how each part of the weight is held.

        Parts in 16 bits beside others are a second matmul where each kind lies side by side and rows of inputs have
        their own scales; else all become the model's dtype, as they do where the form has no matmul for this shape.
        What no tensor fills is zero.
        """
        self.is_held, inputs = True, grouped_weights.common_form(inputs)
        cuts = [place for place in range(1, len(inputs)) if inputs[place] != inputs[place - 1]]
        kinds = {each for each in inputs if each is not None}
        how = kinds.pop() if len(kinds) == 1 else None
        self._grouped_form = how if isinstance(how, GroupedForm) else None
        if how is None or not self._accepts(how, inputs):
            self._allocate(None, self._shape[0], self._context)
        elif not cuts:
            self._allocate(form_of(how), self._shape[0], self._context)
            self._set_inputs(how)
        elif len(cuts) == 1 and form_of(how) != INT8_STATIC and self.splits:
            self._split(cuts[0], form_of(how), is_first=inputs[0] is not None)
        else:
            self._allocate(None, self._shape[0], self._context)

    @property
    def rows(self) -> list[Tensor]:
        """All tensors with one row per output; FP8 as bytes, which any operator moves."""
        weight_OI = self.weight.data.view(torch.int8) if self.form == FP8 else self.weight.data
        others = (self.scales, self.zeros, self.shifts, self.bias)
        return [weight_OI, *(each.data for each in others if each is not None)]

    def can_be_quantized(self, how: Held) -> bool:
        """Whether weights that are not gates may be held as `how`, which they are made while they are read."""
        held = [None if part.name in self.gates else how for part in self.weight_parts["weight"]]
        return not self.stays and how in held and self._accepts(how, held)

    def _accepts(self, how: Held, inputs: Sequence[Held | None]) -> bool:
        """int8 has none of more features than the platform takes. FP8 has none of sizes that no 16 bytes divide; blocks
        have none where rows or columns cut one, nor where four of them do not divide the inputs."""
        if isinstance(how, Int8Inputs):
            most = self.quantised.max_int8_features
            return most is None or max(self._shape) <= most
        parts = [part for part, own in zip(self.weight_parts["weight"], inputs, strict=True) if own == how]
        rows = sum(part.length for part in parts) if parts[0].dim == 0 and None in inputs else self._shape[0]
        if isinstance(how, GroupedForm):
            return grouped_weights.accepts(how, parts, rows, self._shape[1], is_padded=self._is_padded)
        if how == FP8:
            return (rows | self._shape[1]) % FP8_ALIGNMENT == 0
        places = [place for part in parts for place in (part.start, part.length, part.target_start)]
        is_cut = self._is_padded or not self.splits or any(place % FP8_BLOCK for place in (*places, rows))
        return not is_cut and self._shape[1] % (4 * FP8_BLOCK) == 0

    def multiply(self, x_TI: Tensor | RoundedRows, bias_O: Tensor | None) -> Tensor:
        """x W^T + bias, (T, O). `x_TI` may be rounded where all of the weight is quantised."""
        if self.scales is None:
            assert isinstance(x_TI, Tensor), "rounded inputs are for quantised weights"
            return self.ops.linear(x_TI, self.weight, bias_O)
        weight = self._quantised_weight(self.scales, is_rounded=isinstance(x_TI, StaticRows))
        out_TO = self.quantised.linear(x_TI, weight, bias_O)
        if self.rest is None:
            return out_TO
        assert isinstance(x_TI, Tensor), "some rows are not quantised"
        rest_TO = self.ops.linear(x_TI, self.rest, self.rest_bias)
        return torch.cat((out_TO, rest_TO) if self._is_form_first else (rest_TO, out_TO), dim=-1)

    def _quantised_weight(self, scales: Tensor, *, is_rounded: bool) -> QuantisedWeight:
        """`is_rounded`: a norm has rounded the inputs by one scale."""
        if self.form == GROUPED:
            return GroupedWeight(self.weight, scales, self.zeros)
        if self.form != INT8_STATIC:
            return (Int8Weight if self.form == INT8 else Fp8Weight)(self.weight, scales)
        assert self.shifts is not None, "inputs of one scale come with shifts"
        shifts_O, scales_O = self.shifts, scales
        if is_rounded:
            assert self.behind_norm is not None, "no norm was told how to round"
            shifts_O, scales_O = self.behind_norm.shifts, self.behind_norm.scales
        return StaticInt8Weight(self.weight, shifts_O, scales_O, self.input_scale, self.input_offset, self.ones)

    def _allocate(self, form: str | None, num_rows: int, context: LayerContext) -> None:
        self.form, num_inputs = form, self._shape[1]
        wide = torch.float32 if form in _OF_INT8 else grouped_weights.bias_dtype(self._context.dtype) if (
            form == GROUPED) else None
        self.bias = context.parameter(num_rows, dtype=wide) if self._has_bias else None
        if form == GROUPED:
            assert self._grouped_form is not None, "told by `hold`"
            self._set_grouped(grouped_weights.allocate(self._grouped_form, num_rows, num_inputs, context))
        else:
            dtype = None if form is None else torch.int8 if form in _OF_INT8 else torch.float8_e4m3fn
            self.weight = context.parameter(num_rows, num_inputs, dtype=dtype)
            grid = (num_rows // FP8_BLOCK, num_inputs // FP8_BLOCK) if form == FP8_BLOCKS else (num_rows,)
            self.scales = None if form is None else context.parameter(*grid, dtype=torch.float32)
        if self._is_padded:
            for parameter in self.parameters():
                parameter.zero_()

    @property
    def grouped(self) -> grouped_weights.GroupedParameters | None:
        """The parameters of a grouped weight; None for other forms."""
        if self._grouped_form is None or self.scales is None:
            return None
        return grouped_weights.GroupedParameters(self._grouped_form, self.weight, self.scales, self.zeros)

    def _set_grouped(self, parameters: grouped_weights.GroupedParameters) -> None:
        self.weight, self.scales, self.zeros = parameters.values, parameters.scales, parameters.zeros
        self.weight_parts |= {"zeros": []}

    def _set_inputs(self, inputs: Held) -> None:
        if not isinstance(inputs, Int8Inputs) or inputs.scale is None:
            return
        context, self._inputs = self._context, inputs
        self.shifts = context.parameter(self._shape[0], dtype=torch.int32)
        self.input_scale, self.input_offset = context.parameter(1), context.parameter(1)
        self.shifts.zero_()
        self.input_scale.fill_(1 / inputs.scale)
        self.input_offset.fill_(inputs.offset)
        self.ones = None
        if context.dtype == torch.float16:
            self.ones = context.parameter(MOST_ROWS_WITH_ONES, dtype=torch.float32)
            self.ones.fill_(1.0)
        self.weight_parts |= {"shifts": [], "input_scale": [], "input_offset": [], "ones": []}

    def fuse_norm_rounding(self) -> NormRounding:
        """The rounding for the norm in front, for inputs of one scale. Called before `weights_are_loaded`."""
        assert self.shifts is not None, "for inputs of one scale"
        assert self.bias is not None or not self._has_bias, "weights are loaded, and the bias is in the shifts"
        self.behind_norm = BehindNorm(self._inputs, self._shape[1], self._shape[0], self._context)
        return self.behind_norm.rounding

    def weights_are_loaded(self) -> None:
        """Prepare a quantised weight. With inputs of one scale each rank corrects its offset; one adds the bias."""
        if self.scales is None:
            return
        stored = Int8Weight(self.weight.data, self.scales.data) if self.form == INT8_STATIC else (
            self._quantised_weight(self.scales.data, is_rounded=False))
        assert not isinstance(stored, StaticInt8Weight), "its values are those of an Int8Weight"
        found = self.quantised.prepare_weight(stored)
        self.weight, self.scales = (nn.Parameter(each, requires_grad=False) for each in found[:2])
        if isinstance(found, GroupedWeight) and found.zeros is not None:
            self.zeros = nn.Parameter(found.zeros, requires_grad=False)
        if self.shifts is None:
            return
        name = self.weight_parts["weight"][0].name
        if not 0 < float(self.input_scale) < math.inf:
            raise WeightsError(f"the scale of inputs beside {name} is {self._inputs.scale}, and "
                               f"{str(self.input_scale.dtype).removeprefix('torch.')} does not hold its reciprocal; "
                               "set dtype to bfloat16")
        sums_O, scales_O = self.shifts.cpu().double(), self.scales.cpu().double()
        bias_O = torch.zeros_like(sums_O)
        if self.bias is not None and self.adds_bias:
            bias_O = self.bias.cpu().double()
        terms = StaticTerms(name, sums_O, scales_O, bias_O, self._inputs.offset)
        shifts_O, own_scales_O = terms.at_step(1 / float(self.input_scale))
        if self.behind_norm is not None:
            self.behind_norm.fill(terms)
        self.shifts.copy_(shifts_O)
        self.scales.copy_(own_scales_O)
        self.bias = None

    def _split(self, place: int, form: str, *, is_first: bool) -> None:
        """Into parts before `place` and from there on; those of `form` come first, or the others do."""
        first_row, (out_features, in_features) = self.weight_parts["weight"][place].target_start, self._shape
        counts, context = [first_row, out_features - first_row], self._context
        own, other = (0, 1) if is_first else (1, 0)
        self._is_form_first = is_first
        self._allocate(form, counts[own], context)
        self.rest = context.parameter(counts[other], in_features)
        self.rest_bias = context.parameter(counts[other]) if self._has_bias else None
        if self._is_padded:
            self.rest.zero_()
        for name in ("weight", "bias") if self._has_bias else ("weight",):
            parts = self.weight_parts[name]
            runs = parts[:place], [dataclasses.replace(part, target_start=part.target_start - first_row)
                                   for part in parts[place:]]
            self.weight_parts[name] = runs[own]
            self.weight_parts["rest" if name == "weight" else "rest_bias"] = runs[other]


class ColumnParallelLinear(HeldLinear):
    """Several checkpoint linears (or slices of one) as one matmul, output features cut over the ranks."""

    def __init__(self, in_features: int, parts: Sequence[OutputPart], *, bias: bool, context: LayerContext,
                 padding: Padding = _NO_PADDING):
        out_features = sum(padding.padded(part.length) for part in parts)
        super().__init__(out_features, in_features, bias=bias, context=context, padding=padding)
        self.gates = frozenset(f"{part.name}.weight" for part in parts if part.is_gate)
        self.weight_parts = {"weight": [], "scales": []}
        if bias:
            self.weight_parts["bias"] = []
        target = 0
        for part in parts:
            for kind, shape in (("weight", (part.total, in_features)), ("bias", (part.total,))):
                if kind in self.weight_parts:
                    self.weight_parts[kind] += [
                        WeightPart(f"{part.name}.{kind}", shape, dim=0, start=start, length=length,
                                   target_start=target + place) for start, length, place in part.runs(padding)
                    ]
            target += padding.padded(part.length)

    def add_bias(self) -> None:
        """Have a bias with the rows of the weight. Comes before `hold`, and before anything is loaded."""
        if not self._has_bias:
            self._has_bias = True
            self.weight_parts["bias"] = [
                dataclasses.replace(part, name=f"{part.name.removesuffix('weight')}bias", shape=part.shape[:1])
                for part in self.weight_parts["weight"]]
            if self.is_held:
                self._allocate(None, self._shape[0], self._context)

    def forward(self, x_TI: Tensor | RoundedRows) -> Tensor:
        return self.multiply(x_TI, self.bias)

    def gelu_forward(self, x_TI: Tensor, approximate: str) -> Tensor:
        """gelu(forward(x)); `approximate` as in Ops.gelu."""
        if self.scales is not None:
            return self.ops.gelu(self(x_TI), approximate)
        return self.ops.linear_gelu(x_TI, self.weight, self.bias, approximate)


class RowParallelLinear(HeldLinear):
    """Input features cut over the ranks; the outputs are summed, or left to the caller to sum without `reduces`."""

    def __init__(self, name: str, in_features: int, out_features: int, *, bias: bool, context: LayerContext,
                 padding: Padding = _NO_PADDING, reduces: bool = True):
        assert reduces or not bias, "each rank would add the bias"
        start, length = context.tp.share(in_features, f"{name} input features")
        super().__init__(out_features, padding.padded(length), bias=bias, context=context, padding=padding)
        self.tp = context.tp
        self.reduces = reduces
        self.adds_bias = context.tp.rank == 0
        runs = OutputPart(name, in_features, start, length).runs(padding)
        self.weight_parts = {
            "weight": [WeightPart(f"{name}.weight", (out_features, in_features), dim=1, start=first, length=count,
                                  target_start=place) for first, count, place in runs],
            "bias": [WeightPart(f"{name}.bias", (out_features,))],
            "scales": [],
        }

    def forward(self, x_TI: Tensor | RoundedRows) -> Tensor:
        if self.tp.size == 1 or not self.reduces:
            return self.multiply(x_TI, self.bias if self.adds_bias else None)
        if self.scales is not None:
            return self.tp.all_reduce(self.multiply(x_TI, self.bias if self.adds_bias else None))
        out_TO = self.tp.all_reduce(self.multiply(x_TI, None))
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


def side_by_side(name: str, parts: Sequence[OutputPart]) -> list[OutputPart]:
    """The same shares where the checkpoint has these linears, one after the other, as one of this name."""
    total, first, moved = sum(part.total for part in parts), 0, []
    for part in parts:
        moved.append(OutputPart(name, total, first + part.start, part.length))
        first += part.total
    return moved


