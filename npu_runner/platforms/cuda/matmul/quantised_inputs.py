"""Quantises the inputs of matmuls: rows in FP8 (e4m3) or int8, with one scale per row or per group of 128 columns.

A scale is the largest magnitude / 448 (FP8) or / 127 (int8), in float32. A value is its input / scale, to the nearest,
ties to even. Zeros alone have the scale 0. Knows nothing of models.

M rows, K input features, D row width, G groups of a row.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.quantised import FP8_BLOCK, FP8_MAX, INT8_MAX

GROUP = FP8_BLOCK
FP8 = torch.float8_e4m3fn
_LARGEST = {FP8: FP8_MAX, torch.int8: INT8_MAX}
# Smaller scales, and their dividends, are multiplied by its reciprocal: float32 could not hold the remainders.
_SMALL = tl.constexpr(2.0**-60)
# The library's GEMM with scales of groups needs a multiple of it as rows.
_ROWS_OF_ROOM = 16


def quantise_rows(x_MK: Tensor, dtype: torch.dtype, *, in_groups: bool = False) -> tuple[Tensor, Tensor]:
    """(x in `dtype`, scales float32). Scales are (M,), or (M, G) with stride 1 along M; K is a multiple of 128 then."""
    M, K = x_MK.shape
    assert not in_groups or K % GROUP == 0, f"{K} columns are no multiple of {GROUP}"
    quantised_MK, scales, constants = _make_outputs(M, K, dtype, in_groups, x_MK.device)
    if M:
        _quantise[(M,)](x_MK, quantised_MK, scales, _stride(x_MK), scales.stride(-1), K, **constants,
                        num_warps=_warps(constants["BLOCK"]), **launch_settings())
    return quantised_MK, scales


def silu_and_mul_quantised(gate_up_M2K: Tensor, dtype: torch.dtype, *,
                           in_groups: bool = False) -> tuple[Tensor, Tensor]:
    """`quantise_rows` of silu(gate) * up. Both factors and the result are rounded to the inputs' dtype first."""
    M, K = gate_up_M2K.shape[0], gate_up_M2K.shape[1] // 2
    quantised_MK, scales, constants = _make_outputs(M, K, dtype, in_groups, gate_up_M2K.device)
    if M:
        _silu_and_mul_quantised[(M,)](gate_up_M2K, quantised_MK, scales, _stride(gate_up_M2K), scales.stride(-1), K,
                                      **constants, **_room(constants["BLOCK"]), **launch_settings())
    return quantised_MK, scales


def add_rms_norm_quantised(x_MD: Tensor, residual_MD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, *,
                           in_groups: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`quantise_rows` of the norm of x + residual (`Ops.add_rms_norm`), and that sum."""
    M, D = x_MD.shape
    total_MD = torch.empty((M, D), dtype=x_MD.dtype, device=x_MD.device)
    quantised_MD, scales, constants = _make_outputs(M, D, dtype, in_groups, x_MD.device)
    if M:
        _add_rms_norm_quantised[(M,)](
            x_MD, residual_MD, weight_D, total_MD, quantised_MD, scales, _stride(x_MD), _stride(residual_MD),
            scales.stride(-1), D, eps, **constants, num_warps=_warps(constants["BLOCK"]), **launch_settings())
    return quantised_MD, scales, total_MD


def _make_outputs(M: int, width: int, dtype: torch.dtype, in_groups: bool,
                  device: torch.device) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Values and scales, not filled, with room for a multiple of 16 rows, and the constants of a kernel."""
    room = -(-M // _ROWS_OF_ROOM) * _ROWS_OF_ROOM
    values = torch.empty((room, width), dtype=dtype, device=device)[:M]
    scales = torch.empty((width // GROUP, room), dtype=torch.float32, device=device).t()[:M] if in_groups else (
        torch.empty((M,), dtype=torch.float32, device=device))
    return values, scales, {"LARGEST": _LARGEST[dtype], "IN_GROUPS": in_groups, "IS_INT8": dtype == torch.int8,
                            "BLOCK": triton.next_power_of_2(width)}


def _stride(rows: Tensor) -> int:
    """The stride between rows, of which kernels specialise multiples of 16. That of one row alone has no meaning."""
    return rows.stride(0) if len(rows) > 1 else rows.shape[1]


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _room(block: int) -> dict[str, int]:
    """Warps, and registers of a thread, so that a multiprocessor holds two rows at once if they are short enough."""
    return {"num_warps": 32} if block > 16_384 else {"num_warps": _warps(block), "maxnreg": 64}


@triton.jit(do_not_specialize=["stride_s"])
def _quantise(x, quantised, scales, stride_x, stride_s, width, LARGEST: tl.constexpr, IN_GROUPS: tl.constexpr,
              IS_INT8: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride_x + columns, mask=columns < width, other=0.0).to(tl.float32)
    _store(values, quantised, scales, row, stride_s, width, LARGEST, IN_GROUPS, IS_INT8, BLOCK)


@triton.jit(do_not_specialize=["stride_s"])
def _silu_and_mul_quantised(gate_up, quantised, scales, stride, stride_s, width, LARGEST: tl.constexpr,
                            IN_GROUPS: tl.constexpr, IS_INT8: tl.constexpr, BLOCK: tl.constexpr,
                            IS_DEPENDENT: tl.constexpr):
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0)
    activated = _silu(gate).to(up.dtype) * up
    _store(activated.to(tl.float32), quantised, scales, row, stride_s, width, LARGEST, IN_GROUPS, IS_INT8, BLOCK)


@triton.jit
def _silu(gate):
    """gate / (1 + exp(-gate)): an IEEE division would take most of the kernel's time."""
    share = tl.inline_asm_elementwise(
        "{ .reg .f32 power; mul.f32 power, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 power, power; add.f32 power, power, "
        "0f3F800000; rcp.approx.ftz.f32 $0, power; }", "=f,f", [gate], dtype=tl.float32, is_pure=True, pack=1)
    return gate * share


@triton.jit(do_not_specialize=["stride_s"])
def _add_rms_norm_quantised(x, residual, weight, total, quantised, scales, stride_x, stride_r, stride_s, width, eps,
                            LARGEST: tl.constexpr, IN_GROUPS: tl.constexpr, IS_INT8: tl.constexpr,
                            BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    gain = tl.load(weight + columns, mask=mask, other=0.0)  # no kernel writes it
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    first = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(residual + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
    summed = (first + second).to(total.dtype.element_ty)
    tl.store(total + row * width + columns, summed, mask=mask)
    values = summed.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / width + eps)
    rounded = (normed.to(gain.dtype) * gain).to(total.dtype.element_ty).to(tl.float32)
    _store(rounded, quantised, scales, row, stride_s, width, LARGEST, IN_GROUPS, IS_INT8, BLOCK)


@triton.jit
def _store(values, quantised, scales, row, stride_s, width, LARGEST: tl.constexpr, IN_GROUPS: tl.constexpr,
           IS_INT8: tl.constexpr, BLOCK: tl.constexpr):
    """One row of float32 values in the quantised dtype, with its scales."""
    columns = tl.arange(0, BLOCK)
    if IN_GROUPS:
        WIDTH: tl.constexpr = 128
        GROUPS: tl.constexpr = BLOCK // WIDTH
        values = tl.reshape(values, (GROUPS, WIDTH))
        scale = tl.div_rn(tl.max(tl.abs(values), 1), tl.full((GROUPS,), LARGEST, tl.float32))
        groups = tl.arange(0, GROUPS)
        tl.store(scales + groups.to(tl.int64) * stride_s + row, scale, mask=groups < tl.cdiv(width, WIDTH))
        enlarged = tl.where(scale < _SMALL, 1.0 / _SMALL, 1.0)
        scale *= enlarged
        values *= tl.broadcast_to(enlarged[:, None], (GROUPS, WIDTH))
        reciprocal = tl.broadcast_to(_reciprocal(scale)[:, None], (GROUPS, WIDTH))
        result = tl.reshape(_divide(values, tl.broadcast_to(scale[:, None], (GROUPS, WIDTH)), reciprocal), (BLOCK,))
    else:
        scale = tl.div_rn(tl.max(tl.abs(values), 0), LARGEST)
        tl.store(scales + row, scale)
        if scale < _SMALL:
            values *= 1.0 / _SMALL
            scale *= 1.0 / _SMALL
        result = _divide(values, scale, _reciprocal(scale))
    # Adding 1.5 * 2^23 rounds to an integer, ties to even. The conversion to FP8 saturates at 448.
    result = ((result + 12582912.0) - 12582912.0).to(tl.int8) if IS_INT8 else result.to(tl.float8e4nv)
    tl.store(quantised + row * width + columns, result, mask=columns < width)


@triton.jit
def _reciprocal(scale):
    """1 / scale, to the nearest; 1 for a scale of 0."""
    return tl.div_rn(1.0 + tl.zeros_like(scale), tl.where(scale > 0.0, scale, 1.0))


@triton.jit
def _divide(values, scale, reciprocal):
    """values / scale, to the nearest, by the reciprocal and a correction with the remainder (Markstein 1990)."""
    quotient = values * reciprocal
    return tl.fma(tl.fma(-quotient, scale, values), reciprocal, quotient)
