"""FP8 weights as DeepSeek and Qwen publish them: one scale for each block, or one for the tensor. Experts one by one,
or fused in three dims. The scale's name says inverse; the weight is multiplied with it.

N outputs, K inputs, E experts.
"""

from __future__ import annotations

from typing import Any

from npu_runner.checkpoint.formats.contents import FLOATS, FP8, Contents
from npu_runner.checkpoint.formats.stored import Grid, QuantisedMatrix, QuantisedStack, StoredMatrix
from npu_runner.checkpoint.quantization import refusal

_SCALES = (*FLOATS, "F8_E8M0")
_INVERSE = "_scale_inv"


def read(contents: Contents, settings: dict[str, Any]) -> None:
    """Every FP8 tensor with its scale; the tensors tell, as lists of names in config.json are often incomplete."""
    kind = settings.get("fmt", "e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise refusal(f"fp8, fmt {kind}")
    block = _block(settings.get("weight_block_size"))
    reader = contents.reader
    for name in sorted(reader.names):
        if reader.dtype(name).startswith("F8_E4M3") and not name.endswith(_INVERSE):
            _read_weight(contents, name, block)
    for name in contents.suffixed(_INVERSE):
        if contents.has(name) and name not in contents.made and f"{name}{_INVERSE}" not in contents.claimed:
            contents.problem(f"of another type: {name} holds {reader.dtype(name)}, its scale makes it {FP8[0]}")


def _block(given: Any) -> tuple[int, int] | None:
    if given is None:
        return None
    sizes = tuple(given) if isinstance(given, (list, tuple)) else ()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise refusal(f"fp8, weight_block_size {given!r}")
    return sizes[0], sizes[1]


def _read_weight(contents: Contents, name: str, block: tuple[int, int] | None) -> None:
    shape = contents.reader.shape(name)
    if len(shape) not in (2, 3):
        contents.problem(f"misshapen: {name} is {list(shape)}; an FP8 weight has 2 dims, or 3 for experts")
        return
    rows, columns = shape[-2:]
    scale, form = f"{name}{_INVERSE}", "fp8 by tensor"
    shapes: list[tuple[int, ...]] = [(*shape[:-2], 1, 1), *([(), (1,)] if len(shape) == 2 else [])]
    if block is None:
        scale = scale if contents.has(scale) else f"{name}_scale"
        block = (rows, columns)
    else:
        form = f"fp8 by block of {block[0]} x {block[1]}"
        shapes = [(*shape[:-2], -(-rows // block[0]), -(-columns // block[1]))]
    if not (contents.claim(name, FP8) & contents.claim(scale, _SCALES, *shapes)):
        return
    # Inputs of a static scheme are as they come here.
    module = name.removesuffix(".weight")
    contents.leave("scales of inputs", f"{module}.input_scale", f"{module}.activation_scale")
    matrices = tuple(
        QuantisedMatrix(form, StoredMatrix(contents.reader, name, index=index),
                        (Grid(StoredMatrix(contents.reader, scale, index=index), block),),
                        inputs="fp8" if block == (rows, columns) else "fp8_blocks" if block == (128, 128) else None)
        for index in (range(shape[0]) if len(shape) == 3 else [None]))
    contents.made[name] = matrices[0] if len(shape) == 2 else QuantisedStack(matrices)
