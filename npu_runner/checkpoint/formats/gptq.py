"""GPTQ, v1 and v2, of 4 and 8 bits; inputs may be scattered over the groups (desc_act).

N outputs, K inputs, G groups, b bits. qweight (K b / 32, N), qzeros (G, N b / 32), scales (G, N), g_idx (K,). A zero of
v1 is stored less 1.
"""

from __future__ import annotations

from typing import Any

from npu_runner.checkpoint.formats.contents import FLOATS, Contents
from npu_runner.checkpoint.formats.stored import Grid, PackedMatrix, QuantisedMatrix, StoredMatrix
from npu_runner.checkpoint.patterns import matches
from npu_runner.checkpoint.quantization import refusal


def read(contents: Contents, settings: dict[str, Any]) -> None:
    """Raises ModelError for another layout or other bits."""
    layout = settings.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2") or settings.get("is_marlin_format"):
        raise refusal(f"gptq, checkpoint_format {'marlin' if layout == 'gptq' else layout!r}")
    for module in contents.suffixed(".qweight"):
        own = _own_settings(module, settings)
        if own.get("bits") not in (4, 8) or own.get("group_size") == 0:
            raise refusal(f"gptq, {own.get('bits')} bits in groups of {own.get('group_size')}; 4 and 8 bits are read, "
                          "in groups of 1 and more, or -1 for one group")
        _read_matrix(contents, module, own, is_v2=layout == "gptq_v2")


def _own_settings(module: str, settings: dict[str, Any]) -> dict[str, Any]:
    """With what `dynamic` changes for modules of a pattern."""
    for pattern, changes in (settings.get("dynamic") or {}).items():
        is_meant = matches(pattern.removeprefix("+:"), module, "quantization_config.dynamic")
        if not pattern.startswith("-:") and is_meant:
            return {**settings, **changes}
    return settings


def _read_matrix(contents: Contents, module: str, settings: dict[str, Any], *, is_v2: bool) -> None:
    bits, group_size = settings["bits"], settings.get("group_size", -1)
    reader, name, a_word = contents.reader, f"{module}.qweight", 32 // bits
    if not contents.claim(name, ("I32",)):
        return
    if len(reader.shape(name)) != 2:
        contents.problem(f"misshapen: {name} is {list(reader.shape(name))}; it has 2 dims")
        return
    words, num_outputs = reader.shape(name)
    num_inputs = words * a_word
    # Groups that inputs are scattered over need not be equally full.
    groups = 1 if group_size == -1 else -(-num_inputs // group_size)
    zeros, scales, places = (f"{module}.{each}" for each in ("qzeros", "scales", "g_idx"))
    found = contents.claim(zeros, ("I32",), [groups, -(-num_outputs // a_word)])
    found &= contents.claim(scales, FLOATS, [groups, num_outputs])
    has_places = contents.has(places) or bool(settings.get("desc_act"))
    if has_places:
        found &= contents.claim(places, ("I32", "I64"), [num_inputs])
    elif contents.groups(module, num_inputs, group_size) is None:
        return
    if not found:
        return
    block = (1, num_inputs if group_size == -1 else group_size)
    grid = (places, reader) if has_places else (None, None)
    values = PackedMatrix(reader, name, (num_outputs, num_inputs), bits=bits, dim=0, is_transposed=True)
    zero_matrix = PackedMatrix(reader, zeros, (num_outputs, groups), bits=bits, dim=1, offset=0 if is_v2 else 1,
                               is_transposed=True)
    contents.made[f"{module}.weight"] = QuantisedMatrix(
        f"int{bits} in groups of {block[1]}", values,
        (Grid(StoredMatrix(reader, scales, is_transposed=True), block, *grid),), Grid(zero_matrix, block, *grid),
        bits=bits, centre=1 << (bits - 1))
