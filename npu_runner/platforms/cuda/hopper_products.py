"""Products of some rows in CUDA C++ for Hopper (hopper_products.cu), compiled by NVRTC. Knows nothing of models.

M rows, I input features, O output features, G groups of 128 columns.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, tensor_map

_ARCHITECTURE = "sm_90a"
_FOLDER = Path(__file__).parent
_FP8 = torch.float8_e4m3fn
_LINE = 128  # bytes of a row in a slice
_THREADS = 256
_MOST_SHARED_BYTES = 227 * 1024


class Tile(NamedTuple):
    """As in the source: `parts` times `part` rows of x, `blocks` times 128 outputs, `programs` a cluster."""

    part: int
    parts: int = 1
    blocks: int = 1
    programs: int = 4
    promotes: bool = True

    @property
    def rows(self) -> int:
        return self.part * self.parts

    @property
    def outputs(self) -> int:
        return 128 * self.blocks


class Kind(NamedTuple):
    """What a kernel is compiled for, beside its tile."""

    dtype: torch.dtype
    is_fp8: bool
    in_blocks: bool


class Product:
    """One compiled kernel."""

    def __init__(self, tile: Tile, kind: Kind):
        self.tile, self.kind = tile, kind
        promotes = kind.is_fp8 and tile.promotes
        chunk = tile.part // 2 if tile.part > 64 else tile.part
        exchange = chunk * (tile.outputs + 4) * 4
        stage = _LINE * (tile.outputs + tile.rows) + 16 + (4 * tile.rows if kind.in_blocks else 0)
        self.stages = (_MOST_SHARED_BYTES - 1024 - exchange - 16) // stage
        shared_bytes = self.stages * stage + exchange + 16 + 1024
        sums = tile.blocks * tile.rows // 2 + (tile.part // 2 if promotes else 0)
        self.threads = _THREADS + (128 if sums > 120 else 32)
        constants = {"IS_BFLOAT16": int(kind.dtype == torch.bfloat16), "IS_FP8": int(kind.is_fp8),
                     "IN_BLOCKS": int(kind.in_blocks), "PROMOTES": int(promotes), "BLOCKS": tile.blocks,
                     "PARTS": tile.parts, "PART": tile.part, "STAGES": self.stages}
        self.shared_bytes = shared_bytes
        self.source = CompiledSource([_FOLDER / "hopper.cu", _FOLDER / "hopper_products.cu"], constants, _ARCHITECTURE)

    @functools.cached_property
    def kernel(self) -> LoadedKernel:
        return LoadedKernel(self.source.cubin(), "multiply_rows", self.shared_bytes)

    @functools.cache
    def clusters(self, programs: int) -> int:
        return self.kernel.most_clusters(self.threads, programs)


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_slices", "room")),
                ("group_stride", ctypes.c_longlong), ("scale_stride", ctypes.c_longlong),
                *((name, ctypes.c_void_p) for name in ("x_scales", "scales", "bias", "out")))


@functools.cache
def product_of(tile: Tile, kind: Kind) -> Product:
    return Product(tile._replace(programs=0), kind) if tile.programs else Product(tile, kind)


def multiply(x_MI: Tensor, x_scale: Tensor | None, weight_OI: Tensor, scale: Tensor | None, bias_O: Tensor | None,
             dtype: torch.dtype, tile: Tile, starts_early: bool = True, most: int = 0) -> Tensor:
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    in_blocks = scale is not None and scale.dim() == 2
    made = product_of(tile._replace(programs=0), Kind(dtype, x_MI.dtype == _FP8, in_blocks))
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_MI.device)
    columns = _LINE // x_MI.element_size()
    work = _Work(num_rows, num_outputs, -(-num_inputs // columns),
                 x_scale.stride(1) if in_blocks else num_rows, x_scale.stride(1) if in_blocks else 0,
                 scale.stride(0) if scale is not None and scale.numel() > 1 else 0,
                 None if x_scale is None else x_scale.data_ptr(), None if scale is None else scale.data_ptr(),
                 None if bias_O is None else bias_O.data_ptr(), out_MO.data_ptr())
    tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
    clusters = min(tiles, most or made.clusters(tile.programs))
    maps = [tensor_map(x_MI, (tile.rows, columns)), tensor_map(weight_OI, (tile.outputs, columns))]
    made.kernel.launch(clusters * tile.programs, made.threads, [*maps, work], cluster=tile.programs,
                       starts_early=starts_early)
    return out_MO
