"""Products of 1 to 16 rows in CUDA C++ for Hopper (few_rows.cu), by NVRTC: the weight is read before earlier kernels
are done. Knows nothing of models.

y = (q_x W^T) s_x s_w + b with FP8 and the scales of `quantised_products`, y = x W^T + b in 16 bits. Sums are float32.

M rows, I input features, O output features, G groups of 128 columns.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import weakref
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
_UNIT, _SLICE, _ALIGNMENT = 16, 128, 16
MOST_ROWS = 16


class Tile(NamedTuple):
    units: int
    warps: int
    stages: int
    programs: int = 1
    ahead: int = 0  # KB of the next weight
    trigger: int = 0
    room: int = 0  # KB


TILES = {(1, 8): Tile(4, 16, 2, 1, 128), (1, 16): Tile(4, 8, 5, 1, 128), (2, 8): Tile(4, 16, 2, 1, 128), (2, 16): Tile(4, 8, 5, 1, 128)}


def tile_of(num_rows: int, itemsize: int) -> Tile:
    return TILES[itemsize, 8 if num_rows <= 8 else 16]


class Kind(NamedTuple):
    dtype: torch.dtype
    out_dtype: torch.dtype
    in_blocks: bool
    tokens: int


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_slices", "next_units", "next_programs",
                 "next_bytes", "next_row_bytes", "trigger")),
                *((name, ctypes.c_longlong) for name in ("stride_x", "group_stride", "scale_stride")),
                *((name, ctypes.c_void_p) for name in ("x", "next", "x_scales", "scales", "bias", "out")))


def takes(x_MI: Tensor, weight_OI: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> bool:
    if not 1 <= len(x_MI) <= MOST_ROWS or is_ahead() or not _takes_weight(weight_OI):
        return False
    if weight_OI.dtype not in (_FP8, torch.bfloat16, torch.float16) or x_MI.dtype != weight_OI.dtype:
        return False
    if x_MI.data_ptr() % _ALIGNMENT or x_MI.stride(0) * x_MI.itemsize % _ALIGNMENT or x_MI.stride(1) != 1:
        return False
    return _kernel(Kind(weight_OI.dtype, dtype, in_blocks, 8 if len(x_MI) <= 8 else 16), tile_of(len(x_MI), x_MI.itemsize)).is_there


def prepare(weight_OI: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> None:
    if _takes_weight(weight_OI):
        for tokens in (8, 16):
            _kernel(Kind(weight_OI.dtype, dtype, in_blocks, tokens), tile_of(tokens, weight_OI.itemsize))


def _takes_weight(weight_OI: Tensor) -> bool:
    return (_is_hopper() and len(weight_OI) % _UNIT == 0 and weight_OI.shape[1] * weight_OI.itemsize % _SLICE == 0
            and weight_OI.is_contiguous() and weight_OI.data_ptr() % _ALIGNMENT == 0)


@functools.cache
def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == _CAPABILITY


def multiply(x_MI: Tensor, x_scale: Tensor | None, weight_OI: Tensor, scale: Tensor | None, bias_O: Tensor | None,
             dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
    (num_rows, num_inputs), num_outputs = x_MI.shape, len(weight_OI)
    in_blocks = scale is not None and scale.dim() == 2
    tile = tile or tile_of(num_rows, x_MI.itemsize)
    kernel = _kernel(Kind(weight_OI.dtype, dtype, in_blocks, 8 if num_rows <= 8 else 16), tile)
    assert kernel.is_there, "callers look first"
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_MI.device)
    following = _ORDER.following(weight_OI)
    about_next = (0, 0, 0, 0)
    if following is not None and tile.ahead:
        units = len(following) // _UNIT
        programs = min(units, tile.programs * _num_sms())
        row_bytes = following.shape[1] * following.itemsize
        rows = min(tile.units, -(-units // programs)) * _UNIT
        about_next = units, programs, min(row_bytes, tile.ahead * 1024 // rows // _SLICE * _SLICE), row_bytes
    work = _Work(num_rows, num_outputs, num_inputs * weight_OI.itemsize // _SLICE, *about_next, tile.trigger,
                 x_MI.stride(0) * x_MI.itemsize,
                 x_scale.stride(1) if in_blocks else 0,
                 0 if scale is None or scale.numel() == 1 else scale.stride(0),
                 x_MI.data_ptr(), None if not about_next[0] else following.data_ptr(),
                 None if x_scale is None else x_scale.data_ptr(),
                 None if scale is None else scale.data_ptr(), None if bias_O is None else bias_O.data_ptr(),
                 out_MO.data_ptr())
    kernel.launch(min(num_outputs // _UNIT, tile.programs * _num_sms()), weight_OI, work)
    return out_MO


class _Order:
    """Which weight was multiplied behind which: it will probably be so again."""

    def __init__(self) -> None:
        self._behind: dict[int, weakref.ref[Tensor]] = {}
        self._last: weakref.ref[Tensor] | None = None

    def following(self, weight_OI: Tensor) -> Tensor | None:
        last = self._last and self._last()
        if last is not None:
            self._behind[last.data_ptr()] = weakref.ref(weight_OI)
        self._last = weakref.ref(weight_OI)
        behind = self._behind.get(weight_OI.data_ptr())
        return behind and behind()


_ORDER = _Order()


@functools.cache
def _num_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


class _Kernel:
    def __init__(self, kind: Kind, tile: Tile):
        self._threads = 32 * tile.warps
        self._warps, stage = tile.warps, 16 * 128 * tile.warps
        self._shared_bytes = max(tile.room * 1024, tile.stages * (stage + 8 * tile.warps + 16)
                              + 4 * tile.warps * tile.units * kind.tokens * 20 + 1024)
        constants = {"ITEM": kind.dtype.itemsize, "IN_BLOCKS": int(kind.in_blocks), "TOKENS": kind.tokens,
                     "IS_BFLOAT16": int(kind.out_dtype == torch.bfloat16), "UNITS": tile.units, "WARPS": tile.warps,
                     "STAGES": tile.stages, "PROGRAMS": max(1, 16 // tile.warps)}
        source = CompiledSource([_FOLDER / "hopper.cu", _FOLDER / "few_rows.cu"], constants, _ARCHITECTURE)
        self._cubin: Future[bytes] = _compilers().submit(source.cubin)

    @functools.cached_property
    def is_there(self) -> bool:
        try:
            self._loaded = LoadedKernel(self._cubin.result(), "multiply_few_rows", self._shared_bytes)
        except NoKernel as reason:
            logger.info("products of few rows: triton (%s)", reason)
            return False
        return True

    def _map(self, weight_OI: Tensor) -> ctypes.Array[ctypes.c_char]:
        inputs = _SLICE // weight_OI.itemsize
        num_outputs, num_inputs = weight_OI.shape
        slices = weight_OI.as_strided((num_inputs // inputs, num_outputs, inputs), (inputs, num_inputs, 1))
        return tensor_map(slices, (1, _UNIT, inputs))

    def launch(self, programs: int, weight_OI: Tensor, work: _Work) -> None:
        is_dependent = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self._loaded.launch(programs, self._threads, [self._map(weight_OI), work], is_dependent=is_dependent)


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0))), "compile-few-rows")


def _kernel(kind: Kind, tile: Tile) -> _Kernel:
    return _kernel_of(kind, tile._replace(ahead=0, trigger=0))


@functools.cache
def _kernel_of(kind: Kind, tile: Tile) -> _Kernel:
    return _Kernel(kind, tile)
