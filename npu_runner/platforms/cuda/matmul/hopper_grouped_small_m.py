"""Matmuls of 1 to 16 rows with a weight of 4 or 8 bit integers on Hopper, in CUDA C++ (hopper_grouped_small_m.cu).
Knows no models.

M rows, N output features, K input features, G groups of inputs. A run is 128 inputs, a pair of tiles 32 outputs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import gpu
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead
from npu_runner.platforms.cuda.dependent_launch import is_dependent
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.grouped import GroupedWeight

MOST_M = 16
RUN = 128
_PAIR, _PIECE = 32, 64
_SHARED_BYTES = 227 * 1024
# Two programs never share a multiprocessor: one of the next matmul would occupy the place of one of this.
_LEAST_SHARED_BYTES = _SHARED_BYTES // 2 + 1024
# Warps that multiply; one more fills their rings. Stages of a ring: two where shared memory lacks room for three.
_WARPS, _STAGES, _STAGE_BYTES = 12, (3, 2), 2048
_REGISTERS = {1: 112, 2: 128}  # of a thread, by blocks of 8 rows
_CLUSTERS = (1, 2, 4, 8)


class _Variant(NamedTuple):
    """The constants of the source."""

    is_bfloat16: bool
    bits: int
    has_zeros: bool
    in_halves: bool
    blocks: int


def prepare(matmul: Matmul) -> None:
    if accepts_weight(matmul.weight):
        for M in (1, MOST_M):
            _kernel(_variant(M, matmul))


def accepts_weight(weight: GroupedWeight) -> bool:
    """Groups are 64 inputs, or a multiple of 128, and N is a multiple of 8."""
    K = num_inputs(weight)
    group_size = K // len(weight.scales)
    return (gpu.is_hopper() and K % RUN == 0 and (group_size == RUN // 2 or group_size % RUN == 0)
            and weight.scales.shape[1] % 8 == 0 and weight.values.shape[3] == _PIECE)


def accepts(matmul: Matmul) -> bool:
    """x and scales must fit into shared memory. The first call waits until the kernels are compiled. During
    compile-ahead Triton's kernels must be met: False."""
    M, weight = len(matmul.x_MK), matmul.weight
    if not 1 <= M <= MOST_M or is_ahead() or not accepts_weight(weight):
        return False
    kernels = [_kernel(_variant(each, matmul)) for each in (1, MOST_M)]
    # Both are loaded at once, since none can be loaded while a graph is captured.
    return all([kernel.is_available for kernel in kernels]) and kernels[M > 8].plan(M, weight) is not None


def multiply(matmul: Matmul) -> Tensor:
    x_MK, weight, bias_N = with_aligned_rows(matmul.x_MK), matmul.weight, matmul.bias_N
    M, N = len(x_MK), weight.scales.shape[1]
    kernel = _kernel(_variant(M, matmul))
    out_MN = torch.empty((M, N), dtype=x_MK.dtype, device=x_MK.device)
    plan, num_runs = kernel.plan(M, weight), num_inputs(weight) // RUN
    assert plan is not None, "callers ask `accepts`"
    params = _GroupedSmallMParams(
        M, N, num_runs, max(1, num_runs // len(weight.scales)), x_MK.stride(0),
        *divmod(-(-N // _PAIR), plan.clusters), *divmod(num_runs, plan.programs), plan.splits, plan.stages,
        int(bias_N is not None and bias_N.dtype == torch.float32), x_MK.data_ptr(), weight.values.data_ptr(),
        weight.scales.data_ptr(), None if weight.zeros is None else weight.zeros.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(), out_MN.data_ptr())
    kernel.launch(plan, params)
    return out_MN


def with_aligned_rows(x_MK: Tensor) -> Tensor:
    """Rows of 16 bits that start at multiples of 16 bytes."""
    if x_MK.stride(0) < x_MK.shape[1] or x_MK.stride(0) % 8 or x_MK.stride(1) != 1 or x_MK.data_ptr() % 16:
        return x_MK.clone(memory_format=torch.contiguous_format)
    return x_MK


def num_inputs(weight: GroupedWeight) -> int:
    width = weight.values.shape[1] * weight.values.shape[3]
    return 2 * width if weight.values.dtype == torch.uint8 else width


def _variant(M: int, matmul: Matmul) -> _Variant:
    weight = matmul.weight
    num_runs = num_inputs(weight) // RUN
    return _Variant(matmul.dtype == torch.bfloat16, 4 if weight.values.dtype == torch.uint8 else 8,
                    weight.zeros is not None, len(weight.scales) == 2 * num_runs, 1 if M <= 8 else 2)


class _GroupedSmallMParams(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = (*((name, ctypes.c_int) for name in ("m", "n", "num_runs", "runs_per_group", "stride_x", "pairs",
                                                    "more_pairs", "runs", "more_runs", "splits", "stages",
                                                    "is_wide_bias")),
                *((name, ctypes.c_void_p) for name in ("x", "values", "scales", "zeros", "bias", "out")))


class _ClusterPlan(NamedTuple):
    """The programs of a cluster share the runs. `pairs` and `runs` are the most of a program; warps split its runs."""

    programs: int
    clusters: int
    pairs: int
    runs: int
    splits: int
    stages: int
    shared_bytes: int


def _cost(plan: _ClusterPlan, M: int) -> float:
    """In pieces of the weight that a program loads: those of its slowest warp times warps, x, and the time that the
    programs of a cluster wait for each other."""
    pieces = _WARPS * -(-plan.pairs * plan.splits // _WARPS) * -(-plan.runs // plan.splits)
    return pieces + M * plan.runs / 8 + 12 * math.log2(plan.programs)


class _GroupedSmallMKernel(KernelAhead):
    def __init__(self, variant: _Variant):
        self._variant = variant
        constants = {**variant._asdict(), "warps": _WARPS, "registers": _REGISTERS[variant.blocks]}
        source = CompiledSource(["hopper.cu", "matmul/hopper_dequantize.cu", "matmul/hopper_grouped_small_m.cu"],
                                {name.upper(): int(value) for name, value in constants.items()})
        super().__init__(source, "grouped_small_m_gemm", _SHARED_BYTES,
                         fallback="matmuls of 1 to 16 rows with integers: triton")
        self._plans: dict[tuple[int, int, int, int], _ClusterPlan | None] = {}

    def plan(self, M: int, weight: GroupedWeight) -> _ClusterPlan | None:
        """None where no plan fits into shared memory."""
        shape = (M, num_inputs(weight) // RUN, *weight.scales.shape)
        if shape not in self._plans:
            plans = [self._make_plan(programs, splits, stages, *shape)
                     for programs in _CLUSTERS if self._most_clusters(programs)
                     for splits in range(1, min(_WARPS, shape[1] // programs) + 1) for stages in _STAGES]
            self._plans[shape] = min((plan for plan in plans if plan.shared_bytes <= _SHARED_BYTES), default=None,
                                     key=lambda plan: (-plan.stages, _cost(plan, M)))
        return self._plans[shape]

    def _make_plan(self, programs: int, splits: int, stages: int, M: int, num_runs: int, num_groups: int,
                   N: int) -> _ClusterPlan:
        """Programs share pairs and runs evenly."""
        num_pairs = -(-N // _PAIR)
        clusters = min(num_pairs, self._most_clusters(programs))
        pairs, runs = -(-num_pairs // clusters), -(-num_runs // programs)
        variant = self._variant
        scales = min(num_groups, -(-num_groups // programs) + 1) * pairs * 2 * _PAIR * (2 if variant.has_zeros else 1)
        accumulators = -(-2 * pairs // programs) * programs * splits * variant.blocks * 512
        x = runs * M * 2 * RUN
        shared_bytes = _WARPS * stages * (_STAGE_BYTES + 8) + 16 + accumulators + x + scales
        return _ClusterPlan(programs, clusters, pairs, runs, splits, stages, max(_LEAST_SHARED_BYTES, shared_bytes))

    def _most_clusters(self, programs: int) -> int:
        return self.loaded.most_clusters(32 * (_WARPS + 1), programs)

    def launch(self, plan: _ClusterPlan, params: _GroupedSmallMParams) -> None:
        self.loaded.launch(plan.clusters * plan.programs, 32 * (_WARPS + 1), [params], cluster=plan.programs,
                           is_dependent=is_dependent(), shared_bytes=plan.shared_bytes)


@functools.cache
def _kernel(variant: _Variant) -> _GroupedSmallMKernel:
    return _GroupedSmallMKernel(variant)
