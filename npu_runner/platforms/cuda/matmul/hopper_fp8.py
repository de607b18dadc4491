"""Products of some rows in FP8, in CUDA C++ for Hopper (hopper_fp8.cu), by NVRTC. Knows nothing of models.

y = (q_x W^T) s_x s_w + b in bfloat16, with the scales of `quantised_products`. Sums are float32.

M rows, I input features, O output features, G groups of 128 columns.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import dependent_launch
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead, tensor_map

_CAPABILITY, _ARCHITECTURE = (9, 0), "sm_90a"
_FP8 = torch.float8_e4m3fn
# Rows from which on it is faster than Triton's kernels, and up to which than the library, by row and by block (H200).
LIMITS = {False: (17, 192), True: (33, 96)}
_LINE = 128  # bytes of a row in a slice
_ALIGNMENT = 16
_THREADS, _WARP, _WARPGROUP = 256, 32, 128
_SHARED_BYTES = 227 * 1024
_FEW_SUMS = 120  # of a thread; as in the source


class Tile(NamedTuple):
    """As in the source: `rows` of x, `blocks` times 128 outputs, `programs` of a cluster."""

    rows: int
    blocks: int
    programs: int

    @property
    def outputs(self) -> int:
        return 128 * self.blocks

    def cost(self, num_slices: int) -> float:
        """Of one tile: slices of 128 outputs for each program, and what exchanging sums takes; fitted on an H200."""
        width = (self.outputs + self.rows) / (128 + self.rows)
        return -(-num_slices // self.programs) * width + _EXCHANGE[self.programs]


_ROWS = {False: (32, 64, 96, 128), True: (64, 96)}
_EXCHANGE = {1: 2.0, 2: 2.0, 3: 8.0}
TILES = {in_blocks: tuple(Tile(rows, *more) for rows in each for more in ((1, 1), (1, 2), (1, 3), (2, 1), (2, 2)))
         for in_blocks, each in _ROWS.items()}
"""All that are compiled, by row and by block."""


def prepare(weight_OI: Tensor, *, in_blocks: bool) -> None:
    """Begins to compile what products with this weight may take."""
    if _takes_weight(weight_OI):
        for tile in TILES[in_blocks]:
            _kernel(tile, in_blocks)


def taken(x_MI: Tensor, weight_OI: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> Tile | None:
    """The tile by which this product is faster than otherwise; None where it is not. The first call waits until the
    kernels are compiled. While Triton's kernels are met ahead, they have to be: None."""
    num_rows, num_inputs = x_MI.shape
    least, most = LIMITS[in_blocks]
    if not least <= num_rows <= most or is_ahead() or dtype != torch.bfloat16:
        return None
    if not _takes_weight(weight_OI) or not can_be_brought(x_MI):
        return None
    return _tile_of(num_rows, len(weight_OI), -(-num_inputs // _LINE), in_blocks)


def multiply(x_MI: Tensor, x_scale: Tensor, weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None,
             tile: Tile) -> Tensor:
    """(M, O) bfloat16, which a bias is, too. Scales as of `quantised_products.few_rows`.

    `tile.programs` are no more than slices of 128 inputs. O is a multiple of 4; rows and addresses of x and of the
    weight are multiples of 16 bytes.
    """
    (num_rows, num_inputs), num_outputs, in_blocks = x_MI.shape, len(weight_OI), scale.dim() == 2
    assert bias_O is None or bias_O.dtype == torch.bfloat16, f"a bias of {bias_O.dtype}"
    assert not in_blocks or x_scale.data_ptr() % _ALIGNMENT == 0, "scales of groups do not begin at 16 bytes"
    num_slices = -(-num_inputs // _LINE)
    assert tile.programs <= num_slices, f"{tile.programs} programs for {num_slices} slices"
    kernel = _kernel(tile, in_blocks)
    out_MO = torch.empty((num_rows, num_outputs), dtype=torch.bfloat16, device=x_MI.device)
    room = x_scale.stride(1) if in_blocks else num_rows
    work = _Work(num_rows, num_outputs, num_slices, room, room, scale.stride(0) if scale.numel() > 1 else 0,
                 x_scale.data_ptr(), scale.data_ptr(), None if bias_O is None else bias_O.data_ptr(),
                 out_MO.data_ptr())
    kernel.launch(min(_num_tiles(tile, num_rows, num_outputs), kernel.most_clusters), x_MI, weight_OI, work)
    return out_MO


@functools.cache
def _tile_of(num_rows: int, num_outputs: int, num_slices: int, in_blocks: bool) -> Tile | None:
    """The fewest rows that hold these, or half of them; of these tiles the one whose longest cluster is done first."""
    # All are loaded at once: none is while a graph is captured.
    if not all([_kernel(tile, in_blocks).is_there for tile in TILES[in_blocks]]):
        return None
    wanted = num_rows if num_rows <= _ROWS[in_blocks][-1] else -(-num_rows // 2)
    rows = next(rows for rows in _ROWS[in_blocks] if rows >= wanted)
    fitting = []
    for tile in TILES[in_blocks]:
        rounds = -(-_num_tiles(tile, num_rows, num_outputs) // _kernel(tile, in_blocks).most_clusters)
        # A program alone has one tile: a build for bfloat16 did not end with several, and why was not found.
        if tile.rows == rows and tile.programs <= num_slices and (tile.programs > 1 or rounds == 1):
            fitting.append((rounds * tile.cost(num_slices), tile))
    return min(fitting)[1] if fitting else None


def _num_tiles(tile: Tile, num_rows: int, num_outputs: int) -> int:
    return -(-num_rows // tile.rows) * -(-num_outputs // tile.outputs)


def _takes_weight(weight_OI: Tensor) -> bool:
    return is_hopper() and weight_OI.dtype == _FP8 and len(weight_OI) % 4 == 0 and can_be_brought(weight_OI)


@functools.cache
def is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == _CAPABILITY


def can_be_brought(x_MI: Tensor) -> bool:
    """Whether the copy engine takes its address and strides."""
    return (x_MI.stride(1) == 1 and x_MI.data_ptr() % _ALIGNMENT == 0
            and x_MI.stride(0) * x_MI.itemsize % _ALIGNMENT == 0)


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_slices", "room")),
                ("group_stride", ctypes.c_longlong), ("scale_stride", ctypes.c_longlong),
                *((name, ctypes.c_void_p) for name in ("x_scales", "scales", "bias", "out")))


class _Kernel(KernelAhead):
    """For one tile."""

    def __init__(self, tile: Tile, in_blocks: bool):
        self._tile = tile
        exchange = (tile.rows // 2 if tile.rows > 64 else tile.rows) * (tile.outputs + 4) * 4
        stage = _LINE * (tile.outputs + tile.rows) + (4 * tile.rows if in_blocks else 0) + 2 * 8
        stages = (_SHARED_BYTES - 1024 - exchange - 2 * 8) // stage
        shared_bytes = stages * stage + exchange + 2 * 8 + 1024
        self._threads = _THREADS + (_WARPGROUP if (tile.blocks + 1) * tile.rows // 2 > _FEW_SUMS else _WARP)
        constants = {"IS_BFLOAT16": 1, "IN_BLOCKS": int(in_blocks), "BLOCKS": tile.blocks, "ROWS": tile.rows,
                     "STAGES": stages, "PROGRAMS": tile.programs}
        source = CompiledSource(["hopper.cu", "matmul/hopper_fp8.cu"], constants, _ARCHITECTURE)
        super().__init__(source, "multiply_rows", shared_bytes, instead="products of some rows: triton and the library")

    @functools.cached_property
    def most_clusters(self) -> int:
        """How many run at once; a multiprocessor has room for one program."""
        if self._tile.programs == 1:
            return torch.cuda.get_device_properties().multi_processor_count
        return self.loaded.most_clusters(self._threads, self._tile.programs)

    def launch(self, clusters: int, x_MI: Tensor, weight_OI: Tensor, work: _Work) -> None:
        maps = tensor_map(x_MI, (self._tile.rows, _LINE)), tensor_map(weight_OI, (self._tile.outputs, _LINE))
        is_dependent = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self.loaded.launch(clusters * self._tile.programs, self._threads, [*maps, work],
                            cluster=self._tile.programs, is_dependent=is_dependent)


@functools.cache
def _kernel(tile: Tile, in_blocks: bool) -> _Kernel:
    return _Kernel(tile, in_blocks)

