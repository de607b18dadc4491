"""Chooses the kernel of a matmul: the first of its list that accepts the operands. No other file chooses."""

from __future__ import annotations

import torch
from torch import Tensor

from npu_runner.platforms.cuda.compile_ahead import CompileOnce
from npu_runner.platforms.cuda.matmul import (
    grouped,
    hopper_fp8,
    hopper_grouped_small_m,
    hopper_grouped_wgmma,
    hopper_small_m,
    library,
    quantised,
    small_m,
    small_n,
)
from npu_runner.platforms.cuda.matmul.operands import Matmul, MatmulKernel
from npu_runner.platforms.cuda.matmul.quantised_inputs import quantise_rows
from npu_runner.platforms.grouped import GroupedWeight

# By the form of the weight: 16 or 32 bits; int8 and FP8; integers with scales of groups.
PLAIN: tuple[MatmulKernel, ...] = (small_n, hopper_small_m, small_m, library)
QUANTISED: tuple[MatmulKernel, ...] = (hopper_small_m, hopper_fp8, quantised, library)
GROUPED: tuple[MatmulKernel, ...] = (hopper_grouped_small_m, hopper_grouped_wgmma, grouped, library)
# The values of M whose kernels are compiled when a weight's shape is first used.
_COMPILED_M = {QUANTISED: (1, 2, 32, quantised.MOST_M), GROUPED: (1, 2, 32, 64, grouped.MOST_M_AT_ONCE)}


def multiply(matmul: Matmul, compile_once: CompileOnce) -> Tensor:
    """(M, N), for any M. The first matmul with a weight of this shape compiles what others with it need."""
    if len(matmul.x_MK):
        parts = matmul.weight if isinstance(matmul.weight, GroupedWeight) else (matmul.weight, matmul.scale)
        shapes = (None if part is None else part.shape for part in parts)
        compile_once(("matmul", *shapes, parts[0].dtype, matmul.dtype, matmul.bias_N is None), lambda: _prepare(matmul))
    return choose(matmul).multiply(matmul)


def choose(matmul: Matmul) -> MatmulKernel:
    return next(kernel for kernel in _kernels_for(matmul) if kernel.accepts(matmul))


def _kernels_for(matmul: Matmul) -> tuple[MatmulKernel, ...]:
    if isinstance(matmul.weight, GroupedWeight):
        return GROUPED
    return PLAIN if matmul.scale is None else QUANTISED


def _prepare(matmul: Matmul) -> None:
    kernels = _kernels_for(matmul)
    for kernel in kernels:
        kernel.prepare(matmul)
    for num_rows in _COMPILED_M.get(kernels, ()):
        x_MK = torch.zeros((num_rows, matmul.x_MK.shape[1]), dtype=matmul.dtype, device=matmul.x_MK.device)
        zeros = matmul._replace(x_MK=x_MK)
        if kernels is QUANTISED:
            values_MK, scales = quantise_rows(x_MK, matmul.weight.dtype, in_groups=matmul.in_blocks)
            zeros = matmul._replace(x_MK=values_MK, x_scale=scales)
        choose(zeros).multiply(zeros)
