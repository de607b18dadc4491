"""compressed-tensors (llm-compressor): int-, float-, naive- and pack-quantized weights, by tensor, channel, group or
block.

Which module belongs to which group of config.json: targets and ignore, by the names in the file. Scales of inputs are
used beside int8 by channel or tensor, else left. Source: the library's own packing, matching and rounding.

N outputs, K inputs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from npu_runner.checkpoint.formats.contents import FLOATS, FP8, Contents
from npu_runner.checkpoint.formats.stored import (
    Grid,
    Matrix,
    PackedMatrix,
    QuantisedMatrix,
    StoredMatrix,
    static_inputs,
)
from npu_runner.checkpoint.patterns import matches
from npu_runner.checkpoint.quantization import refusal
from npu_runner.checkpoint.weights_reader import BY_ROW, Int8Inputs
from npu_runner.request.limits import shown

_PACKED, _MIXED = "pack-quantized", "mixed-precision"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", _PACKED)
_INPUTS, _OUTPUTS = ("input_scale", "input_zero_point"), ("output_scale", "output_zero_point")
_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
_INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
_FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
_BY_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
# What the library means by the name of a scheme in the place of a group.
_PRESETS: dict[str, dict[str, Any]] = {
    "W8A8": _INT8, "INT8": _INT8, "W8A16": _INT8, "W4A16": _INT4, "W4A16_ASYM": {**_INT4, "symmetric": False},
    "W4A8": _INT4, "W4A8_INT8": _INT4, "W4AFP8": _INT4, "FP8": {**_FLOAT8, "strategy": "tensor"},
    "FP8_DYNAMIC": _FLOAT8, "FP8_BLOCK": {**_FLOAT8, "strategy": "block", "block_structure": [128, 128]}}
_FLOAT8_INPUTS = {"num_bits": 8, "type": "float"}
_INPUTS_OF = {"W8A8": _BY_TOKEN, "INT8": _BY_TOKEN, "FP8": _FLOAT8_INPUTS, "FP8_DYNAMIC": _FLOAT8_INPUTS,
              "FP8_BLOCK": _FLOAT8_INPUTS}


@dataclass(frozen=True, kw_only=True)
class _Scheme:
    """The storage of the weights of one config group."""

    targets: tuple[str, ...]
    bits: int
    is_float: bool
    is_symmetric: bool
    strategy: str
    group_size: int
    block: tuple[int, int]
    has_order: bool
    """The columns of a group may be scattered (actorder group)."""
    packed: bool
    inputs: Int8Inputs | str | None
    """See QuantisedMatrix."""
    has_static_inputs: bool
    """The file has one scale of inputs for each weight of int8, and where they are not symmetric a zero point."""

    @property
    def form(self) -> str:
        name = f"{'fp' if self.is_float else 'int'}{self.bits}"
        found = name + {"group": f" in groups of {self.group_size}", "channel": " by row", "tensor": " by tensor",
                        "block": f" by block of {self.block[0]} x {self.block[1]}"}[self.strategy]
        return f"{found}, static inputs" if self.has_static_inputs else found


def read(contents: Contents, settings: dict[str, Any]) -> None:
    """Raises ModelError for settings that are not read, by their names."""
    schemes, ignored = _schemes(settings), settings.get("ignore") or ()
    for module in sorted(set(contents.suffixed(".weight_packed", ".weight_scale"))):
        scheme = _scheme_of(contents, module, schemes, ignored)
        if scheme is not None:
            _read_matrix(contents, module, scheme)
            contents.leave("scales of inputs and outputs", *(f"{module}.{name}" for name in (
                _OUTPUTS if scheme.has_static_inputs else (*_INPUTS, *_OUTPUTS))))


def _schemes(settings: dict[str, Any]) -> list[_Scheme]:
    status = settings.get("quantization_status", "compressed")
    if status != "compressed":
        raise refusal(f"compressed-tensors, quantization_status {status!r}: its weights are not stored as integers")
    sparsity = (settings.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise refusal(f"compressed-tensors, sparse: {sparsity}")
    if (settings.get("transform_config") or {}).get("config_groups"):
        raise refusal("compressed-tensors, transform_config: rotations at run time")
    groups = settings.get("config_groups")
    if not groups:
        raise refusal(f"compressed-tensors, config_groups {shown(groups)}")
    return [_scheme(name, group, settings.get("format")) for name, group in groups.items()]


def _scheme(name: str, group: Any, overall: str | None) -> _Scheme:
    if isinstance(group, list):  # the name of a scheme, and what it is for
        if name not in _PRESETS:
            raise refusal(f"compressed-tensors, scheme {name!r}")
        group = {"targets": group, "weights": _PRESETS[name], "input_activations": _INPUTS_OF.get(name)}
    weights = group.get("weights")
    if weights is None:
        raise refusal(f"compressed-tensors, group {name!r} without weights")
    named = group.get("format") or overall
    bits, is_float = weights.get("num_bits", 8), weights.get("type", "int") == "float"
    if named not in _FORMATS or (bits != 8 if is_float else bits not in (4, 8)):
        raise refusal(f"compressed-tensors, {named}, {'float' if is_float else 'int'} of {bits} bits")
    size = weights.get("group_size")
    strategy = weights.get("strategy") or ("tensor" if size is None else "group" if size > 0 else "channel")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise refusal(f"compressed-tensors, strategy {strategy!r}")
    block = _block(weights.get("block_structure")) if strategy == "block" else (0, 0)
    return _Scheme(
        targets=tuple(group.get("targets") or ()), bits=bits, is_float=is_float, strategy=strategy,
        is_symmetric=bool(weights.get("symmetric", True)), group_size=size or -1,
        block=block, inputs=_inputs(group.get("input_activations"), strategy, block, bits=bits, is_float=is_float),
        has_order=weights.get("actorder") == "group", packed=named == _PACKED,
        has_static_inputs=(strategy in ("tensor", "channel") and (bits, is_float) == (8, False)
                           and _is_by_tensor(group.get("input_activations"))))


def _inputs(given: Any, strategy: str, block: tuple[int, int], *, bits: int, is_float: bool) -> Int8Inputs | str | None:
    """The rounding of GEMM inputs, as in QuantisedMatrix."""
    by_row = strategy in ("tensor", "channel")
    if is_float and _is_fp8(given):
        return "fp8" if by_row else "fp8_blocks" if block == (128, 128) else None
    return BY_ROW if by_row and (bits, is_float) == (8, False) and _is_by_row(given) else None


def _is_fp8(inputs: Any) -> bool:
    """Whether inputs are FP8. Scales of a static scheme are left: rows get scales of their own."""
    return (isinstance(inputs, dict) and (inputs.get("num_bits", 8), inputs.get("type")) == (8, "float")
            and bool(inputs.get("symmetric", True)))


def _is_by_row(inputs: Any) -> bool:
    """Whether inputs are int8 with a scale of their own for each token, and no zeros."""
    return (_is_int8(inputs) and inputs.get("dynamic") is True and inputs.get("strategy") == "token"
            and bool(inputs.get("symmetric", True)))


def _is_by_tensor(inputs: Any) -> bool:
    """Whether inputs are int8 with a scale in the file, and maybe a zero point."""
    return (_is_int8(inputs) and not inputs.get("dynamic") and inputs.get("strategy") in (None, "tensor")
            and inputs.get("group_size") is None)


def _is_int8(inputs: Any) -> bool:
    return isinstance(inputs, dict) and (inputs.get("num_bits", 8), inputs.get("type", "int")) == (8, "int")


def _block(given: str | list[int] | None) -> tuple[int, int]:
    """As a list, or as text: 128x128."""
    sizes = [int(size) if re.fullmatch("[0-9]{1,6}", size) else 0 for size in given.split("x")] if isinstance(
        given, str) else given or []
    if len(sizes) != 2 or min(sizes) < 1:
        raise refusal(f"compressed-tensors, block_structure {shown(given)}")
    return sizes[0], sizes[1]


def _scheme_of(contents: Contents, module: str, schemes: list[_Scheme], ignored: Any) -> _Scheme | None:
    """The one that targets the module: by exact name, else by pattern, else by class, as the library ranks them."""
    if any(_matches(module, each) for each in ignored):
        contents.problem(f"{module} has quantised weights, and ignore of config.json names it")
        return None
    ranks = (lambda target: target == module, lambda target: target.startswith("re:") and _matches(module, target),
             lambda target: target in ("Linear", "Embedding"))
    for is_meant in ranks:
        for scheme in schemes:
            if any(is_meant(target) for target in scheme.targets):
                return scheme
    contents.problem(f"{module} has quantised weights, and no group of config.json targets it")
    return None


def _matches(module: str, target: str) -> bool:
    return matches(target[3:], module, "quantization_config") if target.startswith("re:") else target == module


def _read_matrix(contents: Contents, module: str, scheme: _Scheme) -> None:
    taken = _packed_values(contents, module, scheme) if scheme.packed else _plain_values(contents, module, scheme)
    if taken is None:
        return
    values, scale, zero = taken, f"{module}.weight_scale", f"{module}.weight_zero_point"
    grid = _grid(contents, module, scheme, values.shape)
    if grid is None:
        return
    shape, block = grid
    shapes = [[1], [], [1, 1]] if scheme.strategy == "tensor" else [[*shape], *([[shape[0]]] if shape[1] == 1 else ())]
    if not contents.claim(scale, FLOATS, *shapes):
        return
    reader, groups = contents.reader, None
    if scheme.has_order and contents.has(f"{module}.weight_g_idx"):
        groups = f"{module}.weight_g_idx"
        if not contents.claim(groups, ("I32", "I64"), [values.shape[1]]):
            return
    zeros = None
    if not scheme.is_symmetric or contents.has(zero):
        zero_matrix = _zeros(contents, zero, scheme, shape, shapes)
        if zero_matrix is None:
            return
        zeros = Grid(zero_matrix, block, groups, reader)
    scales = Grid(StoredMatrix(reader, scale, shape), block, groups, reader)
    inputs = _static_inputs(contents, module) if scheme.has_static_inputs else scheme.inputs
    contents.made[f"{module}.weight"] = QuantisedMatrix(scheme.form, values, (scales,), zeros,
                                                        inputs=inputs if zeros is None else None,
                                                        bits=0 if scheme.is_float else scheme.bits)


def _static_inputs(contents: Contents, module: str) -> Int8Inputs | None:
    """None after a problem was added."""
    scale, zero = f"{module}.input_scale", f"{module}.input_zero_point"
    has_zero = contents.has(zero)
    if not contents.claim(scale, FLOATS, [1], []):
        return None
    if has_zero and not contents.claim(zero, (*FLOATS, "I8", "I32"), [1], []):
        return None
    return static_inputs(contents.reader, scale, zero if has_zero else None)


def _plain_values(contents: Contents, module: str, scheme: _Scheme) -> Matrix | None:
    name = f"{module}.weight"
    if not contents.claim(name, FP8 if scheme.is_float else ("I8",)):
        return None
    if len(contents.reader.shape(name)) != 2:
        contents.problem(f"misshapen: {name} is {list(contents.reader.shape(name))}; a linear's has 2 dims")
        return None
    return StoredMatrix(contents.reader, name)


def _packed_values(contents: Contents, module: str, scheme: _Scheme) -> Matrix | None:
    packed, told = f"{module}.weight_packed", f"{module}.weight_shape"
    if not (contents.claim(told, ("I64", "I32"), [2]) & contents.claim(packed, ("I32",))):
        return None
    rows, columns = (int(size) for size in contents.reader.read(told))
    if not contents.claim(packed, ("I32",), [rows, -(-columns * scheme.bits // 32)]):
        return None
    return PackedMatrix(contents.reader, packed, (rows, columns), bits=scheme.bits, dim=1,
                        offset=-(1 << (scheme.bits - 1)))


def _grid(contents: Contents, module: str, scheme: _Scheme, weight: tuple[int, int]
          ) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """Shape of the scales, and what shares one; None: a problem."""
    rows, columns = weight
    if scheme.strategy == "tensor":
        return (1, 1), weight
    if scheme.strategy == "block":
        return (-(-rows // scheme.block[0]), -(-columns // scheme.block[1])), scheme.block
    num_groups = contents.groups(module, columns, scheme.group_size if scheme.strategy == "group" else -1)
    return None if num_groups is None else ((rows, num_groups), (1, columns // num_groups))


def _zeros(contents: Contents, name: str, scheme: _Scheme, shape: tuple[int, int], shapes: list[list[int]]
           ) -> Matrix | None:
    if scheme.packed and scheme.strategy in ("group", "channel"):
        if not contents.claim(name, ("I32",), [-(-shape[0] * scheme.bits // 32), shape[1]]):
            return None
        return PackedMatrix(contents.reader, name, shape, bits=scheme.bits, dim=0, offset=-(1 << (scheme.bits - 1)))
    dtypes = (*FP8, *FLOATS) if scheme.is_float else ("I8", "I32")
    return StoredMatrix(contents.reader, name, shape) if contents.claim(name, dtypes, *shapes) else None
