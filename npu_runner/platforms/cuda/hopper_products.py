"""Products of some rows in CUDA C++ for Hopper (hopper_products.cu), compiled by NVRTC. Knows nothing of models.

y = x W^T + b in 16 bits, or (q_x W^T) s_x s_w + b of FP8 with the scales of `quantised_products`. Sums are float32.

M rows, I input features, O output features, G groups of 128 columns.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import dependent_launch
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, LoadedKernel, NoKernel, tensor_map

logger = logging.getLogger(__name__)

_CAPABILITY, _ARCHITECTURE = (9, 0), "sm_90a"
_FOLDER = Path(__file__).parent
_FP8 = torch.float8_e4m3fn
_DTYPES = (torch.bfloat16, torch.float16)
_LINE = 128  # bytes of a row in a slice
_ALIGNMENT = 16
_THREADS, _WARP, _WARPGROUP = 256, 32, 128
MOST_ROWS = 128
_LEAST_ROWS = 2
_SHARED_BYTES = 227 * 1024
_FEW_SUMS = 120  # of a thread; as in the source


class Tile(NamedTuple):
    """As in the source: `parts` times `part` rows of x, `blocks` times 128 outputs. `programs`: of a cluster."""

    part: int
    parts: int = 1
    blocks: int = 1
    programs: int = 4

    @property
    def rows(self) -> int:
        return self.part * self.parts

    @property
    def outputs(self) -> int:
        return 128 * self.blocks


class Kind(NamedTuple):
    """What a kernel is compiled for, beside its tile. `dtype`: of the result."""

    dtype: torch.dtype
    is_fp8: bool
    in_blocks: bool


# Rows of x that a tile has room for, as (part, parts).
_PARTS = ((16, 1), (32, 1), (64, 1), (96, 1), (128, 1), (96, 2), (128, 2))
_PROGRAMS = (1, 2, 3, 4)
TILES = tuple(Tile(*parts, 1, programs) for parts in _PARTS for programs in _PROGRAMS)
"""All that are compiled."""
# What a tile costs beside its slices, in slices: sums are exchanged.
_EXCHANGE = 2.0


def prepare(weight_OI: Tensor, scale: Tensor | None, dtype: torch.dtype) -> None:
    """Begins to compile what products with this weight may take."""
    if _why_not(weight_OI, dtype) is None:
        for tile in TILES:
            _kernel(tile, _kind_of(weight_OI, scale, dtype))


def taken(x_MI: Tensor, weight_OI: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tile | None:
    """The tile by which this product is faster than otherwise; None where it is not. The first call for a kind waits
    until its kernels are compiled. While Triton's kernels are met ahead, they have to be: None."""
    num_rows, num_inputs = x_MI.shape
    if not _LEAST_ROWS <= num_rows <= MOST_ROWS or is_ahead() or _why_not(weight_OI, dtype) is not None:
        return None
    if not _can_be_brought(x_MI) or (scale is not None and scale.dim() == 2 and num_inputs % 128):
        return None
    return _tile_of(num_rows, len(weight_OI), num_inputs * x_MI.itemsize // _LINE,
                    _kind_of(weight_OI, scale, dtype))


def multiply(x_MI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, dtype: torch.dtype, tile: Tile,
             scales: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """(M, O) of `dtype`, which a bias has, too. `scales` of x and of the weight as of `quantised_products.few_rows`.

    `tile.programs` are no more than slices of 128 bytes. O is a multiple of 4; rows and addresses of x and of the
    weight are multiples of 16 bytes.
    """
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    assert bias_O is None or bias_O.dtype == dtype, f"a bias of {bias_O.dtype} beside {dtype}"
    kind = _kind_of(weight_OI, scales and scales[1], dtype)
    num_slices = -(-num_inputs * x_MI.itemsize // _LINE)
    assert tile.programs <= num_slices, f"{tile.programs} programs for {num_slices} slices"
    kernel = _kernel(tile, kind)
    assert kernel.is_there, "callers look first"
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_MI.device)
    room = scales[0].stride(1) if scales and kind.in_blocks else num_rows
    scale_stride = scales[1].stride(0) if scales and scales[1].numel() > 1 else 0
    work = _Work(num_rows, num_outputs, num_slices, room, room, scale_stride,
                 *(None if x is None else x.data_ptr() for x in (*(scales or (None, None)), bias_O)), out_MO.data_ptr())
    num_tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
    kernel.launch(min(num_tiles, kernel.most_clusters), x_MI, weight_OI, tile, work)
    return out_MO


@functools.cache
def _tile_of(num_rows: int, num_outputs: int, num_slices: int, kind: Kind) -> Tile | None:
    """With room for these rows; as many programs a cluster as make the longest one's work short."""
    if not _are_there(kind):
        return None
    rows = next((tile.rows for tile in TILES if tile.rows >= num_rows), TILES[-1].rows)

    def slices(tile: Tile) -> float:
        num_tiles = -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)
        return -(-num_tiles // _kernel(tile, kind).most_clusters) * (-(-num_slices // tile.programs) + _EXCHANGE)

    return min((tile for tile in TILES if tile.rows == rows and 1 < tile.programs <= num_slices), key=slices)


@functools.cache
def _are_there(kind: Kind) -> bool:
    """All are loaded at once, in a start's made-up steps: none while a graph is captured."""
    return all([_kernel(tile, kind).is_there for tile in TILES])


def _kind_of(weight_OI: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Kind:
    return Kind(dtype, weight_OI.dtype == _FP8, scale is not None and scale.dim() == 2)


def _why_not(weight_OI: Tensor, dtype: torch.dtype) -> str | None:
    """None where the kernel takes such a weight on this GPU, else the reason."""
    if not _is_hopper():
        return "the GPU is not Hopper"
    if dtype not in _DTYPES or weight_OI.dtype not in (dtype, _FP8):
        return "it computes in FP8 and 16 bits"
    if len(weight_OI) % 4 or not _can_be_brought(weight_OI):
        return "the copy engine does not take the weight's sizes"
    return None


@functools.cache
def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == _CAPABILITY


def _can_be_brought(x_MI: Tensor) -> bool:
    """Whether the copy engine takes its address and strides."""
    return (x_MI.stride(1) == 1 and x_MI.data_ptr() % _ALIGNMENT == 0
            and x_MI.stride(0) * x_MI.itemsize % _ALIGNMENT == 0)


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_slices", "room")),
                ("group_stride", ctypes.c_longlong), ("scale_stride", ctypes.c_longlong),
                *((name, ctypes.c_void_p) for name in ("x_scales", "scales", "bias", "out")))


class _Kernel:
    """For one tile and kind; compiled in a thread of `_threads` from now on."""

    def __init__(self, tile: Tile, kind: Kind):
        self._programs = tile.programs
        chunk = tile.part // 2 if tile.part > 64 else tile.part
        exchange = chunk * (tile.outputs + 4) * 4
        stage = _LINE * (tile.outputs + tile.rows) + (4 * tile.rows if kind.in_blocks else 0) + 2 * 8
        stages = (_SHARED_BYTES - 1024 - exchange - 2 * 8) // stage
        self._shared_bytes = stages * stage + exchange + 2 * 8 + 1024
        sums = tile.blocks * tile.rows // 2 + (tile.part // 2 if kind.is_fp8 else 0)
        self._threads = _THREADS + (_WARPGROUP if sums > _FEW_SUMS else _WARP)
        constants = {"IS_BFLOAT16": int(kind.dtype == torch.bfloat16), "IS_FP8": int(kind.is_fp8),
                     "IN_BLOCKS": int(kind.in_blocks), "BLOCKS": tile.blocks, "PARTS": tile.parts, "PART": tile.part,
                     "STAGES": stages, "PROGRAMS": tile.programs}
        source = CompiledSource([_FOLDER / "hopper.cu", _FOLDER / "hopper_products.cu"], constants, _ARCHITECTURE)
        self._cubin: Future[bytes] = _compilers().submit(source.cubin)

    @functools.cached_property
    def is_there(self) -> bool:
        """The first look waits until it is compiled."""
        try:
            self.loaded = LoadedKernel(self._cubin.result(), "multiply_rows", self._shared_bytes)
        except NoKernel as reason:
            logger.info("products of some rows: triton and the library (%s)", reason)
            return False
        return True

    @functools.cached_property
    def most_clusters(self) -> int:
        """How many run at once; a multiprocessor has room for one program."""
        if self._programs == 1:
            return torch.cuda.get_device_properties().multi_processor_count
        return self.loaded.most_clusters(self._threads, self._programs)

    def launch(self, clusters: int, x_MI: Tensor, weight_OI: Tensor, tile: Tile, work: _Work) -> None:
        columns = _LINE // x_MI.element_size()
        maps = tensor_map(x_MI, (tile.rows, columns)), tensor_map(weight_OI, (tile.outputs, columns))
        starts_early = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self.loaded.launch(clusters * tile.programs, self._threads, [*maps, work], cluster=tile.programs,
                           starts_early=starts_early)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "compile-products")


@functools.cache
def _kernel(tile: Tile, kind: Kind) -> _Kernel:
    return _Kernel(tile, kind)

