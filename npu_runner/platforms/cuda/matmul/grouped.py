"""Products of rows in 16 bits with a weight of 4 or 8 bit integers, w = (q - z) s. Of a few rows by kernels that read
the weight once; for more it is dequantised, and the vendor's library multiplies.

Integers less their zeros are exact in 16 bits; sums of a group are scaled in float32. Knows nothing of models.

Four bits lie in halves, 8 larger than what they mean: of each 2 H columns, byte j has column j in its low bits and
column H + j in its high bits. H is 64, or 32 for groups of 32. Bytes lie in pieces of 64 rows of 64 bytes, 32 where 64
does not divide a row's: a program reads them in one stretch.

M rows, I input features, O output features, G groups of I / G columns, H half a run of columns; R 64 rows and P bytes
of a piece.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import fetch, launch_settings, wait_for_earlier_kernels
from npu_runner.platforms.cuda.matmul import hopper_grouped_small_m as hopper_grouped
from npu_runner.platforms.cuda.matmul import hopper_grouped_wgmma as hopper_grouped_rows
from npu_runner.platforms.cuda.split_k import counters, finish
from npu_runner.platforms.grouped import GroupedWeight, unpacked

MOST_ROWS = 256
"""That kernels of our own take, 128 at a time: up to there they are quicker than the library (docs/benchmarks.md)."""
_ROWS_AT_ONCE = 128
# That products of warpgroups take on Hopper, where they are quicker than both (docs/benchmarks.md).
_HOPPER_ROWS = (129, 256)
_PIECE_ROWS, _PIECE_BYTES = 64, 64
_COMPILED_ROWS = (1, 2, 32, 64, _ROWS_AT_ONCE)
# Outputs, runs of columns, and warps of a program of one row.
_ONE_ROW = (2, 8, 2)
_WIDE = 8192
_CHANGES = ["num_rows"]
# A float of 16 bits whose last mantissa bits count ones.
_BASES = {torch.bfloat16: 128.0, torch.float16: 1024.0}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# Bits behind those of BASE make BASE + q. Two bytes at a time, 0 and 1, then 2 and 3; the sum with -(BASE + z) is
# exact.
_UNPACK = """
{{ .reg .b32 a, b, c, d, e;
mov.b32 e, {one};
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
shr.u32 c, a, 4;
shr.u32 d, b, 4;
lop3.b32 a, a, 0x000F000F, {base}, 0xEA;
lop3.b32 b, b, 0x000F000F, {base}, 0xEA;
lop3.b32 c, c, 0x000F000F, {base}, 0xEA;
lop3.b32 d, d, 0x000F000F, {base}, 0xEA;
fma.rn.{type} $0, a, e, $5;
fma.rn.{type} $1, b, e, $6;
fma.rn.{type} $2, c, e, $5;
fma.rn.{type} $3, d, e, $6; }}
"""
_UNPACK_BFLOAT16 = tl.constexpr(_UNPACK.format(type="bf16x2", base="0x43004300", one="0x3F803F80"))
_UNPACK_FLOAT16 = tl.constexpr(_UNPACK.format(type="f16x2", base="0x64006400", one="0x3C003C00"))


class Tile(NamedTuple):
    """How a program, which has 64 outputs, is launched, and into how many parts the inputs are cut."""

    num_warps: int
    num_stages: int
    splits: int = 1


def settled(weight: GroupedWeight) -> GroupedWeight:
    """Pieces (O / R, bytes of a row / P, R, P), where the last rows may be none: uint8 in halves, or int8. Scales and
    zeros (G, O), these 8 larger beside four bits."""
    values, scales_GO = weight.values, weight.scales.t().contiguous()
    zeros_GO = None if weight.zeros is None else weight.zeros.t().contiguous()
    if values.dtype == torch.uint8:
        num_outputs, num_inputs = len(values), 2 * values.shape[1]
        half = _half_of(num_inputs, len(scales_GO))
        numbers_OI = (unpacked(values) + 8).view(torch.uint8)
        low, high = numbers_OI.view(num_outputs, num_inputs // (2 * half), 2, half).unbind(2)
        values = (low | high << 4).reshape(num_outputs, num_inputs // 2)
        zeros_GO = None if zeros_GO is None else zeros_GO + 8
    return GroupedWeight(_in_pieces(values), scales_GO, zeros_GO)


def _in_pieces(values_OB: Tensor) -> Tensor:
    num_rows, width = values_OB.shape
    piece = _PIECE_BYTES if width % _PIECE_BYTES == 0 else _PIECE_BYTES // 2
    whole = F.pad(values_OB, (0, 0, 0, -num_rows % _PIECE_ROWS))
    return whole.view(-1, _PIECE_ROWS, width // piece, piece).transpose(1, 2).contiguous()


def _half_of(num_inputs: int, num_groups: int) -> int:
    return min(num_inputs // num_groups, 64)


def _num_inputs(weight: GroupedWeight) -> int:
    _, num_pieces, _, piece = weight.values.shape
    return num_pieces * piece * (2 if weight.values.dtype == torch.uint8 else 1)


def product(x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b, (M, O) of x's dtype, for any number of rows and a `settled` weight."""
    num_rows, num_outputs = len(x_MI), weight.scales.shape[1]
    if hopper_grouped.has_product(x_MI, weight):
        return hopper_grouped.multiply(x_MI, weight, bias_O)
    if _HOPPER_ROWS[0] <= num_rows <= _HOPPER_ROWS[1] and hopper_grouped_rows.has_product(x_MI, weight):
        return hopper_grouped_rows.multiply(x_MI, weight, bias_O)
    if num_rows == 1 and (num_outputs <= _WIDE or weight.values.dtype == torch.int8):
        return one_row(x_MI, weight, bias_O)
    if num_rows <= MOST_ROWS:
        out_MO = x_MI.new_empty(num_rows, num_outputs)
        for rows in (slice(start, start + _ROWS_AT_ONCE) for start in range(0, num_rows, _ROWS_AT_ONCE)):
            few_rows(x_MI[rows], weight, bias_O, out_MO[rows])
        return out_MO
    return F.linear(x_MI, dequantise(weight, x_MI.dtype), None if bias_O is None else bias_O.to(x_MI.dtype))


def compile_all(weight: GroupedWeight, bias_O: Tensor | None, dtype: torch.dtype) -> None:
    """The variants that `product` takes for this weight."""
    hopper_grouped.prepare(weight, dtype)
    hopper_grouped_rows.prepare(weight, dtype)
    for num_rows in _COMPILED_ROWS:
        x_MI = torch.zeros((num_rows, _num_inputs(weight)), dtype=dtype, device=weight.values.device)
        product(x_MI, weight, bias_O)


def tile_of(num_rows: int, num_outputs: int) -> Tile:
    """Each was the quickest of those tried on an H100 with four bits in groups of 128, or within 3 % of it."""
    if num_outputs > _WIDE:
        return Tile(4, 3)
    if num_outputs > _WIDE // 2:
        return Tile(4, 3, 4 if num_rows <= 64 else 2)
    return Tile(4, 3, 8 if num_rows <= 16 else 4)


def few_rows(x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None, out_MO: Tensor, tile: Tile | None = None
             ) -> None:
    """x W^T + b for 1 to 128 rows, into `out_MO` of x's dtype, contiguous."""
    (num_rows, num_inputs), num_outputs = x_MI.shape, weight.scales.shape[1]
    assert 1 <= num_rows <= _ROWS_AT_ONCE, f"{num_rows} rows are not 1 to {_ROWS_AT_ONCE}"
    tile = tile or tile_of(num_rows, num_outputs)
    half = _half_of(num_inputs, len(weight.scales))
    step = 2 * half
    assert num_inputs % step == 0, f"{num_inputs} columns are no multiple of {step}"
    depth = triton.cdiv(num_inputs // step, tile.splits) * step
    parts = out_MO if tile.splits == 1 else torch.empty((tile.splits, num_rows, num_outputs), dtype=torch.float32,
                                                        device=x_MI.device)
    num_tiles = triton.cdiv(num_outputs, _PIECE_ROWS)
    if x_MI.stride(0) % 8 or x_MI.stride(1) != 1 or x_MI.data_ptr() % 16:
        x_MI = x_MI.clone(memory_format=torch.contiguous_format)
    rows = max(16, triton.next_power_of_2(num_rows))
    _few_rows[(num_tiles, tile.splits)](
        TensorDescriptor.from_tensor(x_MI, [rows, half]),
        TensorDescriptor.from_tensor(weight.values.view(-1, weight.values.shape[3]), [_PIECE_ROWS, half]),
        *_pointers(weight, bias_O), out_MO, parts,
        counters(x_MI.device, num_tiles), num_rows, num_outputs, num_inputs, depth,
        **_variant(weight, bias_O, x_MI.dtype), OUTPUTS=_PIECE_ROWS, SPLITS=tile.splits, ROWS=rows,
        STAGES=tile.num_stages, num_warps=tile.num_warps, **launch_settings())


def one_row(x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b of one row, element by element, (1, O) of x's dtype."""
    (_, num_inputs), num_outputs = x_MI.shape, weight.scales.shape[1]
    out_MO = torch.empty((1, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    outputs, runs, num_warps = _ONE_ROW
    _one_row[(triton.cdiv(num_outputs, outputs),)](
        x_MI, *_pointers(weight, bias_O), out_MO, num_outputs, num_inputs, **_variant(weight, bias_O, x_MI.dtype),
        OUTPUTS=outputs, RUNS=runs, num_warps=num_warps, **launch_settings())
    return out_MO


def _pointers(weight: GroupedWeight, bias_O: Tensor | None) -> tuple[Tensor, ...]:
    """Something stands for what is not there."""
    values, scales, zeros = weight
    return values, scales, scales if zeros is None else zeros, values if bias_O is None else bias_O


def _variant(weight: GroupedWeight, bias_O: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    num_groups, num_inputs, is_4_bits = len(weight.scales), _num_inputs(weight), weight.values.dtype == torch.uint8
    return {"GROUP": 0 if num_groups == 1 else num_inputs // num_groups, "HAS_ZEROS": weight.zeros is not None,
            "HAS_BIAS": bias_O is not None, "IS_4_BITS": is_4_bits, "BASE": _BASES[dtype] if is_4_bits else 0.0,
            "IS_NATIVE": not triton.knobs.runtime.interpret, "HALF": _half_of(num_inputs, num_groups),
            "DTYPE": _TYPES[dtype], "PIECE": weight.values.shape[3]}


@triton.jit(do_not_specialize=_CHANGES)
def _few_rows(x_tiles, tiles, weight, scales, zeros, bias, out, parts, counts, num_rows, num_outputs, num_inputs, depth,
              GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_4_BITS: tl.constexpr,
              BASE: tl.constexpr, IS_NATIVE: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr,
              PIECE: tl.constexpr, OUTPUTS: tl.constexpr, SPLITS: tl.constexpr, ROWS: tl.constexpr,
              STAGES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """On tensor cores, the weight's tile as the left factor, in registers. A program takes `depth` inputs."""
    first = tl.program_id(0) * OUTPUTS
    begin = tl.program_id(1) * depth
    end = tl.minimum(begin + depth, num_inputs)
    outputs = first + tl.arange(0, OUTPUTS)
    rows = tl.arange(0, ROWS)
    is_output = outputs < num_outputs
    width = num_inputs // 2 if IS_4_BITS else num_inputs
    # Its row of pieces, as rows of the descriptor.
    pieces = tl.program_id(0) * (width // PIECE)
    if IS_DEPENDENT:
        lines = begin // (2 if IS_4_BITS else 1) * OUTPUTS + tl.arange(0, 128) * 128
        fetch(weight + pieces.to(tl.int64) * OUTPUTS * PIECE + tl.minimum(lines, width * OUTPUTS - 1))
    wait_for_earlier_kernels(IS_DEPENDENT)
    sums = tl.zeros((OUTPUTS, ROWS), tl.float32)
    zero = tl.full((OUTPUTS,), BASE + (8.0 if IS_4_BITS else 0.0), tl.float32).to(DTYPE)
    for start in tl.range(begin, end, 2 * HALF, num_stages=STAGES):
        low_columns = x_tiles.load([0, start]).T
        high_columns = x_tiles.load([0, start + HALF]).T
        group = start // GROUP if GROUP > 0 else 0
        high_group = (start + HALF) // GROUP if GROUP > 0 else 0
        high_zero = zero
        if HAS_ZEROS:
            zero = _zero(zeros + group * num_outputs + outputs, is_output, BASE, DTYPE)
            high_zero = zero
            if GROUP == HALF:
                high_zero = _zero(zeros + high_group * num_outputs + outputs, is_output, BASE, DTYPE)
        if IS_4_BITS:
            packed = tiles.load([(pieces + start // 2 // PIECE) * OUTPUTS, start // 2 % PIECE])
            low, high = _unpack(packed, tl.broadcast_to(zero[:, None], (OUTPUTS, HALF)), DTYPE, BASE, IS_NATIVE)
            if GROUP == HALF and HAS_ZEROS:
                _, high = _unpack(packed, tl.broadcast_to(high_zero[:, None], (OUTPUTS, HALF)), DTYPE, BASE, IS_NATIVE)
        else:
            low = tiles.load([(pieces + start // PIECE) * OUTPUTS, start % PIECE]).to(DTYPE)
            high = tiles.load([(pieces + (start + HALF) // PIECE) * OUTPUTS, (start + HALF) % PIECE]).to(DTYPE)
            if HAS_ZEROS:
                low -= zero[:, None]
                high -= high_zero[:, None]
        if GROUP == 0:
            sums = tl.dot(low, low_columns, sums)
            sums = tl.dot(high, high_columns, sums)
        else:
            scale = tl.load(scales + group * num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)
            products = tl.dot(low, low_columns)
            if GROUP == HALF:
                sums += products * scale[:, None]
                scale = tl.load(scales + high_group * num_outputs + outputs, mask=is_output, other=0.0).to(tl.float32)
                products = tl.dot(high, high_columns)
            else:
                products = tl.dot(high, high_columns, products)
            sums += products * scale[:, None]
    if GROUP == 0:
        sums *= tl.load(scales + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    finish(sums, bias, out, parts, counts, num_rows, num_outputs, outputs, rows, HAS_BIAS, SPLITS)


@triton.jit
def _one_row(x, weight, scales, zeros, bias, out, num_outputs, num_inputs, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
             HAS_BIAS: tl.constexpr, IS_4_BITS: tl.constexpr, BASE: tl.constexpr, IS_NATIVE: tl.constexpr,
             HALF: tl.constexpr, DTYPE: tl.constexpr, PIECE: tl.constexpr, OUTPUTS: tl.constexpr, RUNS: tl.constexpr,
             IS_DEPENDENT: tl.constexpr):
    """A run is HALF bytes: so many columns, or twice as many of four bits."""
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    inner = tl.arange(0, HALF)
    is_output = (outputs < num_outputs)[:, None]
    width = num_inputs // 2 if IS_4_BITS else num_inputs
    columns_of_run: tl.constexpr = 2 * HALF if IS_4_BITS else HALF
    if IS_DEPENDENT:
        lines = tl.minimum(tl.arange(0, RUNS) * HALF, width - 1)
        fetch(weight + _place(tl.minimum(outputs, num_outputs - 1)[:, None], lines[None, :], width, PIECE))
    wait_for_earlier_kernels(IS_DEPENDENT)
    sums = tl.zeros((OUTPUTS, RUNS, HALF), tl.float32)
    for start in tl.range(0, width // HALF, RUNS):
        runs = start + tl.arange(0, RUNS)
        is_run = runs < width // HALF
        is_there = is_output & is_run[None, :]
        places = _place(outputs[:, None, None], (runs * HALF)[None, :, None] + inner[None, None, :], width, PIECE)
        values = tl.load(weight + places, mask=is_there[:, :, None], other=0, eviction_policy="evict_first")
        columns = (runs * columns_of_run)[:, None] + inner[None, :]
        x_low = tl.load(x + columns, mask=is_run[:, None], other=0.0).to(tl.float32)[None, :, :]
        group = (runs * columns_of_run) // GROUP if GROUP > 0 else runs * 0
        of_group = group[None, :] * num_outputs + outputs[:, None]
        zero = tl.full((OUTPUTS, RUNS), BASE + (8.0 if IS_4_BITS else 0.0), tl.float32).to(DTYPE)
        if HAS_ZEROS:
            zero = _zero(zeros + of_group, is_there, BASE, DTYPE)
        if IS_4_BITS:
            x_high = tl.load(x + columns + HALF, mask=is_run[:, None], other=0.0).to(tl.float32)[None, :, :]
            low, high = _unpack(values, tl.broadcast_to(zero[:, :, None], (OUTPUTS, RUNS, HALF)), DTYPE, BASE,
                                IS_NATIVE)
            if GROUP == HALF:
                of_high = of_group + num_outputs
                if HAS_ZEROS:
                    high_zero = _zero(zeros + of_high, is_there, BASE, DTYPE)
                    _, high = _unpack(values, tl.broadcast_to(high_zero[:, :, None], (OUTPUTS, RUNS, HALF)), DTYPE,
                                      BASE, IS_NATIVE)
                high_scale = tl.load(scales + of_high, mask=is_there, other=0.0).to(tl.float32)
                sums += high.to(tl.float32) * x_high * high_scale[:, :, None]
                products = low.to(tl.float32) * x_low
            else:
                products = low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        else:
            wide = values.to(tl.float32)
            if HAS_ZEROS:
                wide -= zero.to(tl.float32)[:, :, None]
            products = wide * x_low
        if GROUP == 0:
            sums += products
        else:
            sums += products * tl.load(scales + of_group, mask=is_there, other=0.0).to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(sums, 2), 1)
    is_own = outputs < num_outputs
    if GROUP == 0:
        result *= tl.load(scales + outputs, mask=is_own, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + outputs, mask=is_own, other=0.0).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty), mask=is_own)


@triton.jit
def _place(outputs, columns, width, PIECE: tl.constexpr):
    """Of bytes of the weight's rows."""
    pieces = (outputs // 64).to(tl.int64) * (width // PIECE) + columns // PIECE
    return pieces * (64 * PIECE) + outputs % 64 * PIECE + columns % PIECE


@triton.jit
def _zero(places, is_there, BASE: tl.constexpr, DTYPE: tl.constexpr):
    """What stored numbers are less by, BASE with it; exact."""
    return (tl.load(places, mask=is_there, other=0.0).to(tl.float32) + BASE).to(DTYPE)


@triton.jit
def _unpack(packed, zeros, dtype: tl.constexpr, BASE: tl.constexpr, IS_NATIVE: tl.constexpr):
    """The low and the high four bits of each byte less `zeros` (BASE + z), in 16 bits; exact."""
    if IS_NATIVE and dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(_UNPACK_BFLOAT16, "=r,=r,=r,=r,r,r,r", [packed, -zeros],
                                              dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4)
    elif IS_NATIVE:
        low, high = tl.inline_asm_elementwise(_UNPACK_FLOAT16, "=r,=r,=r,=r,r,r,r", [packed, -zeros],
                                              dtype=(tl.float16, tl.float16), is_pure=True, pack=4)
    else:
        low = ((packed & 15).to(tl.float32) + BASE - zeros.to(tl.float32)).to(dtype)
        high = ((packed >> 4).to(tl.float32) + BASE - zeros.to(tl.float32)).to(dtype)
    return low, high


def dequantise(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """w = (q - z) s of the whole weight, computed in float32 and rounded once, (O, I) of `dtype`."""
    num_outputs, num_inputs = weight.scales.shape[1], _num_inputs(weight)
    num_groups = len(weight.scales)
    half = _half_of(num_inputs, num_groups)
    out_OI = torch.empty((num_outputs, num_inputs), dtype=dtype, device=weight.values.device)
    _dequantise[(triton.cdiv(num_outputs, 16), num_inputs // (2 * half))](
        *_pointers(weight, None)[:3], out_OI, num_outputs, num_inputs, GROUP=num_inputs // num_groups,
        HAS_ZEROS=weight.zeros is not None, IS_4_BITS=weight.values.dtype == torch.uint8, OUTPUTS=16, HALF=half,
        PIECE=weight.values.shape[3], num_warps=4)
    return out_OI


@triton.jit
def _dequantise(weight, scales, zeros, out, num_outputs, num_inputs, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
                IS_4_BITS: tl.constexpr, OUTPUTS: tl.constexpr, HALF: tl.constexpr, PIECE: tl.constexpr):
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    mask = (outputs < num_outputs)[:, None]
    run = tl.program_id(1) * (2 * HALF)
    for part in tl.static_range(2):
        columns = run + part * HALF + tl.arange(0, HALF)
        if IS_4_BITS:
            in_row = run // 2 + tl.arange(0, HALF)
            places = weight + _place(outputs[:, None], in_row[None, :], num_inputs // 2, PIECE)
            values = ((tl.load(places, mask=mask, other=0) >> (4 * part)) & 15).to(tl.float32)
        else:
            places = weight + _place(outputs[:, None], columns[None, :], num_inputs, PIECE)
            values = tl.load(places, mask=mask, other=0).to(tl.float32)
        of_group = (columns // GROUP)[None, :] * num_outputs + outputs[:, None]
        if HAS_ZEROS:
            values -= tl.load(zeros + of_group, mask=mask, other=0).to(tl.float32)
        elif IS_4_BITS:
            values -= 8.0
        values *= tl.load(scales + of_group, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + outputs.to(tl.int64)[:, None] * num_inputs + columns[None, :], values.to(out.dtype.element_ty),
                 mask=mask)
