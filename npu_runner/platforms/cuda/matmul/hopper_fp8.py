"""Matmuls of 17 to 192 rows in FP8 on Hopper (by block 33 to 96), in CUDA C++ (hopper_fp8.cu). Knows no models.

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

_FP8 = torch.float8_e4m3fn
# The M at which it is faster than Triton's kernels and than the library, by row and by block (H200).
LIMITS = {False: (17, 192), True: (33, 96)}
_SLICE = 128  # bytes of a row in a stage
_ALIGNMENT = 16
_THREADS, _WARP, _WARPGROUP = 256, 32, 128
_SHARED_BYTES = 227 * 1024
_FEW_ACCUMULATORS = 120  # of a thread; as in the source


class Fp8Tile(NamedTuple):
    """`m` rows of x, `blocks` times 128 outputs, and `programs` of a cluster, which split K."""

    m: int
    blocks: int
    programs: int

    @property
    def n(self) -> int:
        return 128 * self.blocks

    def cost(self, num_slices: int) -> float:
        """In slices of 128 outputs of one program, with the exchange of accumulators; fitted on an H200."""
        width = (self.n + self.m) / (128 + self.m)
        return -(-num_slices // self.programs) * width + _EXCHANGE[self.programs]


_TILE_M = {False: (32, 64, 96, 128), True: (64, 96)}
_EXCHANGE = {1: 2.0, 2: 2.0, 3: 8.0}
TILES = {in_blocks: tuple(Fp8Tile(m, *more) for m in each for more in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2)))
         for in_blocks, each in _TILE_M.items()}
"""All tiles that are compiled, by row and by block."""


def prepare(matmul: Matmul) -> None:
    if _accepts_weight(matmul.weight):
        for tile in TILES[matmul.in_blocks]:
            _kernel(tile, matmul.in_blocks)


def accepts(matmul: Matmul) -> bool:
    """The first call waits until the kernels are compiled. During compile-ahead Triton's kernels must be met: False."""
    least, most = LIMITS[matmul.in_blocks]
    if not least <= len(matmul.x_MK) <= most or is_ahead() or matmul.dtype != torch.bfloat16:
        return False
    if matmul.bias_N is not None and matmul.bias_N.dtype != matmul.dtype:
        return False
    return (_accepts_weight(matmul.weight) and fits_tensor_map(matmul.x_MK)
            and choose_tile(*_sizes(matmul), matmul.in_blocks) is not None)


def multiply(matmul: Matmul, tile: Fp8Tile | None = None) -> Tensor:
    """bfloat16. N is a multiple of 4, and `tile.programs` are no more than the slices of 128 inputs."""
    x_MK, weight_NK, bias_N = matmul[:3]
    x_scale, scale = matmul.scales
    (M, N, num_slices), in_blocks = _sizes(matmul), matmul.in_blocks
    tile = tile or choose_tile(M, N, num_slices, in_blocks)
    assert tile is not None, "callers ask `accepts`"
    assert bias_N is None or bias_N.dtype == torch.bfloat16, f"a bias of {bias_N.dtype}"
    assert not in_blocks or x_scale.data_ptr() % _ALIGNMENT == 0, "scales of groups do not start at 16 bytes"
    assert tile.programs <= num_slices, f"{tile.programs} programs for {num_slices} slices"
    kernel = _kernel(tile, in_blocks)
    out_MN = matmul.empty_output()
    room = x_scale.stride(1) if in_blocks else M
    params = _Fp8Params(M, N, num_slices, room, room, scale.stride(0) if scale.numel() > 1 else 0, x_scale.data_ptr(),
                        scale.data_ptr(), None if bias_N is None else bias_N.data_ptr(), out_MN.data_ptr())
    kernel.launch(min(_num_tiles(tile, M, N), kernel.most_clusters), x_MK, weight_NK, params)
    return out_MN


def _sizes(matmul: Matmul) -> tuple[int, int, int]:
    return len(matmul.x_MK), len(matmul.weight), -(-matmul.x_MK.shape[1] // _SLICE)


@functools.cache
def choose_tile(M: int, N: int, num_slices: int, in_blocks: bool) -> Fp8Tile | None:
    """The smallest tile that holds all rows, or half of them; of these the one whose longest cluster ends first."""
    # All are loaded at once, since none can be loaded while a graph is captured.
    if not all([_kernel(tile, in_blocks).is_available for tile in TILES[in_blocks]]):
        return None
    wanted = M if _TILE_M[in_blocks][-1] >= M else -(-M // 2)
    tile_m = next(m for m in _TILE_M[in_blocks] if m >= wanted)
    fitting = []
    for tile in TILES[in_blocks]:
        rounds = -(-_num_tiles(tile, M, N) // _kernel(tile, in_blocks).most_clusters)
        # A single program has one tile: a build for bfloat16 did not end with several, and the reason was not found.
        if tile.m == tile_m and tile.programs <= num_slices and (tile.programs > 1 or rounds == 1):
            fitting.append((rounds * tile.cost(num_slices), tile))
    return min(fitting)[1] if fitting else None


def _num_tiles(tile: Fp8Tile, M: int, N: int) -> int:
    return -(-M // tile.m) * -(-N // tile.n)


def _accepts_weight(weight_NK: Tensor) -> bool:
    return gpu.is_hopper() and weight_NK.dtype == _FP8 and len(weight_NK) % 4 == 0 and fits_tensor_map(weight_NK)


class _Fp8Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (*((name, ctypes.c_int) for name in ("m", "n", "num_slices", "room")),
                ("group_stride", ctypes.c_longlong), ("scale_stride", ctypes.c_longlong),
                *((name, ctypes.c_void_p) for name in ("x_scales", "scales", "bias", "out")))


class _Fp8Kernel(KernelAhead):
    def __init__(self, tile: Fp8Tile, in_blocks: bool):
        self._tile = tile
        exchange = (tile.m // 2 if tile.m > 64 else tile.m) * (tile.n + 4) * 4
        stage = _SLICE * (tile.n + tile.m) + (4 * tile.m if in_blocks else 0) + 2 * 8
        stages = (_SHARED_BYTES - 1024 - exchange - 2 * 8) // stage
        shared_bytes = stages * stage + exchange + 2 * 8 + 1024
        self._threads = _THREADS + (_WARPGROUP if (tile.blocks + 1) * tile.m // 2 > _FEW_ACCUMULATORS else _WARP)
        constants = {"IS_BFLOAT16": 1, "IN_BLOCKS": int(in_blocks), "BLOCKS": tile.blocks, "TILE_M": tile.m,
                     "STAGES": stages, "PROGRAMS": tile.programs}
        super().__init__(CompiledSource(["hopper.cu", "matmul/hopper_fp8.cu"], constants), "fp8_gemm", shared_bytes,
                         fallback="matmuls of 17 to 192 rows in FP8: triton and the library")

    @functools.cached_property
    def most_clusters(self) -> int:
        """The most clusters that run at once; a multiprocessor has room for one program."""
        return self.loaded.most_clusters(self._threads, self._tile.programs)

    def launch(self, clusters: int, x_MK: Tensor, weight_NK: Tensor, params: _Fp8Params) -> None:
        maps = tensor_map(x_MK, (self._tile.m, _SLICE)), tensor_map(weight_NK, (self._tile.n, _SLICE))
        self.loaded.launch(clusters * self._tile.programs, self._threads, [*maps, params],
                           cluster=self._tile.programs, is_dependent=is_dependent())


@functools.cache
def _kernel(tile: Fp8Tile, in_blocks: bool) -> _Fp8Kernel:
    return _Fp8Kernel(tile, in_blocks)
