"""Matmuls of 1 to 256 rows in 16 bits with a weight of 4 or 8 bit integers, w = (q - z) s, in Triton. Knows no models.

Reading the weight is their bound. Integers minus their zeros are exact in 16 bits. Accumulators of a group are
scaled in float32.

Four bits are stored in halves, 8 larger than their value: of each 2 H columns, byte j has column j in its low bits and
column H + j in its high bits. H is 64, or 32 for groups of 32. Bytes lie in pieces of 64 rows of 64 bytes, or of 32
where 64 does not divide a row's bytes, so that a program reads them in one stretch.

M rows, N output features, K input features, G groups of K / G columns, B bytes of a row.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import launch_settings, prefetch, wait_for_earlier_kernels
from npu_runner.platforms.cuda.matmul.hopper_grouped_small_m import num_inputs
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.split_k import finish, make_counters
from npu_runner.platforms.grouped import GroupedWeight, unpacked

MOST_M = 256
"""Up to this M the kernels are faster than the library (docs/benchmarks.md)."""
MOST_M_AT_ONCE = 128
_PIECE_ROWS, _PIECE_BYTES = 64, 64
# Outputs, runs of columns, and warps of a program of one row.
_GEMV_TILE = (2, 8, 2)
_NUM_WARPS, _NUM_STAGES = 4, 3
_WIDE = 8192
_CHANGES = ["M"]
# A float of 16 bits whose last mantissa bits count ones.
_BASES = {torch.bfloat16: 128.0, torch.float16: 1024.0}
_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

# The bits of q in the last mantissa bits of BASE make BASE + q. Two bytes at a time, 0 and 1, then 2 and 3. The sum
# with -(BASE + z) is exact.
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


def lay_out(weight: GroupedWeight) -> GroupedWeight:
    """Values are pieces (N / 64, B / P, 64, P) of P bytes, the last rows padded: uint8 in halves, or int8. Scales and
    zeros are (G, N); zeros are 8 larger for four bits."""
    values, scales_GN = weight.values, weight.scales.t().contiguous()
    zeros_GN = None if weight.zeros is None else weight.zeros.t().contiguous()
    if values.dtype == torch.uint8:
        N, K = len(values), 2 * values.shape[1]
        half = _half(K, len(scales_GN))
        numbers_NK = (unpacked(values) + 8).view(torch.uint8)
        low, high = numbers_NK.view(N, K // (2 * half), 2, half).unbind(2)
        values = (low | high << 4).reshape(N, K // 2)
        zeros_GN = None if zeros_GN is None else zeros_GN + 8
    return GroupedWeight(_in_pieces(values), scales_GN, zeros_GN)


def _in_pieces(values_NB: Tensor) -> Tensor:
    N, width = values_NB.shape
    piece = _PIECE_BYTES if width % _PIECE_BYTES == 0 else _PIECE_BYTES // 2
    whole = F.pad(values_NB, (0, 0, 0, -N % _PIECE_ROWS))
    return whole.view(-1, _PIECE_ROWS, width // piece, piece).transpose(1, 2).contiguous()


def _half(K: int, num_groups: int) -> int:
    return min(K // num_groups, 64)


def prepare(matmul: Matmul) -> None:
    """kernels.py compiles the variants by matmuls of zeros."""


def accepts(matmul: Matmul) -> bool:
    return len(matmul.x_MK) <= MOST_M


def multiply(matmul: Matmul) -> Tensor:
    x_MK, weight = matmul.x_MK, matmul.weight
    M, N = len(x_MK), weight.scales.shape[1]
    if M == 1 and (N <= _WIDE or weight.values.dtype == torch.int8):
        return gemv(matmul)
    out_MN = x_MK.new_empty(M, N)
    for rows in (slice(start, start + MOST_M_AT_ONCE) for start in range(0, M, MOST_M_AT_ONCE)):
        multiply_small_m(matmul._replace(x_MK=x_MK[rows]), out_MN[rows])
    return out_MN


def choose_split_k(M: int, N: int) -> int:
    """Each was the fastest of those tried on an H100 with four bits in groups of 128, or within 3 % of it."""
    if N > _WIDE:
        return 1
    if N > _WIDE // 2:
        return 4 if M <= 64 else 2
    return 8 if M <= 16 else 4


def multiply_small_m(matmul: Matmul, out_MN: Tensor, split_k: int | None = None) -> None:
    """Multiply 1 to 128 rows into `out_MN`, contiguous and of x's dtype."""
    x_MK, weight, bias_N = matmul[:3]
    (M, K), N = x_MK.shape, weight.scales.shape[1]
    assert 1 <= M <= MOST_M_AT_ONCE, f"{M} rows are not 1 to {MOST_M_AT_ONCE}"
    split_k = split_k or choose_split_k(M, N)
    half = _half(K, len(weight.scales))
    step = 2 * half
    assert K % step == 0, f"{K} columns are no multiple of {step}"
    k_per_split = triton.cdiv(K // step, split_k) * step
    partials = out_MN if split_k == 1 else torch.empty((split_k, M, N), dtype=torch.float32, device=x_MK.device)
    num_tiles = triton.cdiv(N, _PIECE_ROWS)
    if x_MK.stride(0) % 8 or x_MK.stride(1) != 1 or x_MK.data_ptr() % 16:
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    block_m = max(16, triton.next_power_of_2(M))
    _small_m[(num_tiles, split_k)](
        TensorDescriptor.from_tensor(x_MK, [block_m, half]),
        TensorDescriptor.from_tensor(weight.values.view(-1, weight.values.shape[3]), [_PIECE_ROWS, half]),
        *_pointers(weight, bias_N), out_MN, partials, make_counters(x_MK.device, num_tiles), M, N, K, k_per_split,
        **_variant(weight, bias_N, x_MK.dtype), BLOCK_N=_PIECE_ROWS, SPLIT_K=split_k, BLOCK_M=block_m,
        NUM_STAGES=_NUM_STAGES, num_warps=_NUM_WARPS, **launch_settings())


def gemv(matmul: Matmul) -> Tensor:
    """Multiply one row, element by element."""
    x_MK, weight, bias_N = matmul[:3]
    K, N = x_MK.shape[1], weight.scales.shape[1]
    out_MN = torch.empty((1, N), dtype=x_MK.dtype, device=x_MK.device)
    block_n, runs, num_warps = _GEMV_TILE
    _gemv[(triton.cdiv(N, block_n),)](
        x_MK, *_pointers(weight, bias_N), out_MN, N, K, **_variant(weight, bias_N, x_MK.dtype), BLOCK_N=block_n,
        RUNS=runs, num_warps=num_warps, **launch_settings())
    return out_MN


def _pointers(weight: GroupedWeight, bias_N: Tensor | None) -> tuple[Tensor, ...]:
    """Pointers of values, scales, zeros and bias. Another tensor replaces a missing one, and is not read."""
    values, scales, zeros = weight
    return values, scales, scales if zeros is None else zeros, values if bias_N is None else bias_N


def _variant(weight: GroupedWeight, bias_N: Tensor | None, dtype: torch.dtype) -> dict[str, Any]:
    num_groups, K, is_4_bits = len(weight.scales), num_inputs(weight), weight.values.dtype == torch.uint8
    return {"GROUP": 0 if num_groups == 1 else K // num_groups, "HAS_ZEROS": weight.zeros is not None,
            "HAS_BIAS": bias_N is not None, "IS_4_BITS": is_4_bits, "BASE": _BASES[dtype] if is_4_bits else 0.0,
            "IS_NATIVE": not triton.knobs.runtime.interpret, "HALF": _half(K, num_groups),
            "DTYPE": _TYPES[dtype], "PIECE": weight.values.shape[3]}


@triton.jit(do_not_specialize=_CHANGES)
def _small_m(x_tiles, weight_tiles, weight, scales, zeros, bias, out, partials, counters, M, N, K, k_per_split,
             GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_4_BITS: tl.constexpr,
             BASE: tl.constexpr, IS_NATIVE: tl.constexpr, HALF: tl.constexpr, DTYPE: tl.constexpr, PIECE: tl.constexpr,
             BLOCK_N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK_M: tl.constexpr, NUM_STAGES: tl.constexpr,
             IS_DEPENDENT: tl.constexpr):
    """The weight's tile is the left operand, dequantized in registers. A program has `k_per_split` inputs."""
    first_n = tl.program_id(0) * BLOCK_N
    first_k = tl.program_id(1) * k_per_split
    end_k = tl.minimum(first_k + k_per_split, K)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    is_n = offs_n < N
    width = K // 2 if IS_4_BITS else K
    # The first piece of the tile, as a row of the descriptor.
    pieces = tl.program_id(0) * (width // PIECE)
    if IS_DEPENDENT:
        lines = first_k // (2 if IS_4_BITS else 1) * BLOCK_N + tl.arange(0, 128) * 128
        prefetch(weight + pieces.to(tl.int64) * BLOCK_N * PIECE + tl.minimum(lines, width * BLOCK_N - 1))
    wait_for_earlier_kernels(IS_DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    zero = tl.full((BLOCK_N,), BASE + (8.0 if IS_4_BITS else 0.0), tl.float32).to(DTYPE)
    for k in tl.range(first_k, end_k, 2 * HALF, num_stages=NUM_STAGES):
        x_low = x_tiles.load([0, k]).T
        x_high = x_tiles.load([0, k + HALF]).T
        group = k // GROUP if GROUP > 0 else 0
        high_group = (k + HALF) // GROUP if GROUP > 0 else 0
        high_zero = zero
        if HAS_ZEROS:
            zero = _load_zero(zeros + group * N + offs_n, is_n, BASE, DTYPE)
            high_zero = zero
            if GROUP == HALF:
                high_zero = _load_zero(zeros + high_group * N + offs_n, is_n, BASE, DTYPE)
        if IS_4_BITS:
            packed = weight_tiles.load([(pieces + k // 2 // PIECE) * BLOCK_N, k // 2 % PIECE])
            low, high = _unpack(packed, tl.broadcast_to(zero[:, None], (BLOCK_N, HALF)), DTYPE, BASE, IS_NATIVE)
            if GROUP == HALF and HAS_ZEROS:
                _, high = _unpack(packed, tl.broadcast_to(high_zero[:, None], (BLOCK_N, HALF)), DTYPE, BASE, IS_NATIVE)
        else:
            low = weight_tiles.load([(pieces + k // PIECE) * BLOCK_N, k % PIECE]).to(DTYPE)
            high = weight_tiles.load([(pieces + (k + HALF) // PIECE) * BLOCK_N, (k + HALF) % PIECE]).to(DTYPE)
            if HAS_ZEROS:
                low -= zero[:, None]
                high -= high_zero[:, None]
        if GROUP == 0:
            acc = tl.dot(low, x_low, acc)
            acc = tl.dot(high, x_high, acc)
        else:
            scale = tl.load(scales + group * N + offs_n, mask=is_n, other=0.0).to(tl.float32)
            partial = tl.dot(low, x_low)
            if GROUP == HALF:
                acc += partial * scale[:, None]
                scale = tl.load(scales + high_group * N + offs_n, mask=is_n, other=0.0).to(tl.float32)
                partial = tl.dot(high, x_high)
            else:
                partial = tl.dot(high, x_high, partial)
            acc += partial * scale[:, None]
    if GROUP == 0:
        acc *= tl.load(scales + offs_n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    finish(acc, bias, out, partials, counters, M, N, offs_n, offs_m, HAS_BIAS, SPLIT_K)


@triton.jit
def _gemv(x, weight, scales, zeros, bias, out, N, K, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
          HAS_BIAS: tl.constexpr, IS_4_BITS: tl.constexpr, BASE: tl.constexpr, IS_NATIVE: tl.constexpr,
          HALF: tl.constexpr, DTYPE: tl.constexpr, PIECE: tl.constexpr, BLOCK_N: tl.constexpr, RUNS: tl.constexpr,
          IS_DEPENDENT: tl.constexpr):
    """A run is HALF bytes: HALF columns of eight bits, or 2 HALF of four."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, HALF)
    is_n = (offs_n < N)[:, None]
    width = K // 2 if IS_4_BITS else K
    columns_of_run: tl.constexpr = 2 * HALF if IS_4_BITS else HALF
    if IS_DEPENDENT:
        lines = tl.minimum(tl.arange(0, RUNS) * HALF, width - 1)
        prefetch(weight + _offset(tl.minimum(offs_n, N - 1)[:, None], lines[None, :], width, PIECE))
    wait_for_earlier_kernels(IS_DEPENDENT)
    acc = tl.zeros((BLOCK_N, RUNS, HALF), tl.float32)
    for k in tl.range(0, width // HALF, RUNS):
        runs = k + tl.arange(0, RUNS)
        is_run = runs < width // HALF
        mask = is_n & is_run[None, :]
        pointers = _offset(offs_n[:, None, None], (runs * HALF)[None, :, None] + inner[None, None, :], width, PIECE)
        values = tl.load(weight + pointers, mask=mask[:, :, None], other=0, eviction_policy="evict_first")
        columns = (runs * columns_of_run)[:, None] + inner[None, :]
        x_low = tl.load(x + columns, mask=is_run[:, None], other=0.0).to(tl.float32)[None, :, :]
        group = (runs * columns_of_run) // GROUP if GROUP > 0 else runs * 0
        group_offsets = group[None, :] * N + offs_n[:, None]
        zero = tl.full((BLOCK_N, RUNS), BASE + (8.0 if IS_4_BITS else 0.0), tl.float32).to(DTYPE)
        if HAS_ZEROS:
            zero = _load_zero(zeros + group_offsets, mask, BASE, DTYPE)
        if IS_4_BITS:
            x_high = tl.load(x + columns + HALF, mask=is_run[:, None], other=0.0).to(tl.float32)[None, :, :]
            low, high = _unpack(values, tl.broadcast_to(zero[:, :, None], (BLOCK_N, RUNS, HALF)), DTYPE, BASE,
                                IS_NATIVE)
            if GROUP == HALF:
                high_offsets = group_offsets + N
                if HAS_ZEROS:
                    high_zero = _load_zero(zeros + high_offsets, mask, BASE, DTYPE)
                    _, high = _unpack(values, tl.broadcast_to(high_zero[:, :, None], (BLOCK_N, RUNS, HALF)), DTYPE,
                                      BASE, IS_NATIVE)
                high_scale = tl.load(scales + high_offsets, mask=mask, other=0.0).to(tl.float32)
                acc += high.to(tl.float32) * x_high * high_scale[:, :, None]
                partial = low.to(tl.float32) * x_low
            else:
                partial = low.to(tl.float32) * x_low + high.to(tl.float32) * x_high
        else:
            wide = values.to(tl.float32)
            if HAS_ZEROS:
                wide -= zero.to(tl.float32)[:, :, None]
            partial = wide * x_low
        if GROUP == 0:
            acc += partial
        else:
            acc += partial * tl.load(scales + group_offsets, mask=mask, other=0.0).to(tl.float32)[:, :, None]
    result = tl.sum(tl.sum(acc, 2), 1)
    is_output = offs_n < N
    if GROUP == 0:
        result *= tl.load(scales + offs_n, mask=is_output, other=0.0).to(tl.float32)
    if HAS_BIAS:
        result += tl.load(bias + offs_n, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + offs_n, result.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _offset(offs_n, columns, width, PIECE: tl.constexpr):
    """The offsets of bytes of the weight's rows."""
    pieces = (offs_n // 64).to(tl.int64) * (width // PIECE) + columns // PIECE
    return pieces * (64 * PIECE) + offs_n % 64 * PIECE + columns % PIECE


@triton.jit
def _load_zero(pointers, mask, BASE: tl.constexpr, DTYPE: tl.constexpr):
    """BASE + zero, which is subtracted from BASE + q; exact."""
    return (tl.load(pointers, mask=mask, other=0.0).to(tl.float32) + BASE).to(DTYPE)


@triton.jit
def _unpack(packed, zeros, dtype: tl.constexpr, BASE: tl.constexpr, IS_NATIVE: tl.constexpr):
    """The low and the high four bits of each byte minus `zeros` (BASE + z), in 16 bits; exact."""
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


def dequantize(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """w = (q - z) s, computed in float32 and rounded once, (N, K)."""
    N, K = weight.scales.shape[1], num_inputs(weight)
    num_groups = len(weight.scales)
    half = _half(K, num_groups)
    out_NK = torch.empty((N, K), dtype=dtype, device=weight.values.device)
    _dequantize_kernel[(triton.cdiv(N, 16), K // (2 * half))](
        *_pointers(weight, None)[:3], out_NK, N, K, GROUP=K // num_groups,
        HAS_ZEROS=weight.zeros is not None, IS_4_BITS=weight.values.dtype == torch.uint8, BLOCK_N=16, HALF=half,
        PIECE=weight.values.shape[3], num_warps=4)
    return out_NK


@triton.jit
def _dequantize_kernel(weight, scales, zeros, out, N, K, GROUP: tl.constexpr, HAS_ZEROS: tl.constexpr,
                       IS_4_BITS: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, PIECE: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = (offs_n < N)[:, None]
    run = tl.program_id(1) * (2 * HALF)
    for part in tl.static_range(2):
        columns = run + part * HALF + tl.arange(0, HALF)
        if IS_4_BITS:
            in_row = run // 2 + tl.arange(0, HALF)
            pointers = weight + _offset(offs_n[:, None], in_row[None, :], K // 2, PIECE)
            values = ((tl.load(pointers, mask=mask, other=0) >> (4 * part)) & 15).to(tl.float32)
        else:
            pointers = weight + _offset(offs_n[:, None], columns[None, :], K, PIECE)
            values = tl.load(pointers, mask=mask, other=0).to(tl.float32)
        group_offsets = (columns // GROUP)[None, :] * N + offs_n[:, None]
        if HAS_ZEROS:
            values -= tl.load(zeros + group_offsets, mask=mask, other=0).to(tl.float32)
        elif IS_4_BITS:
            values -= 8.0
        values *= tl.load(scales + group_offsets, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offs_n.to(tl.int64)[:, None] * K + columns[None, :], values.to(out.dtype.element_ty),
                 mask=mask)
