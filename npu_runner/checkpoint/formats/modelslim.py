"""ModelSlim's folders (msModelSlim; vLLM calls the format ascend): W8A8 with static inputs, W8A8_DYNAMIC, W8A8_MIX,
W8A16, W4A16 and W4A8_DYNAMIC, as its releases have written them. The description names each tensor's type.

Scales of inputs are used only as far as weights and biases are stored with them. Source: the savers of msModelSlim.

N outputs, K inputs, G groups of inputs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from npu_runner.checkpoint.formats.contents import FLOATS, Contents
from npu_runner.checkpoint.formats.stored import (
    NORM_SHIFT,
    FloatTensor,
    Grid,
    Matrix,
    PackedMatrix,
    QuantisedMatrix,
    Span,
    StoredMatrix,
    StoredVector,
    static_inputs,
)
from npu_runner.checkpoint.quantization import refusal
from npu_runner.checkpoint.weights_reader import BY_ROW, CheckpointReader
from npu_runner.errors import WeightsError

_NORM_BIAS = re.compile(r"(^|\.)layers\.\d+\.\w*layernorm\.bias$|(^|\.)(model|language_model)\.norm\.bias$")
_BEHIND_NO_NORM = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
_STATIC = ("input_scale", "input_offset", "quant_bias", "deq_scale")
_KV_CACHE = (".kv_cache_scale", ".kv_cache_offset")
_ROWS_AT_ONCE = 256
_ROUNDING = 1.0  # quant_bias is rounded to an integer
# What the description says of the whole folder, not of a tensor.
_OF_ALL = {"model_quant_type", "version", "kv_cache_type", "kv_quant_type", "fa_quant_type", "indexer_quant_type",
           "reduce_quant_type"}


def read(contents: Contents, description: dict[str, Any]) -> None:
    """Raises ModelError for a type that is not read, and for rotations at run time, by name."""
    _refuse_more(contents, description)
    for name in contents.suffixed(*_KV_CACHE):
        contents.leave("scales of the KV cache", *(f"{name}{suffix}" for suffix in _KV_CACHE))
    _leave_copies(contents)
    shifts = _norm_shifts(contents)
    for name, kind in sorted(description.items()):
        module = name.removesuffix(".weight")
        is_copy = module.endswith(".module")
        if not isinstance(kind, str) or name in _OF_ALL or not name.endswith(".weight") or is_copy:
            continue
        if kind == "FLOAT":
            if contents.has(name) and contents.reader.dtype(name) == "I8":
                contents.problem(f"of another type: {name} holds I8, its type is FLOAT")
        elif kind not in _TYPES:
            raise refusal(f"modelslim, {kind} ({name})")
        elif contents.has(name) or not module.startswith("mtp."):
            _TYPES[kind](contents, module, description)
    if shifts:
        _give_biases(contents)


def _refuse_more(contents: Contents, description: dict[str, Any]) -> None:
    if description.get("fa_quant_type"):
        raise refusal(f"modelslim, attention in 8 bits, fa_quant_type {description['fa_quant_type']}")
    quarot = (description.get("metadata") or {}).get("quarot") or {}
    for name in ("heads_rotation", "kronecker_rotation"):
        if (quarot.get(name) or {}).get("layers"):
            raise refusal(f"modelslim, QuaRot with {name}: rotations at run time")
    for module in contents.suffixed(".div.mul_scale"):
        raise refusal(f"modelslim, inputs of {module} are multiplied at run time, div.mul_scale")


def _leave_copies(contents: Contents) -> None:
    """Old savers wrote norms twice. Raises ModelError for a second one that is another."""
    for kind in ("weight", "bias"):
        for norm in contents.suffixed(f".module.{kind}"):
            name, original = f"{norm}.module.{kind}", f"{norm}.{kind}"
            copy = contents.reader.read(name).float()
            is_copy = torch.equal(copy, contents.reader.read(original).float()) if contents.has(original) else (
                kind == "bias" and not bool(copy.any()))
            if not is_copy:
                raise refusal(f"modelslim, {name} is no copy of {original}")
            contents.leave("copies of norms", name)


def _norm_shifts(contents: Contents) -> bool:
    """Norms of the decoder have no bias: one that is not zero is added behind the norm. Returns whether there is any.
    """
    found = False
    for name in contents.suffixed(""):
        if _NORM_BIAS.search(name) is None or contents.reader.dtype(name) not in FLOATS:
            continue
        if bool(contents.reader.read(name).any()):
            contents.claim(name, FLOATS, contents.reader.shape(f"{name.removesuffix('bias')}weight"))
            contents.made[f"{name.removesuffix('.bias')}{NORM_SHIFT}"] = StoredVector(contents.reader, name)
            found = True
        else:
            contents.leave("shifts of zero", name)
    return found


def _give_biases(contents: Contents) -> None:
    """Linears behind a shifted norm take the shift back in quant_bias, also those without a bias."""
    for name, made in list(contents.made.items()):
        if isinstance(made, StaticMatrix) and made.must_be_empty is not None and not name.endswith(_BEHIND_NO_NORM):
            contents.made[f"{name.removesuffix('weight')}bias"] = made.must_be_empty
            contents.made[name] = replace(made, must_be_empty=None)


def _outputs(contents: Contents, module: str) -> int | None:
    """N, which weight_scale tells: the weight itself may be packed along either dim."""
    name = f"{module}.weight_scale"
    if not contents.claim(name, FLOATS):
        return None
    return int(contents.reader.shape(name)[0]) if contents.reader.shape(name) else 1


def _read_scales(contents: Contents, module: str, shape: tuple[int, int], suffix: str = "") -> bool:
    """weight_scale and weight_offset of this shape."""
    shapes = [list(shape), *([[shape[0]]] if shape[1] == 1 else [])]
    found = contents.claim(f"{module}.weight_scale{suffix}", FLOATS, *shapes)
    offset = f"{module}.weight_offset{suffix}"
    return found and (not contents.has(offset) or contents.claim(offset, (*FLOATS, "I8", "I32"), *shapes))


def _is_symmetric(contents: Contents, module: str, suffix: str = "") -> bool:
    name = f"{module}.weight_offset{suffix}"
    if contents.has(name) and bool(contents.reader.read(name).any()):
        return contents.problem(f"not zero: {name}; its type has symmetric weights")
    return True


def _grid(contents: Contents, name: str, shape: tuple[int, int], num_inputs: int) -> Grid:
    return Grid(StoredMatrix(contents.reader, name, shape), (1, num_inputs // shape[1]))


def _shape(contents: Contents, module: str, dtypes: tuple[str, ...] = ("I8",)) -> tuple[int, int] | None:
    """The shape of the stored weight."""
    name = f"{module}.weight"
    if not contents.claim(name, dtypes):
        return None
    shape = contents.reader.shape(name)
    if len(shape) != 2:
        contents.problem(f"misshapen: {name} is {list(shape)}; a linear's has 2 dims")
        return None
    return shape[0], shape[1]


# -- types -------------------------------------------------------------------------------------------------------------


def _static(contents: Contents, module: str, description: dict[str, Any]) -> None:
    """W8A8: scales and biases are stored multiplied with those of inputs."""
    shape, reader = _shape(contents, module), contents.reader
    if shape is None:
        return
    names = {name: f"{module}.{name}" for name in _STATIC}
    found = contents.claim(names["deq_scale"], ("F32", "I64"), [shape[0]], [shape[0], 1])
    found &= contents.claim(names["quant_bias"], ("I32",), [shape[0]])
    found &= contents.claim(names["input_scale"], FLOATS, [1], [])
    found &= contents.claim(names["input_offset"], (*FLOATS, "I8"), [1], [])
    contents.leave("second scales of weights", f"{module}.weight_scale", f"{module}.weight_offset")
    if not found:
        return
    values = StoredMatrix(reader, f"{module}.weight")
    bias = StaticBias(reader, values, names["quant_bias"], names["deq_scale"], names["input_offset"])
    scale = Grid(StaticScale(reader, names["deq_scale"], names["input_scale"], shape[0]), (1, shape[1]))
    has_bias = contents.has(f"{module}.bias")
    contents.made[f"{module}.weight"] = StaticMatrix(
        "int8 by row, static inputs", values, (scale,), must_be_empty=None if has_bias else bias,
        inputs=static_inputs(reader, names["input_scale"], names["input_offset"]))
    if has_bias and contents.claim(f"{module}.bias", FLOATS, [shape[0]]):
        contents.made[f"{module}.bias"] = bias


def _dynamic(contents: Contents, module: str, description: dict[str, Any]) -> None:
    """W8A8_DYNAMIC, and W8A8_MIX without its static half."""
    shape = _shape(contents, module)
    contents.leave("scales of inputs", *(f"{module}.{name}" for name in _STATIC))
    if shape is None or not _read_scales(contents, module, (shape[0], 1)) or not _is_symmetric(contents, module):
        return
    contents.made[f"{module}.weight"] = QuantisedMatrix(
        "int8 by row", StoredMatrix(contents.reader, f"{module}.weight"),
        (_grid(contents, f"{module}.weight_scale", (shape[0], 1), shape[1]),), inputs=BY_ROW)


def _int8_weights(contents: Contents, module: str, description: dict[str, Any]) -> None:
    """W8A16, by rows or groups; offsets count."""
    shape = _shape(contents, module)
    if shape is None:
        return
    _grouped(contents, module, StoredMatrix(contents.reader, f"{module}.weight"), 8, description)


def _int4_weights(contents: Contents, module: str, description: dict[str, Any]) -> None:
    """W4A16: nibbles packed along N or K, or, by older savers, one a byte."""
    stored, num_outputs = _shape(contents, module), _outputs(contents, module)
    if stored is None or num_outputs is None:
        return
    along_columns = stored[0] == num_outputs and "version" in description
    values = _nibbles(contents, module, stored, num_outputs, along_columns=along_columns)
    if values is not None:
        _grouped(contents, module, values, 4, description)


def _int4_dynamic(contents: Contents, module: str, description: dict[str, Any]) -> None:
    """W4A8_DYNAMIC: packed along N, or one a byte; scales by row, and where it has groups, a second one for each."""
    stored, num_outputs = _shape(contents, module), _outputs(contents, module)
    contents.leave("corrections of a kernel", f"{module}.scale_bias")
    if stored is None or num_outputs is None:
        return
    values = _nibbles(contents, module, stored, num_outputs, along_columns=False)
    if values is None or not _read_scales(contents, module, (num_outputs, 1)) or not _is_symmetric(contents, module):
        return
    scales = [_grid(contents, f"{module}.weight_scale", (num_outputs, 1), values.shape[1])]
    second = f"{module}.weight_scale_second"
    if contents.has(second):
        groups = _num_groups(contents, module, second, values.shape[1], description)
        if groups is None or not _read_scales(contents, module, (num_outputs, groups), "_second") or not _is_symmetric(
                contents, module, "_second"):
            return
        scales.append(_grid(contents, second, (num_outputs, groups), values.shape[1]))
    form = "int4 by row" if len(scales) == 1 else f"int4 in groups of {scales[1].block[1]}"
    contents.made[f"{module}.weight"] = QuantisedMatrix(form, values, tuple(scales))


def _nibbles(contents: Contents, module: str, stored: tuple[int, int], num_outputs: int, *, along_columns: bool
             ) -> Matrix | None:
    """Two's complement, the low nibble first. The file's shape tells whether they are packed along N."""
    name = f"{module}.weight"
    if 2 * stored[0] == num_outputs:
        return PackedMatrix(contents.reader, name, (num_outputs, stored[1]), bits=4, dim=0, word_bits=8, is_signed=True)
    if stored[0] != num_outputs:
        contents.problem(f"misshapen: {name} is {list(stored)}, its scales are of {num_outputs} outputs")
        return None
    if along_columns:
        return PackedMatrix(contents.reader, name, (num_outputs, 2 * stored[1]), bits=4, dim=1, word_bits=8,
                            is_signed=True)
    return StoredMatrix(contents.reader, name)


def _grouped(contents: Contents, module: str, values: Matrix, bits: int, description: dict[str, Any]) -> None:
    """(values - weight_offset) * weight_scale."""
    num_outputs, num_inputs = values.shape
    scale, offset = f"{module}.weight_scale", f"{module}.weight_offset"
    groups = _num_groups(contents, module, scale, num_inputs, description)
    if groups is None or not _read_scales(contents, module, (num_outputs, groups)):
        return
    shape = (num_outputs, groups)
    form = f"int{bits} by row" if groups == 1 else f"int{bits} in groups of {num_inputs // groups}"
    zeros = _grid(contents, offset, shape, num_inputs) if contents.has(offset) else None
    scales = _grid(contents, scale, shape, num_inputs)
    contents.made[f"{module}.weight"] = QuantisedMatrix(form, values, (scales,), zeros, bits=bits)


def _num_groups(contents: Contents, module: str, scale: str, num_inputs: int, description: dict[str, Any]
                ) -> int | None:
    """By the scale's shape; a size that the description names must be the same."""
    if not contents.claim(scale, FLOATS):
        return None
    shape = contents.reader.shape(scale)
    groups, told = (shape[1] if len(shape) > 1 else 1), int(description.get("group_size") or 0)
    if groups < 1 or num_inputs % groups or (groups > 1 and told > 0 and num_inputs // groups != told):
        of = f" of {told}" if told > 0 else ""
        contents.problem(f"misshapen: {scale} is {list(shape)}; {num_inputs} inputs of {module} do not divide into "
                         f"such groups{of}")
        return None
    return int(groups)


_TYPES: dict[str, Callable[[Contents, str, dict[str, Any]], None]] = {
    "W8A8": _static, "W8A8_DYNAMIC": _dynamic, "W8A8_MIX": _dynamic, "W8A16": _int8_weights, "W4A16": _int4_weights,
    "W4A8_DYNAMIC": _int4_dynamic}


# -- W8A8 with static inputs -------------------------------------------------------------------------------------------


def deq_scale(reader: CheckpointReader, name: str) -> Tensor:
    """(N,) float64. For float16 models the file has int64 with the bits of a float32 in the low half."""
    stored_N = reader.read(name).flatten()
    if stored_N.dtype == torch.int64:
        stored_N = stored_N.contiguous().view(torch.int32)[::2].contiguous().view(torch.float32)
    return stored_N.double()


class StaticScale(Matrix):
    """(N, 1) float32: deq_scale / input_scale.

    A W8A8 matmul computes (q W^T + quant_bias) * deq_scale with q = round(x / input_scale + input_offset). So without
    the scale and the offset of inputs the weight is W * deq_scale / input_scale, and the bias
    (quant_bias + input_offset * sum_k W) * deq_scale. A float bias beside it is already in there.
    """

    def __init__(self, reader: CheckpointReader, deq_scale_name: str, input_scale_name: str, num_outputs: int):
        self._reader, self._names, self.shape = reader, (deq_scale_name, input_scale_name), (num_outputs, 1)

    def read(self, rows: Span, columns: Span) -> Tensor:
        input_scale = self._reader.read(self._names[1]).double().item()
        if not input_scale > 0:
            raise WeightsError(f"{self._names[1]} is {input_scale}, a scale of inputs is above 0; copy the checkpoint "
                               "again from its source")
        scale_N = deq_scale(self._reader, self._names[0]) / input_scale
        return scale_N[rows[0]: rows[0] + rows[1], None].float()


class StaticBias(FloatTensor):
    """(N,): the bias without the part that corrects for the offset of inputs."""

    form = ""

    def __init__(self, reader: CheckpointReader, values: StoredMatrix, quant_bias: str, deq_scale_name: str,
                 input_offset: str):
        self._reader, self._values = reader, values
        self.quant_bias, self._deq_scale, self._input_offset = quant_bias, deq_scale_name, input_offset
        self.shape = (values.shape[0],)

    def read(self, spans: Sequence[Span]) -> Tensor:
        (start, length), = spans
        scale_N = deq_scale(self._reader, self._deq_scale)[start: start + length]
        return (self.units((start, length)) * scale_N).float()

    def units(self, rows: Span) -> Tensor:
        """float64, in units of deq_scale."""
        start, length = rows
        offset = self._reader.read(self._input_offset).double().item()
        sums = [self._values.read((first, min(_ROWS_AT_ONCE, start + length - first)), (0, self._values.shape[1])
                                  ).sum(1, dtype=torch.int64) for first in range(start, start + length, _ROWS_AT_ONCE)]
        quant_bias_N = self._reader.read(self.quant_bias)[start: start + length].double()
        return quant_bias_N + offset * torch.cat(sums).double()


@dataclass(frozen=True)
class StaticMatrix(QuantisedMatrix):
    """`must_be_empty`: the bias of a linear that has none; what stands in it would be lost."""

    must_be_empty: StaticBias | None = None

    def read(self, spans: Sequence[Span]) -> Tensor:
        self._check_bias(*spans)
        return super().read(spans)

    def read_rows(self, rows: Span, columns: Span) -> tuple[Tensor, Tensor]:
        self._check_bias(rows, columns)
        return super().read_rows(rows, columns)

    def _check_bias(self, rows: Span, columns: Span) -> None:
        if self.must_be_empty is not None and columns == (0, self.values.shape[1]):
            most = float(self.must_be_empty.units(rows).abs().max())
            if most > _ROUNDING:
                raise WeightsError(f"{self.must_be_empty.quant_bias} holds a bias of {most:.0f} units beside the "
                                   "offset of inputs, and the file has neither a bias for this linear nor a shift of "
                                   "the norm before it; copy the checkpoint again from its source")
