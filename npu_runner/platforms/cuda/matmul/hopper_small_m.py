"""Matmuls of 1 to 16 rows on Hopper, in CUDA C++ (hopper_small_m.cu). Knows no models.

The weight is in FP8, or in 16 bits. LM heads, int8, weights of less than 16 MiB, and weights with fewer than 16 outputs
for each multiprocessor stay in Triton. Two to 16 rows in 16 bits need them for only three of four multiprocessors.

M rows, N output features, K input features.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import gpu
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead, fits_tensor_map, tensor_map
from npu_runner.platforms.cuda.dependent_launch import is_dependent
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.matmul.small_m import has_large_weight, is_large

_DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.float16)
MOST_M = 16
# Triton's kernels were faster for some smaller weights; only LM heads have more outputs.
_LEAST_BYTES, _MANY_OUTPUTS = 16 << 20, 65_536
# Outputs of an MMA, bytes of a weight row in a stage, and floats from one output's accumulators to the next one's.
_MMA_N, _SLICE, _PITCH = 16, 128, 20


class _Variant(NamedTuple):
    """The constants of the source. `tile_m`: the most rows of x."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    in_blocks: bool
    tile_m: int


class SmallMTile(NamedTuple):
    """`n_tiles` of 16 outputs at once, warps, stages of 16 x 128 bytes in a warp's ring, and how many of them a warp
    loads at once until its ring is full."""

    n_tiles: int
    warps: int
    stages: int
    first: int


# By the rows of x; the fastest of those tried in layers, with one program on a multiprocessor (docs/benchmarks.md).
TILES = {8: SmallMTile(4, 16, 3, 1), 16: SmallMTile(4, 8, 5, 2)}


def prepare(matmul: Matmul) -> None:
    if _accepts_weight(matmul):
        for variant in _variants(matmul):
            _kernel(variant)


def accepts(matmul: Matmul) -> bool:
    """The first call waits until the kernels are compiled. During compile-ahead Triton's kernels must be met: False."""
    x_MK, weight_NK, bias_N, dtype = matmul[:4]
    if is_ahead() or not _accepts_weight(matmul) or not _least_m(weight_NK) <= len(x_MK) <= MOST_M:
        return False
    if x_MK.dtype != weight_NK.dtype or not fits_tensor_map(x_MK) or not (bias_N is None or bias_N.dtype == dtype):
        return False
    # All are loaded at once, since none can be loaded while a graph is captured.
    return (matmul.scale is not None or has_large_weight(matmul)) and all([
        _kernel(variant).is_available for variant in _variants(matmul)])


def multiply(matmul: Matmul) -> Tensor:
    """N is a multiple of 16, and a row of the contiguous weight of 128 bytes. Accumulators are float32."""
    x_MK, weight_NK, bias_N, dtype, x_scale, scale = matmul
    (M, K), N = x_MK.shape, len(weight_NK)
    assert 1 <= M <= MOST_M, f"{M} rows are not 1 to {MOST_M}"
    assert bias_N is None or bias_N.dtype == dtype, f"a bias of {bias_N.dtype}"
    kernel = _kernel(_variants(matmul)[M > 8])
    out_MN = matmul.empty_output()
    addresses = (None if each is None else each.data_ptr() for each in (x_MK, x_scale, scale, bias_N, out_MN))
    params = _SmallMParams(M, N, K * weight_NK.itemsize // _SLICE, x_MK.stride(0) * x_MK.itemsize,
                           x_scale.stride(1) if x_scale is not None and matmul.in_blocks else 0,
                           scale.stride(0) if scale is not None and scale.numel() > 1 else 0, *addresses)
    kernel.launch(min(N // _MMA_N, gpu.num_sms()), weight_NK, params)
    return out_MN


def _least_m(weight_NK: Tensor) -> int:
    """Triton's kernel was faster for one row where some multiprocessors have no outputs."""
    return 1 if len(weight_NK) >= _MMA_N * gpu.num_sms() else 2


def _accepts_weight(matmul: Matmul) -> bool:
    weight_NK = matmul.weight
    N, row_bytes = len(weight_NK), weight_NK.shape[1] * weight_NK.itemsize
    least_tiles = gpu.num_sms() * 3 // 4 if weight_NK.itemsize == 2 else gpu.num_sms()
    return (gpu.is_hopper() and weight_NK.dtype in _DTYPES and weight_NK.is_contiguous() and fits_tensor_map(weight_NK)
            and N % _MMA_N == 0 and row_bytes % _SLICE == 0 and _MMA_N * least_tiles <= N <= _MANY_OUTPUTS
            and N * row_bytes >= _LEAST_BYTES and (matmul.scale is not None or is_large(weight_NK)))


def _variants(matmul: Matmul) -> list[_Variant]:
    return [_Variant(matmul.weight.dtype, matmul.dtype, matmul.in_blocks, tile_m) for tile_m in TILES]


class _SmallMParams(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (*((name, ctypes.c_int) for name in ("m", "n", "num_slices")),
                *((name, ctypes.c_longlong) for name in ("stride_x", "group_stride", "scale_stride")),
                *((name, ctypes.c_void_p) for name in ("x", "x_scales", "scales", "bias", "out")))


class _SmallMKernel(KernelAhead):
    def __init__(self, variant: _Variant):
        self._tile = tile = TILES[variant.tile_m]
        exchange = 4 * tile.warps * tile.n_tiles * variant.tile_m * _PITCH
        shared_bytes = tile.warps * tile.stages * (_MMA_N * _SLICE + 8) + exchange + 1024
        constants = {"ITEM": variant.dtype.itemsize, "IN_BLOCKS": int(variant.in_blocks), "TILE_M": variant.tile_m,
                     "IS_BFLOAT16": int(variant.out_dtype == torch.bfloat16),
                     **{name.upper(): value for name, value in tile._asdict().items()}}
        super().__init__(CompiledSource(["hopper.cu", "matmul/hopper_small_m.cu"], constants), "small_m_gemm",
                         shared_bytes, fallback="matmuls of 1 to 16 rows: triton")

    def launch(self, programs: int, weight_NK: Tensor, params: _SmallMParams) -> None:
        (N, K), slice_k = weight_NK.shape, _SLICE // weight_NK.itemsize
        slices = weight_NK.as_strided((K // slice_k, N, slice_k), (slice_k, K, 1))
        self.loaded.launch(programs, 32 * self._tile.warps, [tensor_map(slices, (1, _MMA_N, slice_k)), params],
                           is_dependent=is_dependent())


@functools.cache
def _kernel(variant: _Variant) -> _SmallMKernel:
    return _SmallMKernel(variant)
