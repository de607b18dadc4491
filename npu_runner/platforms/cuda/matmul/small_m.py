"""Matmuls of 1 to 16 rows with a weight in 16 bits, in Triton. Reading the weight is their bound. Knows no models.

One row is computed element by element. More rows use tensor cores with the weight's tile as the left operand, which has
the 64 or 128 rows that an MMA needs. Both prefetch their first weights before they wait for earlier kernels.

M rows, N output features, K input features.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from npu_runner.platforms.cuda.dependent_launch import launch_settings, prefetch, wait_for_earlier_kernels
from npu_runner.platforms.cuda.matmul.operands import Matmul

MOST_M = 16
# Smaller weights take the time of a launch in any kernel; cuBLAS computes float32 as IEEE does.
_LEAST_FEATURES = 1024
# Only LM heads have more outputs.
_MANY_OUTPUTS = 65_536
_DTYPES = (torch.bfloat16, torch.float16)
# The rows of x in an MMA.
_BLOCK_M = 16
# Elements of each weight row that a program prefetches; a line of the L2 cache has 64 of two bytes.
_PREFETCHED = 256
_LINE = tl.constexpr(64)
# K must be a multiple of it, so that a tensor descriptor can copy tiles.
_TILE_ALIGNMENT = 8
# M is no constant of a kernel.
_CHANGES = ["M"]


class Tile(NamedTuple):
    """The outputs and inputs of one loop step, the launch settings, and the number of splits of K."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    split_k: int = 1


def is_large(weight_NK: Tensor) -> bool:
    """Whether reading the weight takes most of the time at small M."""
    return weight_NK.dtype in _DTYPES and weight_NK.is_contiguous() and min(weight_NK.shape) >= _LEAST_FEATURES


def has_large_weight(matmul: Matmul) -> bool:
    x_MK = matmul.x_MK
    return x_MK.dim() == 2 and x_MK.stride(1) == 1 and is_large(matmul.weight)


def most_m(weight_NK: Tensor) -> int:
    """Up to this M the kernels are faster than cuBLAS (H200)."""
    has_tiles = weight_NK.shape[1] % _TILE_ALIGNMENT == 0 and weight_NK.data_ptr() % 16 == 0
    return MOST_M if has_tiles else 1


def prepare(matmul: Matmul) -> None:
    weight_NK = matmul.weight
    if is_large(weight_NK):
        for M in {1, min(2, most_m(weight_NK))}:
            x_MK = torch.zeros((M, weight_NK.shape[1]), dtype=matmul.dtype, device=weight_NK.device)
            multiply(matmul._replace(x_MK=x_MK))


def accepts(matmul: Matmul) -> bool:
    return has_large_weight(matmul) and len(matmul.x_MK) <= most_m(matmul.weight)


def choose_tile(M: int, N: int) -> Tile:
    """Each was the fastest of those tried. Few outputs need small tiles, so that every multiprocessor has one."""
    if M == 1:
        if N > _MANY_OUTPUTS:
            return Tile(16, 256, 4, 4)
        return Tile(4, 1024, 4, 1) if N > 4096 else Tile(8, 512, 4, 3)
    return Tile(128, 128, 4, 3) if N > 8192 else Tile(64, 128, 4, 6)


def multiply(matmul: Matmul, tile: Tile | None = None) -> Tensor:
    """Accumulators and bias are float32, rounded once."""
    x_MK, weight_NK, bias_N = matmul[:3]
    (M, K), N = x_MK.shape, len(weight_NK)
    assert M <= MOST_M, f"{M} rows are more than {MOST_M}"
    tile = tile or choose_tile(M, N)
    out_MN = matmul.empty_output()
    is_even = N % tile.block_n == 0 and K % tile.block_k == 0
    arguments = (x_MK, weight_NK, weight_NK if bias_N is None else bias_N, out_MN)
    settings = {"HAS_BIAS": bias_N is not None, "IS_EVEN": is_even, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
                "NUM_STAGES": tile.num_stages, "num_warps": tile.num_warps}
    grid = (triton.cdiv(N, tile.block_n),)
    if M == 1:
        _gemv[grid](*arguments, N, K, **settings, **launch_settings())
    else:
        weight_tiles = TensorDescriptor.from_tensor(weight_NK, [tile.block_n, tile.block_k])
        _small_m[grid](weight_tiles, *arguments, M, N, K, x_MK.stride(0), BLOCK_M=_BLOCK_M, PREFETCHED=_PREFETCHED,
                       **settings, **launch_settings())
    return out_MN


@triton.jit
def _gemv(x, weight, bias, out, N, K, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr, BLOCK_N: tl.constexpr,
          BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """One accumulator per element, summed over K at the end. The first weights are loaded before the kernel waits."""
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    is_n = offs_n < N
    pointers = weight + offs_n.to(tl.int64)[:, None] * K + offs_k[None, :]
    acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    first_k = 0
    if IS_DEPENDENT and IS_EVEN:
        first_k = BLOCK_K
        weights = tl.load(pointers, eviction_policy="evict_first")
        wait_for_earlier_kernels(IS_DEPENDENT)
        acc = weights.to(tl.float32) * tl.load(x + offs_k).to(tl.float32)[None, :]
    else:
        wait_for_earlier_kernels(IS_DEPENDENT)
    for k in tl.range(first_k, K, BLOCK_K, num_stages=NUM_STAGES):
        if IS_EVEN:
            weights = tl.load(pointers + k, eviction_policy="evict_first")
            values = tl.load(x + k + offs_k)
        else:
            is_k = k + offs_k < K
            weights = tl.load(pointers + k, mask=is_n[:, None] & is_k[None, :], other=0.0)
            values = tl.load(x + k + offs_k, mask=is_k, other=0.0)
        acc += weights.to(tl.float32) * values.to(tl.float32)[None, :]
    result = tl.sum(acc, 1)
    if HAS_BIAS:
        result += tl.load(bias + offs_n, mask=is_n, other=0.0).to(tl.float32)
    tl.store(out + offs_n, result.to(out.dtype.element_ty), mask=is_n)


@triton.jit(do_not_specialize=_CHANGES)
def _small_m(weight_tiles, x, weight, bias, out, M, N, K, stride_x, HAS_BIAS: tl.constexpr, IS_EVEN: tl.constexpr,
             BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, BLOCK_M: tl.constexpr,
             PREFETCHED: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """`weight_tiles` is a tensor descriptor of `weight`; beyond the edges a tile is 0."""
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    is_m = offs_m < M
    if IS_DEPENDENT:
        lines = tl.arange(0, PREFETCHED // _LINE) * _LINE
        prefetch(weight + tl.minimum(offs_n, N - 1).to(tl.int64)[:, None] * K + lines[None, :])
    wait_for_earlier_kernels(IS_DEPENDENT)
    x_pointers = x + offs_m[None, :] * stride_x + offs_k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        mask = is_m[None, :]
        if not IS_EVEN:
            mask = mask & (k + offs_k < K)[:, None]
        acc = tl.dot(weight_tiles.load([first_n, k]), tl.load(x_pointers + k, mask=mask, other=0.0), acc)
    is_n = offs_n < N
    if HAS_BIAS:
        acc += tl.load(bias + offs_n, mask=is_n, other=0.0).to(tl.float32)[:, None]
    tl.store(out + offs_m[None, :] * N + offs_n[:, None], acc.to(out.dtype.element_ty),
             mask=is_m[None, :] & is_n[:, None])
