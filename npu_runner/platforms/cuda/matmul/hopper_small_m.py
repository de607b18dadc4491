"""Products of 1 to 16 rows in CUDA C++ for Hopper (hopper_small_m.cu), by NVRTC. Knows nothing of models.

y = (q_x W^T) s_x s_w + b in FP8, with the scales of `quantised_products`; y = x W^T + b in 16 bits. Sums are float32.

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
from npu_runner.platforms.cuda.matmul.hopper_fp8 import can_be_brought, is_hopper

_ARCHITECTURE = "sm_90a"
_FP8 = torch.float8_e4m3fn
MOST_ROWS = 16
# Rows from which on it is faster than Triton's kernels.
LEAST_ROWS = {_FP8: 1, torch.bfloat16: 1, torch.float16: 1}
# Of smaller weights some were faster by Triton's kernels; weights with more outputs are those of heads.
_LEAST_BYTES, _MANY_OUTPUTS = 16 << 20, 65_536
# Outputs at once, and bytes of a row that a warp has at once.
_UNIT, _SLICE = 16, 128
_SUM_PITCH = 20
_TOKENS = (8, 16)


class Kind(NamedTuple):
    """What a kernel is compiled for. `tokens`: rows of x that it has at most."""

    dtype: torch.dtype
    out_dtype: torch.dtype
    in_blocks: bool
    tokens: int


class Tile(NamedTuple):
    """As in the source: units of 16 outputs at once, warps, pieces of 16 x 128 bytes in a warp's ring, and how many of
    them it asks for at once until its ring is full."""

    units: int
    warps: int
    stages: int
    first: int


# By rows of x; the quickest of those tried in layers, one program on a multiprocessor (docs/benchmarks.md).
TILES = {8: Tile(4, 16, 3, 1), 16: Tile(4, 8, 5, 2)}


def prepare(weight_OI: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> None:
    """Begins to compile what products with this weight may take."""
    if _takes_weight(weight_OI):
        for tokens in _TOKENS:
            _kernel(Kind(weight_OI.dtype, dtype, in_blocks, tokens))


def takes(x_MI: Tensor, weight_OI: Tensor, dtype: torch.dtype, *, in_blocks: bool) -> bool:
    """Whether this product is faster here than otherwise. The first such call waits until the kernels are compiled.
    While Triton's kernels are met ahead, they have to be: no."""
    if is_ahead() or not _takes_weight(weight_OI) or not _least_rows(weight_OI) <= len(x_MI) <= MOST_ROWS:
        return False
    if x_MI.dtype != weight_OI.dtype or not can_be_brought(x_MI):
        return False
    # All are loaded at once: none is while a graph is captured.
    return all([_kernel(Kind(weight_OI.dtype, dtype, in_blocks, tokens)).is_there for tokens in _TOKENS])


def multiply(x_MI: Tensor, x_scale: Tensor | None, weight_OI: Tensor, scale: Tensor | None, bias_O: Tensor | None,
             dtype: torch.dtype) -> Tensor:
    """(M, O) of `dtype`, which a bias is, too. Scales of FP8 as of `quantised_products.few_rows`; none in 16 bits.

    O is a multiple of 16, and a row of the weight, which is contiguous, one of 128 bytes. Addresses and rows of x are
    multiples of 16 bytes.
    """
    (num_rows, num_inputs), num_outputs, in_blocks = x_MI.shape, len(weight_OI), scale is not None and scale.dim() == 2
    assert 1 <= num_rows <= MOST_ROWS, f"{num_rows} rows are not 1 to {MOST_ROWS}"
    assert bias_O is None or bias_O.dtype == dtype, f"a bias of {bias_O.dtype}"
    kernel = _kernel(Kind(weight_OI.dtype, dtype, in_blocks, next(tokens for tokens in _TOKENS if tokens >= num_rows)))
    out_MO = torch.empty((num_rows, num_outputs), dtype=dtype, device=x_MI.device)
    places = (None if each is None else each.data_ptr() for each in (x_MI, x_scale, scale, bias_O, out_MO))
    work = _Work(num_rows, num_outputs, num_inputs * weight_OI.itemsize // _SLICE, x_MI.stride(0) * x_MI.itemsize,
                 x_scale.stride(1) if x_scale is not None and in_blocks else 0,
                 scale.stride(0) if scale is not None and scale.numel() > 1 else 0, *places)
    kernel.launch(min(num_outputs // _UNIT, _num_sms()), weight_OI, work)
    return out_MO


@functools.cache
def _num_sms() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def _least_rows(weight_OI: Tensor) -> int:
    """A row alone was faster by Triton's kernel where multiprocessors are left without a unit of outputs."""
    return LEAST_ROWS[weight_OI.dtype] if len(weight_OI) >= _UNIT * _num_sms() else max(2, LEAST_ROWS[weight_OI.dtype])


def _takes_weight(weight_OI: Tensor) -> bool:
    """Each multiprocessor has a unit of outputs, or, in 16 bits, three of four have."""
    return (is_hopper() and weight_OI.dtype in LEAST_ROWS and weight_OI.is_contiguous()
            and can_be_brought(weight_OI) and len(weight_OI) % _UNIT == 0
            and weight_OI.shape[1] * weight_OI.itemsize % _SLICE == 0
            and _UNIT * _least_units(weight_OI) <= len(weight_OI) <= _MANY_OUTPUTS
            and weight_OI.numel() * weight_OI.itemsize >= _LEAST_BYTES)


def _least_units(weight_OI: Tensor) -> int:
    return _num_sms() * 3 // 4 if weight_OI.itemsize == 2 else _num_sms()


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_slices")),
                *((name, ctypes.c_longlong) for name in ("stride_x", "group_stride", "scale_stride")),
                *((name, ctypes.c_void_p) for name in ("x", "x_scales", "scales", "bias", "out")))


class _Kernel(KernelAhead):
    """For one kind."""

    def __init__(self, kind: Kind):
        self._tile = tile = TILES[kind.tokens]
        exchange = 4 * tile.warps * tile.units * kind.tokens * _SUM_PITCH
        shared_bytes = tile.warps * tile.stages * (_UNIT * _SLICE + 8) + exchange + 1024
        constants = {"ITEM": kind.dtype.itemsize, "IN_BLOCKS": int(kind.in_blocks), "TOKENS": kind.tokens,
                     "IS_BFLOAT16": int(kind.out_dtype == torch.bfloat16),
                     **{name.upper(): value for name, value in tile._asdict().items()}}
        source = CompiledSource(["hopper.cu", "matmul/hopper_small_m.cu"], constants, _ARCHITECTURE)
        super().__init__(source, "multiply_few_rows", shared_bytes, instead="products of few rows: triton")

    def launch(self, programs: int, weight_OI: Tensor, work: _Work) -> None:
        (num_outputs, num_inputs), inputs = weight_OI.shape, _SLICE // weight_OI.itemsize
        slices = weight_OI.as_strided((num_inputs // inputs, num_outputs, inputs), (inputs, num_inputs, 1))
        is_dependent = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self.loaded.launch(programs, 32 * self._tile.warps, [tensor_map(slices, (1, _UNIT, inputs)), work],
                            is_dependent=is_dependent)


@functools.cache
def _kernel(kind: Kind) -> _Kernel:
    return _Kernel(kind)
