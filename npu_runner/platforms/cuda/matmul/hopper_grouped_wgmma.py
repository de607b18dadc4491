"""Matmuls of 129 to 256 rows with a weight of 4 or 8 bit integers on Hopper, in CUDA C++ (hopper_grouped_wgmma.cu).
Knows no models.

The weight is rounded once to x's dtype, as in `grouped.dequantised`; accumulators are float32.

M rows, N output features, K input features. A run is 128 inputs.
"""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import gpu
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead, tensor_map
from npu_runner.platforms.cuda.dependent_launch import is_dependent
from npu_runner.platforms.cuda.matmul.hopper_grouped_small_m import (
    RUN,
    accepts_weight,
    num_inputs,
    with_aligned_rows,
)
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.split_k import MOST_TILES, make_counters

# The M at which it is faster than Triton's kernels and than the library (docs/benchmarks.md).
LIMITS = (129, 256)
_TILE_M = (64, 96, 128)
_GROUPS = (2, 3)
_PIECE_ROWS, _PIECE_BYTES = 64, 4096
_MOST_SPLITS, _LEAST_RUNS = 8, 4
_SHARED_BYTES = 227 * 1024
# Estimated cycles: of the MMAs of a row of x and 64 outputs with a run, of loading the row and the outputs, of storing
# and reading a row's partial accumulators of 64 outputs, of an item beside its runs.
_MMA_COST, _ROW_COST, _OUTPUTS_COST, _PARTIAL_COST, _ITEM_COST = 5.3, 10.7, 205.0, 25.6, 2000.0


class _Variant(NamedTuple):
    """The constants of the source."""

    is_bfloat16: bool
    bits: int
    has_zeros: bool
    in_halves: bool
    groups: int
    tile_m: int

    @property
    def stage_bytes(self) -> int:
        """The bytes of pieces and rows, of scales, and of two barriers."""
        lines = (2 if self.in_halves else 1) * (2 if self.has_zeros else 1)
        pieces = self.groups * (2 if self.bits == 8 else 1)
        return self.tile_m * 256 + pieces * _PIECE_BYTES + lines * self.groups * 2 * _PIECE_ROWS + 2 * 8


def prepare(matmul: Matmul) -> None:
    if accepts_weight(matmul.weight):
        for variant in _variants(matmul):
            _kernel(variant)


def accepts(matmul: Matmul) -> bool:
    """The first call waits until the kernels are compiled. During compile-ahead Triton's kernels must be met: False."""
    if not LIMITS[0] <= len(matmul.x_MK) <= LIMITS[1] or is_ahead() or not accepts_weight(matmul.weight):
        return False
    return all([_kernel(variant).is_available for variant in _variants(matmul)])


def multiply(matmul: Matmul, plan: SplitPlan | None = None) -> Tensor:
    x_MK, weight, bias_N = with_aligned_rows(matmul.x_MK), matmul.weight, matmul.bias_N
    M, N = len(x_MK), weight.scales.shape[1]
    num_runs = num_inputs(weight) // RUN
    plan = plan or choose_plan(M, N, num_runs, gpu.num_sms())
    kernel = _kernel(_variant(matmul, plan.groups, plan.tile_m))
    out_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    partials = None
    if plan.splits > 1:
        partials = torch.empty(plan.num_items * plan.groups * _PIECE_ROWS * plan.tile_m, dtype=torch.float32,
                               device=x_MK.device)
    params = _GroupedParams(
        M, N, num_runs, max(1, num_runs // len(weight.scales)), plan.splits, plan.m_tiles, plan.num_items,
        int(bias_N is not None and bias_N.dtype == torch.float32), weight.scales.data_ptr(),
        None if weight.zeros is None else weight.zeros.data_ptr(), None if bias_N is None else bias_N.data_ptr(),
        out_MN.data_ptr(), None if partials is None else partials.data_ptr(),
        make_counters(x_MK.device, plan.num_items // plan.splits if plan.splits > 1 else 0).data_ptr())
    kernel.launch(plan.programs, x_MK, weight.values, params)
    return out_MN


class SplitPlan(NamedTuple):
    """A program has 64 outputs for each of `groups` warpgroups, and the runs of a tile are divided among `splits`."""

    groups: int
    tile_m: int
    splits: int
    m_tiles: int
    num_items: int
    programs: int


@functools.lru_cache(maxsize=4096)
def choose_plan(M: int, N: int, num_runs: int, num_sms: int) -> SplitPlan:
    """The plan whose longest program ends first."""
    m_tiles = -(-M // _TILE_M[-1])
    tile_m = next(tile_m for tile_m in _TILE_M if tile_m * m_tiles >= M)
    costs = []
    for groups in _GROUPS:
        tiles = -(-N // (groups * _PIECE_ROWS)) * m_tiles
        for splits in range(1, _MOST_SPLITS + 1):
            if splits > 1 and (num_runs < splits * _LEAST_RUNS or tiles > min(MOST_TILES, 2 * num_sms)):
                break
            run_cost = max(groups * tile_m * _MMA_COST, tile_m * _ROW_COST + groups * _OUTPUTS_COST)
            partials_cost = groups * tile_m * _PARTIAL_COST if splits > 1 else 0
            item_cost = -(-num_runs // splits) * run_cost + _ITEM_COST + partials_cost
            items = tiles * splits
            plan = SplitPlan(groups, tile_m, splits, m_tiles, items, min(items, num_sms))
            costs.append((-(-items // num_sms) * item_cost, plan))
    return min(costs)[1]


def _variant(matmul: Matmul, groups: int, tile_m: int) -> _Variant:
    weight = matmul.weight
    return _Variant(matmul.dtype == torch.bfloat16, 4 if weight.values.dtype == torch.uint8 else 8,
                    weight.zeros is not None, len(weight.scales) * RUN == 2 * num_inputs(weight), groups, tile_m)


def _variants(matmul: Matmul) -> list[_Variant]:
    return [_variant(matmul, groups, tile_m) for groups in _GROUPS for tile_m in _TILE_M]


class _GroupedParams(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (*((name, ctypes.c_int) for name in ("m", "n", "num_runs", "runs_per_group", "splits", "m_tiles",
                                                    "num_items", "is_wide_bias")),
                *((name, ctypes.c_void_p) for name in ("scales", "zeros", "bias", "out", "partials", "counters")))


class _GroupedKernel(KernelAhead):
    def __init__(self, variant: _Variant):
        self._variant = variant
        stages = (_SHARED_BYTES - 1024 - 16) // variant.stage_bytes
        shared_bytes = stages * variant.stage_bytes + 16 + 1024
        constants = {**variant._asdict(), "stages": stages}
        source = CompiledSource(["hopper.cu", "matmul/hopper_dequantize.cu", "matmul/hopper_grouped_wgmma.cu"],
                                {name.upper(): int(value) for name, value in constants.items()})
        super().__init__(source, "grouped_gemm", shared_bytes,
                         fallback="matmuls of 129 to 256 rows with integers: triton and the library")

    def launch(self, programs: int, x_MK: Tensor, values: Tensor, params: _GroupedParams) -> None:
        maps = (tensor_map(x_MK, (self._variant.tile_m, RUN // 2)),
                tensor_map(values.view(-1, values.shape[3]), (_PIECE_ROWS, values.shape[3])))
        self.loaded.launch(programs, 128 * self._variant.groups + 32, [*maps, params], is_dependent=is_dependent())


@functools.cache
def _kernel(variant: _Variant) -> _GroupedKernel:
    return _GroupedKernel(variant)
