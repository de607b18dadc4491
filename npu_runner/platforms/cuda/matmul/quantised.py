"""Matmuls of 1 to 64 rows with a weight in int8 or FP8, in Triton. Reading the weight is their bound. Knows no models.

Accumulators of a 128 x 128 block, or of 128 inputs, are added in float32.

M rows, N output features, K input features, G groups of 128 inputs.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import launch_settings, prefetch, wait_for_earlier_kernels
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.matmul.small_m import Tile
from npu_runner.platforms.cuda.split_k import finish, make_counters

MOST_M = 64
"""Up to this M the kernels are faster than the library (docs/benchmarks.md)."""
_ALIGNMENT = 16
_CHANGES = ["M", "group_stride"]


def prepare(matmul: Matmul) -> None:
    """kernels.py compiles the variants by matmuls of zeros."""


def accepts(matmul: Matmul) -> bool:
    M, K = matmul.x_MK.shape
    return 1 <= M <= MOST_M and matmul.weight.data_ptr() % _ALIGNMENT == 0 and K % _ALIGNMENT == 0


def choose_tile(M: int, N: int, *, in_blocks: bool = False) -> Tile:
    """Up to 16 rows each was the fastest of those tried on an H100, or within 5 % of it (10 % for a row of int8)."""
    if M == 1:
        return Tile(8, 1024, 4, 1) if in_blocks else Tile(4, 2048, 4, 1)
    if N <= 8192:
        return Tile(64, 128, 4, 4, 4)
    if in_blocks or M > 16:
        return Tile(128, 128, 8 if in_blocks and M > 16 else 4, 4)
    return Tile(128, 256, 8, 3)


def multiply(matmul: Matmul, tile: Tile | None = None) -> Tensor:
    """K is a multiple of 16. x comes from quantised_inputs.py."""
    x_MK, weight_NK, bias_N = matmul[:3]
    x_scale, scale = matmul.scales
    (M, K), N, in_blocks = x_MK.shape, len(weight_NK), matmul.in_blocks
    assert 1 <= M <= MOST_M, f"{M} rows are not 1 to {MOST_M}"
    tile = tile or choose_tile(M, N, in_blocks=in_blocks)
    assert not in_blocks or tile.block_n <= 128 >= tile.block_k or M == 1, f"{tile} is larger than a block"
    out_MN = matmul.empty_output()
    arguments = (x_MK, x_scale, weight_NK, scale, weight_NK if bias_N is None else bias_N, out_MN)
    scale_stride = scale.stride(0) if scale.numel() > 1 else 0
    group_stride = x_scale.stride(1) if in_blocks else 0
    settings = {"HAS_BIAS": bias_N is not None, "IN_BLOCKS": in_blocks, "BLOCK_N": tile.block_n,
                "BLOCK_K": tile.block_k, "NUM_STAGES": tile.num_stages, "num_warps": tile.num_warps}
    num_tiles = triton.cdiv(N, tile.block_n)
    if tile.block_n < 16:
        assert M == 1, f"a tile of {tile.block_n} outputs is for one row, not {M}"
        is_even = N % tile.block_n == 0 and K % tile.block_k == 0
        _gemv[(num_tiles,)](*arguments, N, K, scale_stride, group_stride, IS_EVEN=is_even, **settings,
                            **launch_settings())
        return out_MN
    partials = out_MN
    if tile.split_k > 1:
        partials = torch.empty((tile.split_k, M, N), dtype=torch.float32, device=x_MK.device)
    k_per_split = triton.cdiv(triton.cdiv(K, tile.block_k), tile.split_k) * tile.block_k
    block_m = max(16, triton.next_power_of_2(M))
    _small_m[(num_tiles, tile.split_k)](
        TensorDescriptor.from_tensor(x_MK, [block_m, tile.block_k]),
        TensorDescriptor.from_tensor(weight_NK, [tile.block_n, tile.block_k]), *arguments[1:], partials,
        make_counters(x_MK.device, num_tiles), M, N, K, k_per_split, scale_stride, group_stride, SPLIT_K=tile.split_k,
        IS_INT8=x_MK.dtype == torch.int8, BLOCK_M=block_m, PREFETCHED=tile.block_k, **settings, **launch_settings())
    return out_MN


@triton.jit
def _gemv(x, x_scale, weight, scale, bias, out, N, K, scale_stride, group_stride, HAS_BIAS: tl.constexpr,
          IN_BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
          NUM_STAGES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One accumulator per element, summed over K at the end. The first weights are loaded before the kernel waits."""
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    is_n = offs_n < N
    pointers = weight + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    block_scales = scale + first_n // 128 * scale_stride
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    first_k = 0
    if IS_DEPENDENT and IS_EVEN:
        first_k = BLOCK_K
        weights = tl.load(pointers, eviction_policy="evict_first")
        wait_for_earlier_kernels(IS_DEPENDENT)
        values = _dequantized_x(x, x_scale, group_stride, block_scales, 0, K, IN_BLOCKS, True, BLOCK_K)
        acc = weights.to(tl.float32) * values[None, :]
    else:
        wait_for_earlier_kernels(IS_DEPENDENT)
    for k in tl.range(first_k, K, BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            weights = tl.load(pointers + k, eviction_policy="evict_first")
        else:
            mask = is_n[:, None] & (k + offs_k < K)[None, :]
            weights = tl.load(pointers + k, mask=mask, other=0.0)
        values = _dequantized_x(x, x_scale, group_stride, block_scales, k, K, IN_BLOCKS, IS_EVEN, BLOCK_K)
        acc += weights.to(tl.float32) * values[None, :]
    result = tl.sum(acc, 1)
    if not IN_BLOCKS:
        result *= tl.load(x_scale) * tl.load(scale + offs_n * scale_stride, mask=is_n, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + offs_n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out + offs_n, result.to(out.dtype.element_ty), mask=is_n)


@triton.jit
def _dequantized_x(x, x_scale, group_stride, block_scales, k, K, IN_BLOCKS: tl.constexpr, IS_EVEN: tl.constexpr,
                   BLOCK_K: tl.constexpr):
    """The elements of x from `k` on, times the scales of their blocks."""
    offs_k = k + tl.arange(0, BLOCK_K)
    if IS_EVEN:
        values = tl.load(x + offs_k).to(tl.float32)
    else:
        values = tl.load(x + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    if IN_BLOCKS:
        groups = offs_k // 128
        is_k = offs_k < K
        scales = tl.load(x_scale + groups * group_stride, mask=is_k, other=0.0)
        values *= scales * tl.load(block_scales + groups, mask=is_k, other=0.0)
    return values


@triton.jit(do_not_specialize=_CHANGES)
def _small_m(x_tiles, weight_tiles, x_scale, weight, scale, bias, out, partials, counters, M, N, K, k_per_split,
             scale_stride, group_stride, HAS_BIAS: tl.constexpr, IN_BLOCKS: tl.constexpr, IS_INT8: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, SPLIT_K: tl.constexpr,
             BLOCK_M: tl.constexpr, PREFETCHED: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The weight's tile is the left operand. `x_tiles` and `weight_tiles` are tensor descriptors; beyond the edges a
    tile is 0. A program has `k_per_split` inputs. `group_stride` is the stride of x's scales between groups."""
    first_n = tl.program_id(0) * BLOCK_N
    first_k = tl.program_id(1) * k_per_split
    end_k = tl.minimum(first_k + k_per_split, K)
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    is_m = offs_m < M
    if IS_DEPENDENT:
        lines = tl.arange(0, PREFETCHED // 128) * 128
        prefetch(weight + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K
                 + tl.minimum(first_k + lines, K - 1)[None, :])
    wait_for_earlier_kernels(IS_DEPENDENT)
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.int32 if IS_INT8 else tl.float32)
    for k in tl.range(first_k, end_k, BLOCK_K, num_stages=NUM_STAGES):
        x_tile = x_tiles.load([0, k]).T
        if IN_BLOCKS:
            partial = tl.dot(weight_tiles.load([first_n, k]), x_tile)
            row_scale = tl.load(x_scale + k // BLOCK_K * group_stride + offs_m, mask=is_m, other=0.0)
            row_scale *= tl.load(scale + first_n // 128 * scale_stride + k // BLOCK_K)
            acc += partial * row_scale[None, :]
        elif IS_INT8:
            acc = tl.dot(weight_tiles.load([first_n, k]), x_tile, acc, out_dtype=tl.int32)
        else:
            acc = tl.dot(weight_tiles.load([first_n, k]), x_tile, acc, max_num_imprecise_acc=128)
    is_n = offs_n < N
    results = acc.to(tl.float32)
    if not IN_BLOCKS:
        row_scale = tl.load(x_scale + offs_m, mask=is_m, other=0.0)
        results *= row_scale[None, :] * tl.load(scale + offs_n * scale_stride, mask=is_n, other=0.0)[:, None]
    finish(results, bias, out, partials, counters, M, N, offs_n, offs_m, HAS_BIAS, SPLIT_K)
