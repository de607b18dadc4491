"""AWQ in the gemm layout: 4 bits in groups of inputs, with zeros; the columns of a word in an order of their own.

N outputs, K inputs, g inputs a group. qweight (K, N / 8), qzeros (K / g, N / 8), scales (K / g, N).
"""

from __future__ import annotations

from typing import Any

from npu_runner.checkpoint.formats.contents import FLOATS, Contents
from npu_runner.checkpoint.formats.stored import Grid, PackedMatrix, QuantisedMatrix, StoredMatrix
from npu_runner.checkpoint.quantization import refusal

_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_BITS, _A_WORD = 4, 8


def read(contents: Contents, settings: dict[str, Any]) -> None:
    """Raises ModelError for another layout or other bits."""
    version = str(settings.get("version", "gemm")).lower()
    bits = settings.get("bits", settings.get("w_bit", _BITS))
    has_zeros = settings.get("zero_point", True)
    if version != "gemm" or bits != _BITS or not has_zeros:
        raise refusal(f"awq, version {version!r}, {bits} bits, {'with' if has_zeros else 'without'} zeros; read are "
                      "version 'gemm', 4 bits, with zeros")
    group_size = settings.get("group_size", settings.get("q_group_size", 128))
    for module in contents.suffixed(".qweight"):
        _read_matrix(contents, module, group_size)


def _read_matrix(contents: Contents, module: str, group_size: int) -> None:
    reader, name = contents.reader, f"{module}.qweight"
    if not contents.claim(name, ("I32",)):
        return
    if len(reader.shape(name)) != 2:
        contents.problem(f"misshapen: {name} is {list(reader.shape(name))}; it has 2 dims")
        return
    num_inputs, words = reader.shape(name)
    num_outputs = words * _A_WORD
    groups = contents.groups(module, num_inputs, group_size)
    if groups is None:
        return
    zeros, scales = f"{module}.qzeros", f"{module}.scales"
    if not (contents.claim(zeros, ("I32",), [groups, words]) & contents.claim(scales, FLOATS, [groups, num_outputs])):
        return
    block = (1, num_inputs // groups)

    def numbers(stored: str, columns: int) -> PackedMatrix:
        return PackedMatrix(reader, stored, (num_outputs, columns), bits=_BITS, dim=1, order=_ORDER, is_transposed=True)

    contents.made[f"{module}.weight"] = QuantisedMatrix(
        f"int4 in groups of {block[1]}", numbers(name, num_inputs),
        (Grid(StoredMatrix(reader, scales, is_transposed=True), block),), Grid(numbers(zeros, groups), block),
        bits=_BITS, centre=1 << (_BITS - 1))
