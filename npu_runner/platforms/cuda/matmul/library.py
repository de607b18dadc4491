"""Matmuls by cuBLAS, for all operands that no kernel of our own accepts. Knows no models.

M rows, N output features, K input features, G groups.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.cuda.gpu import is_hopper
from npu_runner.platforms.cuda.matmul import grouped
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.matmul.small_m import has_large_weight
from npu_runner.platforms.grouped import GroupedWeight

# M and weight bytes for which cuBLASLt was faster where K is at least 2 N (H100).
_LONG_M, _LONG_BYTES = range(64, 129), 16 << 20
# torch._int_mm needs more rows than that, and sizes that are multiples of 8.
_LEAST_INT_MM_M, _INT_MM_ALIGNMENT = 17, 8


def prepare(matmul: Matmul) -> None:
    """The library is compiled already."""


def accepts(matmul: Matmul) -> bool:
    return True


def multiply(matmul: Matmul) -> Tensor:
    x_MK, weight, bias_N, dtype = matmul[:4]
    if isinstance(weight, GroupedWeight):
        bias_N = None if bias_N is None else bias_N.to(dtype)
        return F.linear(x_MK, grouped.dequantize(weight, dtype), bias_N)
    if matmul.scale is None:
        return _linear(matmul)
    if not len(x_MK):
        return matmul.empty_output()
    return _int8(matmul) if x_MK.dtype == torch.int8 else _fp8(matmul)


def _linear(matmul: Matmul) -> Tensor:
    """torch uses cuBLASLt only where there is a bias. It has faster kernels for a long K, which get a bias of zeros."""
    x_MK, weight_NK, bias_N = matmul[:3]
    N, K = weight_NK.shape
    is_long = K >= 2 * N and weight_NK.numel() * weight_NK.itemsize >= _LONG_BYTES
    if bias_N is None and is_long and len(x_MK) in _LONG_M and is_hopper() and has_large_weight(matmul):
        bias_N = _zeros(N, weight_NK.dtype, weight_NK.device)
    return F.linear(x_MK, weight_NK, bias_N)


@functools.cache
def _zeros(N: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(N, dtype=dtype, device=device)


def _fp8(matmul: Matmul) -> Tensor:
    """With scales by block x and its scales have room for a multiple of 16 rows (quantised_inputs.py)."""
    x_MK, weight_NK, bias_N, dtype = matmul[:4]
    x_scale, scale = matmul.scales
    if x_scale.dim() == 1:
        return torch._scaled_mm(x_MK, weight_NK.t(), x_scale[:, None], scale[None], bias_N, out_dtype=dtype)
    M, K = x_MK.shape
    room = x_scale.stride(1)  # the library accepts no other number of rows
    rows_RK = x_MK.as_strided((room, K), x_MK.stride(), x_MK.storage_offset())
    scales_RG = x_scale.as_strided((room, x_scale.shape[1]), x_scale.stride(), x_scale.storage_offset())
    out_MN = torch._scaled_mm(rows_RK, weight_NK.t(), scales_RG, scale.t(), out_dtype=dtype)[:M]
    return out_MN if bias_N is None else out_MN + bias_N


def _int8(matmul: Matmul) -> Tensor:
    """Sums are exact. Sizes that the library refuses are computed in float64."""
    x_MK, weight_NK = matmul[:2]
    M = len(x_MK)
    if any(size % _INT_MM_ALIGNMENT for size in weight_NK.shape):
        return _scaled(x_MK.double() @ weight_NK.double().t(), matmul)
    if M < _LEAST_INT_MM_M:
        x_MK = F.pad(x_MK, (0, 0, 0, 32 - M))
    return _scaled(torch._int_mm(x_MK, weight_NK.t()), matmul)


def _scaled(accumulators: Tensor, matmul: Matmul) -> Tensor:
    """acc s_x s_w + b of the first M rows of the accumulators, int32 or float64."""
    N, out_MN, block = accumulators.shape[1], matmul.empty_output(), 1024
    bias_N, (x_scale, scale) = matmul.bias_N, matmul.scales
    _scale_accumulators[(len(out_MN), triton.cdiv(N, block))](
        accumulators, x_scale, scale, scale if bias_N is None else bias_N, out_MN, N,
        HAS_BIAS=bias_N is not None, BLOCK=block, num_warps=4, **launch_settings())
    return out_MN


@triton.jit
def _scale_accumulators(acc, x_scale, scale, bias, out, N, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr,
                        IS_DEPENDENT: tl.constexpr):
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs_n < N
    result = tl.load(acc + row * N + offs_n, mask=mask, other=0).to(tl.float32)
    result = result * tl.load(x_scale + row) * tl.load(scale + offs_n, mask=mask, other=0.0)
    if HAS_BIAS:
        result += tl.load(bias + offs_n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * N + offs_n, result.to(out.dtype.element_ty), mask=mask)
