"""Matmuls of 1 to 64 rows with a weight of few outputs, such as a router's, in Triton. Knows no models.

A launch and the latency of the first weights are their bound.

M rows, N output features, K input features.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.cuda.gpu import Gpu
from npu_runner.platforms.cuda.matmul.operands import Matmul

_DTYPES = (torch.bfloat16, torch.float16)
# A program holds all its operands in registers.
_BLOCK_N, _BLOCK_M, _K = 16, 16, (1024, 2048)
_MOST_N, _MOST_M = 512, 64
_SHARED_BYTES = 160 << 10
_NUM_WARPS = 8


def prepare(matmul: Matmul) -> None:
    """Any M uses the same variant, and the first matmul compiles it."""


def accepts(matmul: Matmul) -> bool:
    x_MK, weight_NK = matmul.x_MK, matmul.weight
    N, K = weight_NK.shape
    return (matmul.bias_N is None and weight_NK.dtype in _DTYPES and x_MK.dtype == weight_NK.dtype and x_MK.dim() == 2
            and x_MK.stride(1) == 1 and weight_NK.is_contiguous() and N % _BLOCK_N == 0 and _BLOCK_N <= N <= _MOST_N
            and K in _K and 0 < len(x_MK) <= _MOST_M and _has_room())


@functools.cache
def _has_room() -> bool:
    return Gpu.current().shared_bytes >= _SHARED_BYTES


def multiply(matmul: Matmul) -> Tensor:
    """Accumulators are float32, rounded once."""
    x_MK, weight_NK = matmul.x_MK, matmul.weight
    (M, K), N = x_MK.shape, len(weight_NK)
    out_MN = matmul.empty_output()
    _small_n[(N // _BLOCK_N, triton.cdiv(M, _BLOCK_M))](
        x_MK, weight_NK, out_MN, M, N, x_MK.stride(0), K=K, BLOCK_N=_BLOCK_N, BLOCK_M=_BLOCK_M, SPLIT_K=_NUM_WARPS,
        num_warps=_NUM_WARPS, **launch_settings())
    return out_MN


@triton.jit(do_not_specialize=["M"])
def _small_n(x, weight, out, M, N, stride_x, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
             SPLIT_K: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The weight's tile is the left operand, loaded before the kernel waits. Each warp has one split of K: one long
    chain of MMAs would take most of the time."""
    BLOCK_K: tl.constexpr = K // SPLIT_K
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    splits, steps = tl.arange(0, SPLIT_K), tl.arange(0, BLOCK_K)
    offs_k = splits[:, None, None] * BLOCK_K + steps[None, None, :]
    weights = tl.load(weight + offs_n[None, :, None] * K + offs_k)
    after_earlier_kernels(IS_DEPENDENT)
    offs_k = splits[:, None, None] * BLOCK_K + steps[None, :, None]
    values = tl.load(x + offs_m.to(tl.int64)[None, None, :] * stride_x + offs_k, mask=(offs_m < M)[None, None, :],
                     other=0.0)
    acc = tl.sum(tl.dot(weights, values), 0)
    tl.store(out + offs_m[None, :] * N + offs_n[:, None], acc.to(out.dtype.element_ty),
             mask=(offs_m < M)[None, :])
