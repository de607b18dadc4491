"""The decoder's operators: norms, rotary embedding and activations as Triton kernels here, the others in the folders.

Knows nothing of models.

T tokens, N heads, H head dim, D row width, I MLP width. Each program handles one row, or a few heads of one token, in
registers.
"""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from npu_runner.platforms.cuda.compile_ahead import CompileOnce
from npu_runner.platforms.cuda.dependent_launch import after_earlier_kernels, launch_settings
from npu_runner.platforms.cuda.matmul.kernels import multiply
from npu_runner.platforms.cuda.matmul.operands import Matmul
from npu_runner.platforms.cuda.moe import experts
from npu_runner.platforms.cuda.sampling import sample, token_masks
from npu_runner.platforms.ops import HeldExperts, MaskedSampler, Ops

# Heads of one token that one program rotates; they share its cos and sin.
_ROTARY_HEADS = 8


class TritonOps(Ops):
    def __init__(self) -> None:
        self._compile_once = CompileOnce()

    def linear(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling():  # inductor chooses among kernels of its own
            return F.linear(x_TD, weight_OD, bias_O)
        return multiply(Matmul(x_TD, weight_OD, bias_O, x_TD.dtype), self._compile_once)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TND = x if x.dim() == 3 else x[:, None]
        out_TND = torch.empty(x_TND.shape, dtype=x.dtype, device=x.device)
        num_tokens, num_heads, width = x_TND.shape
        _rms_norm[(num_tokens * num_heads,)](
            x_TND, weight, out_TND, x_TND.stride(0), x_TND.stride(1), num_heads, width, eps,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width), **launch_settings(),
        )
        return out_TND if x.dim() == 3 else out_TND[:, 0]

    def add_rms_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out_TD, total_TD = torch.empty_like(x_TD), torch.empty_like(x_TD)
        width = x_TD.shape[-1]
        _add_rms_norm[(x_TD.shape[0],)](
            x_TD, residual_TD, weight_D, out_TD, total_TD, x_TD.stride(0), residual_TD.stride(0), width, eps,
            BLOCK=triton.next_power_of_2(width), num_warps=_warps(width), **launch_settings(),
        )
        return out_TD, total_TD

    def linear_gelu(self, x_TD: Tensor, weight_OD: Tensor, bias_O: Tensor | None, approximate: str) -> Tensor:
        """In 16 bits cuBLAS has tanh in the epilogue of the GEMM, and rounds once."""
        is_fused = x_TD.dtype != torch.float32 and approximate == "tanh" and bias_O is not None
        if not is_fused or torch.compiler.is_compiling() or x_TD.dim() != 2 or not x_TD.is_cuda:
            return super().linear_gelu(x_TD, weight_OD, bias_O, approximate)
        return torch._addmm_activation(bias_O, x_TD, weight_OD.t(), use_gelu=True)

    def layer_norm(self, x: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
        return _layer_norm_rows(x, None, weight_D, bias_D, eps)[0]

    def add_layer_norm(self, x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, bias_D: Tensor,
                       eps: float) -> tuple[Tensor, Tensor]:
        return _layer_norm_rows(x_TD, residual_TD, weight_D, bias_D, eps)

    def gated_rms_norm(self, x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_TND, gate_TND = (part if part.dim() == 3 else part[:, None] for part in (x, gate))
        # One token alone has no stride between tokens, which is a variant of its own.
        if len(x_TND):
            self._compile_once(("gated norm", x_TND.shape[1:], x.dtype),
                               lambda: _launch_rows(_gated_rms_norm, x_TND[:1], gate_TND[:1], weight, eps))
        out_TND = _launch_rows(_gated_rms_norm, x_TND, gate_TND, weight, eps)
        return out_TND if x.dim() == 3 else out_TND[:, 0]

    def times_sigmoid(self, x_TNH: Tensor, gate_TNH: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or x_TNH.stride(2) != 1 or gate_TNH.stride(2) != 1:
            return super().times_sigmoid(x_TNH, gate_TNH)
        if len(x_TNH):
            self._compile_once(("sigmoid", x_TNH.shape[1:], x_TNH.dtype),
                               lambda: _launch_rows(_times_sigmoid, x_TNH[:1], gate_TNH[:1]))
        return _launch_rows(_times_sigmoid, x_TNH, gate_TNH)

    def rotary(self, q_TNH: Tensor, k_TKH: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> tuple[Tensor, Tensor]:
        num_tokens, num_q_heads, _ = q_TNH.shape
        num_k_heads, half = k_TKH.shape[1], cos_TR.shape[1] // 2
        num_programs = triton.cdiv(num_q_heads, _ROTARY_HEADS) + triton.cdiv(num_k_heads, _ROTARY_HEADS)
        _rotary[(num_tokens, num_programs)](
            q_TNH, k_TKH, cos_TR, sin_TR, q_TNH.stride(0), k_TKH.stride(0), q_TNH.stride(1), k_TKH.stride(1),
            cos_TR.stride(0), num_q_heads, num_k_heads, half, HEADS=_ROTARY_HEADS,
            BLOCK=triton.next_power_of_2(half), num_warps=1,
        )
        return q_TNH, k_TKH

    def rotary_in_float32(self, qk_T2NH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(qk_T2NH[:, 0], qk_T2NH[:, 1], cos_TH, sin_TH)  # it computes in float32 anyway

    def silu_and_mul(self, gate_up_T2I: Tensor) -> Tensor:
        num_tokens, double = gate_up_T2I.shape
        out_TI = gate_up_T2I.new_empty(num_tokens, double // 2)
        block = 1024
        _silu_and_mul[(num_tokens, triton.cdiv(double // 2, block))](
            gate_up_T2I, out_TI, gate_up_T2I.stride(0), double // 2, BLOCK=block, num_warps=4,
            **launch_settings(),
        )
        return out_TI

    def add_gated(self, x_TD: Tensor, y_TD: Tensor, gate_T1: Tensor) -> Tensor:
        out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
        num_tokens, width = x_TD.shape
        block = 1024
        _add_gated[(num_tokens, triton.cdiv(width, block))](
            x_TD, y_TD, gate_T1, out_TD, x_TD.stride(0), y_TD.stride(0), gate_T1.stride(0), width, BLOCK=block,
            num_warps=4,
        )
        return out_TD

    def route(self, logits_TE: Tensor, top_k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
        return experts.route(logits_TE, top_k, renormalise)

    def experts(self, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor, gate_up: Tensor, down: Tensor,
                held: HeldExperts | None = None) -> Tensor:
        given = (x_TD, weights_TK, experts_TK, gate_up, down, held)
        self._compile_once(("experts", gate_up.shape, experts_TK.shape[1], held), lambda: experts.compile_all(*given))
        return experts.run_experts(*given)

    def softmax_sampler(self, *, greedy: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor] | None:
        return self._sample_from_softmax

    def _sample_from_softmax(self, logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor) -> Tensor:
        self._compile_once(("sample", logits_BV.shape[1]),
                           lambda: sample.compile_all(logits_BV.shape[1], logits_BV.device))
        return sample.sample_from_softmax(logits_BV, temperature_B1, uniform_B1)

    def allow_tokens(self, logits_BV: Tensor, rows_C: Tensor | None, words_CW: Tensor) -> Tensor:
        self._compile_once(("masks", logits_BV.shape[1], logits_BV.dtype),
                           lambda: token_masks.compile_all(logits_BV, words_CW))
        return token_masks.allow_tokens(logits_BV, rows_C, words_CW)

    def masked_sampler(self) -> MaskedSampler | None:
        return self._sample_allowed

    def _sample_allowed(self, logits_BV: Tensor, temperature_B1: Tensor, uniform_B1: Tensor, words_CW: Tensor,
                        masks_B: Tensor) -> Tensor:
        self._compile_once(("masked sample", logits_BV.shape[1], logits_BV.dtype),
                           lambda: sample.compile_masked(logits_BV, words_CW))
        return sample.sample_allowed(logits_BV, temperature_B1, uniform_B1, words_CW, masks_B)


def _warps(width: int) -> int:
    return 1 if width <= 256 else 4 if width <= 2048 else 8


@triton.jit
def _rms_norm(x, weight, out, stride_t, stride_n, num_heads, width, eps, BLOCK: tl.constexpr,
              IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    place = (row // num_heads) * stride_t + (row % num_heads) * stride_n
    values = tl.load(x + place + columns, mask=mask, other=0.0).to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / width + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row * width + columns, (normed.to(scale.dtype) * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, stride_x, stride_r, width, eps, BLOCK: tl.constexpr,
                  IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    first = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(residual + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
    summed = (first + second).to(out.dtype.element_ty)
    tl.store(total + row * width + columns, summed, mask=mask)
    values = summed.to(tl.float32)
    normed = values * tl.rsqrt(tl.sum(values * values) / width + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    tl.store(out + row * width + columns, (normed.to(scale.dtype) * scale).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotary(q, k, cos, sin, stride_qt, stride_kt, stride_qn, stride_kn, stride_c, num_q_heads, num_k_heads, half,
            HEADS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    num_q_programs = tl.cdiv(num_q_heads, HEADS)
    if tl.program_id(1) < num_q_programs:
        heads = first_head + tl.arange(0, HEADS)
        rows = q + token * stride_qt + heads * stride_qn
        is_head = heads < num_q_heads
    else:
        heads = first_head - num_q_programs * HEADS + tl.arange(0, HEADS)
        rows = k + token * stride_kt + heads * stride_kn
        is_head = heads < num_k_heads
    columns = tl.arange(0, BLOCK)
    c = tl.load(cos + token * stride_c + columns, mask=columns < half).to(tl.float32)[None, :]
    s = tl.load(sin + token * stride_c + columns, mask=columns < half).to(tl.float32)[None, :]
    mask = is_head[:, None] & (columns < half)[None, :]
    places = rows[:, None] + columns[None, :]
    first = tl.load(places, mask=mask).to(tl.float32)
    second = tl.load(places + half, mask=mask).to(tl.float32)
    tl.store(places, (first * c - second * s).to(q.dtype.element_ty), mask=mask)
    tl.store(places + half, (second * c + first * s).to(q.dtype.element_ty), mask=mask)


@triton.jit
def _add_gated(x, y, gate, out, stride_x, stride_y, stride_g, width, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    share = 1.0 / (1.0 + tl.exp(-tl.load(gate + row * stride_g).to(tl.float32)))
    first = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(y + row * stride_y + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * width + columns, (first + share * second).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _silu_and_mul(gate_up, out, stride, width, BLOCK: tl.constexpr,
                  IS_DEPENDENT: tl.constexpr):  # type: ignore[no-untyped-def]
    after_earlier_kernels(IS_DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate = tl.load(gate_up + row * stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + width + columns, mask=mask, other=0.0)
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, activated * up, mask=mask)


# These differ between calls: no variants for some values.
_CHANGES = ["stride_x", "stride_r"]


def _layer_norm_rows(x_TD: Tensor, residual_TD: Tensor | None, weight_D: Tensor, bias_D: Tensor,
                     eps: float) -> tuple[Tensor, Tensor]:
    """See Ops.add_layer_norm; without a residual the sum is x. Rows of both are contiguous."""
    out_TD = torch.empty(x_TD.shape, dtype=x_TD.dtype, device=x_TD.device)
    total_TD = x_TD if residual_TD is None else torch.empty_like(out_TD)
    num_rows, width = x_TD.shape
    if num_rows:
        other_TD = x_TD if residual_TD is None else residual_TD
        _layer_norm[(num_rows,)](
            x_TD, other_TD, weight_D, bias_D, out_TD, total_TD, x_TD.stride(0), other_TD.stride(0), eps,
            ADDS=residual_TD is not None, WIDTH=width, BLOCK=triton.next_power_of_2(width),
            num_warps=4 if width <= 2048 else 8,
        )
    return out_TD, total_TD


@triton.jit(do_not_specialize=_CHANGES)
def _layer_norm(x, residual, weight, bias, out, total, stride_x, stride_r, eps, ADDS: tl.constexpr,
                WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < WIDTH
    values = tl.load(x + row * stride_x + columns, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * stride_r + columns, mask=mask, other=0.0).to(tl.float32)
        summed = values.to(total.dtype.element_ty)
        tl.store(total + row * WIDTH + columns, summed, mask=mask)
        values = summed.to(tl.float32)
    centred = tl.where(mask, values - tl.sum(values) / WIDTH, 0.0)
    normed = centred * tl.rsqrt(tl.sum(centred * centred) / WIDTH + eps)
    scale = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, (normed * scale + shift).to(out.dtype.element_ty), mask=mask)


# The heads of a token need not lie behind those of the one before. Values of one program:
_ROW_VALUES = 1024
_ROW_CHANGES = ["num_rows"]


def _launch_rows(kernel: Any, x_TNH: Tensor, gate_TNH: Tensor, *weight_and_eps: Any) -> Tensor:
    """Run a kernel over the rows of all heads. The values of a row lie together."""
    num_tokens, num_heads, width = x_TNH.shape
    out_TNH = torch.empty(x_TNH.shape, dtype=x_TNH.dtype, device=x_TNH.device)
    # One token alone has no stride between tokens.
    stride_x, stride_gate = (part.stride(0) if num_tokens > 1 else 0 for part in (x_TNH, gate_TNH))
    block = triton.next_power_of_2(width)
    rows = max(1, _ROW_VALUES // block)
    kernel[(triton.cdiv(num_tokens * num_heads, rows),)](
        x_TNH, gate_TNH, out_TNH, stride_x, x_TNH.stride(1), stride_gate, gate_TNH.stride(1), num_heads, width,
        num_tokens * num_heads, *weight_and_eps, ROWS=rows, BLOCK=block, num_warps=4 if width <= 2048 else 8,
        **launch_settings(),
    )
    return out_TNH


@triton.jit(do_not_specialize=_ROW_CHANGES)
def _gated_rms_norm(x, gate, out, stride_xt, stride_xn, stride_gt, stride_gn, num_heads, width, num_rows, weight, eps,
                    ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """A row is a token's head; a program has ROWS of them."""
    after_earlier_kernels(IS_DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, heads = rows // num_heads, rows % num_heads
    place = x + (tokens * stride_xt + heads * stride_xn)[:, None] + columns[None, :]
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    place = gate + (tokens * stride_gt + heads * stride_gn)[:, None] + columns[None, :]
    z = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(weight + columns, mask=columns < width, other=0.0)
    normed = values * tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    scaled = (normed.to(scale.dtype) * scale[None, :]).to(tl.float32)
    result = scaled * (z / (1.0 + tl.exp(-z)))
    tl.store(out + rows[:, None] * width + columns[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=_ROW_CHANGES)
def _times_sigmoid(x, gate, out, stride_xt, stride_xn, stride_gt, stride_gn, num_heads, width, num_rows,
                   ROWS: tl.constexpr, BLOCK: tl.constexpr, IS_DEPENDENT: tl.constexpr):
    """The sigmoid is rounded before the multiplication, as in plain torch."""
    after_earlier_kernels(IS_DEPENDENT)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    tokens, heads = rows // num_heads, rows % num_heads
    values = tl.load(x + (tokens * stride_xt + heads * stride_xn)[:, None] + columns[None, :], mask=mask, other=0.0)
    z = tl.load(gate + (tokens * stride_gt + heads * stride_gn)[:, None] + columns[None, :], mask=mask, other=0.0)
    share = (1.0 / (1.0 + tl.exp(-z.to(tl.float32)))).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * width + columns[None, :], values * share, mask=mask)
