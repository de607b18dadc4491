"""Products of some rows with weights of 4 and 8 bit integers, in CUDA C++ for Hopper (hopper_grouped_wgmma.cu), by
NVRTC. Knows nothing of models.

The weight is rounded once to x's dtype, as `grouped.dequantised` is; sums are float32.

M rows, I input features, O output features. A run is 128 inputs.
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
from npu_runner.platforms.cuda.matmul.hopper_grouped_small_m import (
    ARCHITECTURE,
    RUN,
    aligned,
    num_inputs_of,
    sources,
    takes_weight,
)
from npu_runner.platforms.cuda.split_k import MOST_TILES, counters
from npu_runner.platforms.grouped import GroupedWeight

_ROWS = (64, 96, 128)
_GROUPS = (2, 3)
_PIECE_ROWS, _PIECE_BYTES = 64, 4096
_MOST_SPLITS, _LEAST_RUNS = 8, 4
_SHARED_BYTES = 227 * 1024
# Estimated cycles: of products of a row of x and 64 outputs with a run, of bringing the row and the outputs, of a row's
# sums of 64 outputs that are left and read again, of an item beside its runs.
_PRODUCT, _ROW, _OUTPUTS, _SUM, _ITEM = 5.3, 10.7, 205.0, 25.6, 2000.0


class Variant(NamedTuple):
    """Constants of the source."""

    is_bfloat16: bool
    bits: int
    has_zeros: bool
    in_halves: bool
    groups: int
    rows: int

    @property
    def stage_bytes(self) -> int:
        """Of pieces and rows, of scales, and two barriers."""
        lines = (2 if self.in_halves else 1) * (2 if self.has_zeros else 1)
        pieces = self.groups * (2 if self.bits == 8 else 1)
        return self.rows * 256 + pieces * _PIECE_BYTES + lines * self.groups * 2 * _PIECE_ROWS + 2 * 8


def prepare(weight: GroupedWeight, dtype: torch.dtype) -> None:
    """Begins to compile what products with this weight may take."""
    if takes_weight(weight):
        for variant in _variants(weight, dtype):
            _kernel(variant)


def has_product(x_MI: Tensor, weight: GroupedWeight) -> bool:
    """Whether `multiply` takes it now. The first call waits until the kernels are compiled. While Triton's kernels are
    met ahead, they have to be: False."""
    if not len(x_MI) or is_ahead() or not takes_weight(weight):
        return False
    return all([_kernel(variant).is_there for variant in _variants(weight, x_MI.dtype)])


def multiply(x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None, plan: Plan | None = None) -> Tensor:
    """x W^T + b of a `settled` weight, (M, O) of x's dtype."""
    x_MI = aligned(x_MI)
    num_rows, num_outputs = len(x_MI), weight.scales.shape[1]
    num_runs = num_inputs_of(weight) // RUN
    plan = plan or _plan(num_rows, num_outputs, num_runs, torch.cuda.get_device_properties().multi_processor_count)
    kernel = _kernel(_variant(weight, x_MI.dtype, plan.groups, plan.rows))
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    parts = None
    if plan.splits > 1:
        parts = torch.empty(plan.num_items * plan.groups * _PIECE_ROWS * plan.rows, dtype=torch.float32,
                            device=x_MI.device)
    work = _Work(num_rows, num_outputs, num_runs, max(1, num_runs // len(weight.scales)), plan.splits, plan.row_tiles,
                 plan.num_items, int(bias_O is not None and bias_O.dtype == torch.float32), weight.scales.data_ptr(),
                 None if weight.zeros is None else weight.zeros.data_ptr(),
                 None if bias_O is None else bias_O.data_ptr(), out_MO.data_ptr(),
                 None if parts is None else parts.data_ptr(),
                 counters(x_MI.device, plan.num_items // plan.splits if plan.splits > 1 else 0).data_ptr())
    kernel.launch(plan.programs, x_MI, weight.values, work)
    return out_MO


class Plan(NamedTuple):
    """Outputs of a program are 64 times `groups`; the runs of a tile are cut into `splits`."""

    groups: int
    rows: int
    splits: int
    row_tiles: int
    num_items: int
    programs: int


@functools.lru_cache(maxsize=4096)
def _plan(num_rows: int, num_outputs: int, num_runs: int, num_processors: int) -> Plan:
    """The one whose longest program is done first."""
    row_tiles = -(-num_rows // _ROWS[-1])
    rows = next(rows for rows in _ROWS if rows * row_tiles >= num_rows)
    costs = []
    for groups in _GROUPS:
        tiles = -(-num_outputs // (groups * _PIECE_ROWS)) * row_tiles
        for splits in range(1, _MOST_SPLITS + 1):
            if splits > 1 and (num_runs < splits * _LEAST_RUNS or tiles > min(MOST_TILES, 2 * num_processors)):
                break
            of_run = max(groups * rows * _PRODUCT, rows * _ROW + groups * _OUTPUTS)
            of_item = -(-num_runs // splits) * of_run + _ITEM + (groups * rows * _SUM if splits > 1 else 0)
            items = tiles * splits
            plan = Plan(groups, rows, splits, row_tiles, items, min(items, num_processors))
            costs.append((-(-items // num_processors) * of_item, plan))
    return min(costs)[1]


def _variant(weight: GroupedWeight, dtype: torch.dtype, groups: int, rows: int) -> Variant:
    return Variant(dtype == torch.bfloat16, 4 if weight.values.dtype == torch.uint8 else 8, weight.zeros is not None,
                   len(weight.scales) * RUN == 2 * num_inputs_of(weight), groups, rows)


def _variants(weight: GroupedWeight, dtype: torch.dtype) -> list[Variant]:
    return [_variant(weight, dtype, groups, rows) for groups in _GROUPS for rows in _ROWS]


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_runs", "runs_of_group", "splits",
                                                    "row_tiles", "num_items", "is_wide_bias")),
                *((name, ctypes.c_void_p) for name in ("scales", "zeros", "bias", "out", "parts", "counts")))


class _Kernel(KernelAhead):
    """For one variant."""

    def __init__(self, variant: Variant):
        self._variant = variant
        stages = (_SHARED_BYTES - 1024 - 16) // variant.stage_bytes
        shared_bytes = stages * variant.stage_bytes + 16 + 1024
        constants = {"IS_BFLOAT16": variant.is_bfloat16, "BITS": variant.bits, "HAS_ZEROS": variant.has_zeros,
                     "IN_HALVES": variant.in_halves, "GROUPS": variant.groups, "ROWS": variant.rows, "STAGES": stages}
        source = CompiledSource(sources("matmul/hopper_grouped_wgmma.cu"),
                                {name: int(value) for name, value in constants.items()}, ARCHITECTURE)
        super().__init__(source, "multiply_rows", shared_bytes, instead="products of some rows: triton and the library")

    def launch(self, programs: int, x_MI: Tensor, values: Tensor, work: _Work) -> None:
        maps = (tensor_map(x_MI, (self._variant.rows, RUN // 2)),
                tensor_map(values.view(-1, values.shape[3]), (_PIECE_ROWS, values.shape[3])))
        is_dependent = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self.loaded.launch(programs, 128 * self._variant.groups + 32, [*maps, work], is_dependent=is_dependent)


@functools.cache
def _kernel(variant: Variant) -> _Kernel:
    return _Kernel(variant)
