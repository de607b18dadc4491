"""Products of a few rows with weights of 4 and 8 bit integers, in CUDA C++ for Hopper (hopper_grouped_small_m.cu),
by NVRTC. Knows nothing of models.

M rows, I input features, O output features, G groups of inputs. A run is 128 inputs, a pair of tiles 32 outputs.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from npu_runner.platforms.cuda import dependent_launch
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.compiled_source import CompiledSource, KernelAhead
from npu_runner.platforms.grouped import GroupedWeight

_CAPABILITY, ARCHITECTURE = (9, 0), "sm_90a"
MOST_ROWS = 16
RUN = 128
_PAIR, _PIECE = 32, 64
_SHARED_BYTES = 227 * 1024
# Two programs of products never share a multiprocessor: one of the next would take the place of one of this.
_LEAST_SHARED_BYTES = _SHARED_BYTES // 2 + 1024
# Warps that multiply; one more fills their rings. Stages of a ring: fewer where shared memory lacks room for three.
_WARPS, _STAGES, _STAGE_BYTES = 12, (3, 2), 2048
_REGISTERS = {1: 112, 2: 128}  # of a thread, by blocks of 8 rows
_CLUSTERS = (1, 2, 4, 8)


class Variant(NamedTuple):
    """Constants of the source."""

    is_bfloat16: bool
    bits: int
    has_zeros: bool
    in_halves: bool
    blocks: int


def variant_of(num_rows: int, weight: GroupedWeight, dtype: torch.dtype) -> Variant:
    """That multiplies so many rows of `dtype`."""
    num_runs = num_inputs_of(weight) // RUN
    return Variant(dtype == torch.bfloat16, 4 if weight.values.dtype == torch.uint8 else 8, weight.zeros is not None,
                   len(weight.scales) == 2 * num_runs, 1 if num_rows <= 8 else 2)


def prepare(weight: GroupedWeight, dtype: torch.dtype) -> None:
    """Begins to compile what products with this weight take."""
    if takes_weight(weight):
        for num_rows in (1, MOST_ROWS):
            _kernel(variant_of(num_rows, weight, dtype))


def takes_weight(weight: GroupedWeight) -> bool:
    """Whether it has a product here: groups are 64 inputs, or a multiple of 128; outputs are a multiple of 8."""
    num_inputs = num_inputs_of(weight)
    group_size = num_inputs // len(weight.scales)
    return (_is_hopper() and num_inputs % RUN == 0 and (group_size == RUN // 2 or group_size % RUN == 0)
            and weight.scales.shape[1] % 8 == 0 and weight.values.shape[3] == _PIECE)


def has_product(x_MI: Tensor, weight: GroupedWeight) -> bool:
    """Whether `multiply` takes it now, x and scales in shared memory. The first call waits until kernels are compiled.
    While Triton's kernels are met ahead, they have to be: False."""
    if not 1 <= len(x_MI) <= MOST_ROWS or is_ahead() or not takes_weight(weight):
        return False
    kernels = [_kernel(variant_of(num_rows, weight, x_MI.dtype)) for num_rows in (1, MOST_ROWS)]
    # Both are loaded at once: none is while a graph is captured.
    return all([kernel.is_there for kernel in kernels]) and kernels[len(x_MI) > 8].plan(len(x_MI), weight) is not None


def multiply(x_MI: Tensor, weight: GroupedWeight, bias_O: Tensor | None) -> Tensor:
    """x W^T + b of a `settled` weight, (M, O) of x's dtype."""
    x_MI = aligned(x_MI)
    num_rows, num_outputs = len(x_MI), weight.scales.shape[1]
    kernel = _kernel(variant_of(num_rows, weight, x_MI.dtype))
    out_MO = torch.empty((num_rows, num_outputs), dtype=x_MI.dtype, device=x_MI.device)
    plan, num_runs = kernel.plan(num_rows, weight), num_inputs_of(weight) // RUN
    assert plan is not None, "callers look whether there is a product"
    work = _Work(num_rows, num_outputs, num_runs, max(1, num_runs // len(weight.scales)), x_MI.stride(0),
                 *divmod(-(-num_outputs // _PAIR), plan.clusters), *divmod(num_runs, plan.programs), plan.parts,
                 plan.stages, int(bias_O is not None and bias_O.dtype == torch.float32),
                 x_MI.data_ptr(), weight.values.data_ptr(), weight.scales.data_ptr(),
                 None if weight.zeros is None else weight.zeros.data_ptr(),
                 None if bias_O is None else bias_O.data_ptr(), out_MO.data_ptr())
    kernel.launch(plan, work)
    return out_MO


def aligned(x_MI: Tensor) -> Tensor:
    """Rows of 16 bits that begin at multiples of 16 bytes."""
    if x_MI.stride(0) < x_MI.shape[1] or x_MI.stride(0) % 8 or x_MI.stride(1) != 1 or x_MI.data_ptr() % 16:
        return x_MI.clone(memory_format=torch.contiguous_format)
    return x_MI


def sources(name: str) -> list[str]:
    """What a kernel of these weights consists of."""
    return ["hopper.cu", "matmul/hopper_dequantize.cu", name]


def num_inputs_of(weight: GroupedWeight) -> int:
    width = weight.values.shape[1] * weight.values.shape[3]
    return 2 * width if weight.values.dtype == torch.uint8 else width


@functools.cache
def _is_hopper() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == _CAPABILITY


class _Work(ctypes.Structure):
    _fields_ = (*((name, ctypes.c_int) for name in ("num_rows", "num_outputs", "num_runs", "runs_of_group", "x_stride",
                                                    "pairs", "more_pairs", "runs", "more_runs", "parts", "stages",
                                                    "is_wide_bias")),
                *((name, ctypes.c_void_p) for name in ("x", "values", "scales", "zeros", "bias", "out")))


class _Plan(NamedTuple):
    """Programs of a cluster share the runs. Pairs and runs: the most that a program has; parts of its runs."""

    programs: int
    clusters: int
    pairs: int
    runs: int
    parts: int
    stages: int
    shared_bytes: int


def _cost_of(plan: _Plan, num_rows: int) -> float:
    """In pieces of the weight that a program brings: those of its slowest warp times warps, x, and what programs of a
    cluster wait for each other."""
    pieces = _WARPS * -(-plan.pairs * plan.parts // _WARPS) * -(-plan.runs // plan.parts)
    return pieces + num_rows * plan.runs / 8 + 12 * math.log2(plan.programs)


class _Kernel(KernelAhead):
    """For one variant."""

    def __init__(self, variant: Variant):
        self._variant = variant
        constants = {**variant._asdict(), "warps": _WARPS, "registers": _REGISTERS[variant.blocks]}
        source = CompiledSource(sources("matmul/hopper_grouped_small_m.cu"),
                                {name.upper(): int(value) for name, value in constants.items()}, ARCHITECTURE)
        super().__init__(source, "multiply_few_rows", _SHARED_BYTES, instead="products of a few rows: triton")
        self._plans: dict[tuple[int, int, int, int], _Plan | None] = {}

    def plan(self, num_rows: int, weight: GroupedWeight) -> _Plan | None:
        """None: shared memory does not hold what a program needs."""
        shape = (num_rows, num_inputs_of(weight) // RUN, *weight.scales.shape)
        if shape not in self._plans:
            plans = [self._plan_of(programs, parts, stages, *shape)
                     for programs in _CLUSTERS if self._most_clusters(programs)
                     for parts in range(1, min(_WARPS, shape[1] // programs) + 1) for stages in _STAGES]
            self._plans[shape] = min((plan for plan in plans if plan.shared_bytes <= _SHARED_BYTES), default=None,
                                     key=lambda plan: (-plan.stages, _cost_of(plan, num_rows)))
        return self._plans[shape]

    def _plan_of(self, programs: int, parts: int, stages: int, num_rows: int, num_runs: int, num_groups: int,
                 num_outputs: int) -> _Plan:
        """Programs share pairs and runs evenly."""
        num_pairs = -(-num_outputs // _PAIR)
        clusters = min(num_pairs, self._most_clusters(programs))
        pairs, runs = -(-num_pairs // clusters), -(-num_runs // programs)
        variant = self._variant
        scales = min(num_groups, -(-num_groups // programs) + 1) * pairs * 2 * _PAIR * (2 if variant.has_zeros else 1)
        sums = -(-2 * pairs // programs) * programs * parts * variant.blocks * 512
        x = runs * num_rows * 2 * RUN
        shared_bytes = _WARPS * stages * (_STAGE_BYTES + 8) + 16 + sums + x + scales
        return _Plan(programs, clusters, pairs, runs, parts, stages, max(_LEAST_SHARED_BYTES, shared_bytes))

    def _most_clusters(self, programs: int) -> int:
        """How many run at once; a multiprocessor has one program."""
        if programs == 1:
            return torch.cuda.get_device_properties().multi_processor_count
        return self.loaded.most_clusters(32 * (_WARPS + 1), programs)

    def launch(self, plan: _Plan, work: _Work) -> None:
        is_dependent = bool(dependent_launch.launch_settings()["IS_DEPENDENT"])
        self.loaded.launch(plan.clusters * plan.programs, 32 * (_WARPS + 1), [work], cluster=plan.programs,
                            is_dependent=is_dependent, shared_bytes=plan.shared_bytes)


@functools.cache
def _kernel(variant: Variant) -> _Kernel:
    return _Kernel(variant)
