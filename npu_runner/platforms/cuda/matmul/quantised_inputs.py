"""Inputs of quantised products: rows in FP8 (e4m3) or int8, with one scale a row or one for each group of 128 columns.

A scale is the largest magnitude / 448 (FP8) or / 127 (int8), in float32. A value is its input / scale, to the nearest,
ties to even. Of zeros alone the scale is 0. Knows nothing of models.

M rows, I input features, D row width, G groups of a row.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.quantised import FP8_BLOCK, FP8_MAX, INT8_MAX

GROUP = FP8_BLOCK
FP8 = torch.float8_e4m3fn
_LARGEST = {FP8: FP8_MAX, torch.int8: INT8_MAX}
# Scales below it, and what they divide, are enlarged by its reciprocal: remainders would have no float32.
_SMALL = tl.constexpr(2.0**-60)
# The library's product takes groups of rows in multiples of this; values and scales have room for as many.
_ROWS_OF_ROOM = 16


def quantise_rows(x_MI: Tensor, dtype: torch.dtype, *, in_groups: bool = False) -> tuple[Tensor, Tensor]:
    """(x in `dtype`, scales float32): scales are (M,), or (M, G) with stride 1 along M; I is a multiple of 128 then."""
    num_rows, width = x_MI.shape
    assert not in_groups or width % GROUP == 0, f"{width} columns are no multiple of {GROUP}"
    quantised_MI = _values(num_rows, width, dtype, x_MI.device)
    scales_M = _scales(num_rows, width, in_groups, x_MI.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _quantise[(num_rows,)](
            x_MI, quantised_MI, scales_M, _stride(x_MI), scales_M.stride(-1), width, LARGEST=_LARGEST[dtype],
            IN_GROUPS=in_groups, IS_INT8=dtype == torch.int8, BLOCK=block, num_warps=_warps(block), **launch_settings())
    return quantised_MI, scales_M


def silu_and_mul_quantised(gate_up_M2I: Tensor, dtype: torch.dtype, *,
                           in_groups: bool = False) -> tuple[Tensor, Tensor]:
    """`quantise_rows` of silu(gate) * up; both factors and their product are rounded to the inputs' dtype before."""
    num_rows, width = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    quantised_MI = _values(num_rows, width, dtype, gate_up_M2I.device)
    scales_M = _scales(num_rows, width, in_groups, gate_up_M2I.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _silu_and_mul_quantised[(num_rows,)](
            gate_up_M2I, quantised_MI, scales_M, _stride(gate_up_M2I), scales_M.stride(-1), width,
            LARGEST=_LARGEST[dtype], IN_GROUPS=in_groups, IS_INT8=dtype == torch.int8, BLOCK=block,
            **_room(block), **launch_settings())
    return quantised_MI, scales_M


def add_rms_norm_quantised(x_MD: Tensor, residual_MD: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype, *,
                           in_groups: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """`quantise_rows` of the norm of x + residual (`Ops.add_rms_norm`), and that sum."""
    num_rows, width = x_MD.shape
    total_MD = torch.empty((num_rows, width), dtype=x_MD.dtype, device=x_MD.device)
    quantised_MD = _values(num_rows, width, dtype, x_MD.device)
    scales_M = _scales(num_rows, width, in_groups, x_MD.device)
    if num_rows:
        block = triton.next_power_of_2(width)
        _add_rms_norm_quantised[(num_rows,)](
            x_MD, residual_MD, weight_D, total_MD, quantised_MD, scales_M, _stride(x_MD), _stride(residual_MD),
            scales_M.stride(-1), width, eps, LARGEST=_LARGEST[dtype], IN_GROUPS=in_groups, IS_INT8=dtype == torch.int8,
            BLOCK=block, num_warps=_warps(block), **launch_settings())
    return quantised_MD, scales_M, total_MD


def _values(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    room = -(-num_rows // _ROWS_OF_ROOM) * _ROWS_OF_ROOM
    return torch.empty((room, width), dtype=dtype, device=device)[:num_rows]


def _scales(num_rows: int, width: int, in_groups: bool, device: torch.device) -> Tensor:
    if in_groups:
        room = -(-num_rows // _ROWS_OF_ROOM) * _ROWS_OF_ROOM
        return torch.empty((width // GROUP, room), dtype=torch.float32, device=device).t()[:num_rows]
    return torch.empty((num_rows,), dtype=torch.float32, device=device)


def _stride(rows: Tensor) -> int:
    """Between rows. Kernels know whether 16 divides it, and read pieces of 16 bytes then; of one row it may be any."""
    return rows.stride(0) if len(rows) > 1 else rows.shape[1]


def _warps(block: int) -> int:
    return min(max(block // 512, 1), 16)


def _room(block: int) -> dict[str, int]:
    """Warps, and registers of a thread: a multiprocessor has room for two rows at once where they are not too long."""
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
    """gate / (1 + exp(-gate)): a division that rounds to the nearest would take most of the kernel's time."""
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
    # Adding 1.5 * 2^23 rounds to an integer, ties to even. What a division took beyond 448 becomes 448.
    result = ((result + 12582912.0) - 12582912.0).to(tl.int8) if IS_INT8 else result.to(tl.float8e4nv)
    tl.store(quantised + row * width + columns, result, mask=columns < width)


@triton.jit
def _reciprocal(scale):
    """1 / scale, to the nearest; of 0 it is 1."""
    return tl.div_rn(1.0 + tl.zeros_like(scale), tl.where(scale > 0.0, scale, 1.0))


@triton.jit
def _divide(values, scale, reciprocal):
    """values / scale, to the nearest, by the reciprocal and what the remainder adds to it (Markstein 1990)."""
    quotient = values * reciprocal
    return tl.fma(tl.fma(-quotient, scale, values), reciprocal, quotient)
