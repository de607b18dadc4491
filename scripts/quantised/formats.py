"""One weight in every published quantised format that npu_runner reads, by rounding to the nearest. Knows no files.

N outputs, K inputs, G groups of inputs. Each function returns the tensors that stand for a linear, by the end of their
names. Layouts: docs/quantization.md names the source of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]
FP8, FP8_MAX = torch.float8_e4m3fn, 448.0
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


class Range(NamedTuple):
    """Of a linear's inputs; 0 is always within."""

    least: float
    most: float


def fp8_block(weight_NK: Tensor, block: tuple[int, int] = (128, 128)) -> Tensors:
    """One scale for each block; works on (E, N, K) too."""
    rows, columns = weight_NK.shape[-2:]
    padded = F.pad(weight_NK.float(), (0, -columns % block[1], 0, -rows % block[0]))
    blocks = padded.unflatten(-2, (-1, block[0])).unflatten(-1, (-1, block[1]))
    scale = blocks.abs().amax((-3, -1)).clamp_min(1e-12) / FP8_MAX
    values = (blocks / scale[..., :, None, :, None]).to(FP8).flatten(-2).flatten(-3, -2)
    return {"weight": values[..., :rows, :columns].contiguous(), "weight_scale_inv": scale}


def fp8_rows(weight_NK: Tensor, *, by_tensor: bool, dtype: torch.dtype = torch.float32) -> Tensors:
    """One scale for the tensor, [1], or for each row, [N, 1]."""
    weight_NK = weight_NK.float()
    largest = weight_NK.abs().max().reshape(1) if by_tensor else weight_NK.abs().amax(1, keepdim=True)
    scale = (largest.clamp_min(1e-12) / FP8_MAX).to(dtype)
    return {"weight": (weight_NK / scale.float()).to(FP8), "weight_scale": scale}


def integers(weight_NK: Tensor, bits: int, group_size: int = -1, *, symmetric: bool = True,
             dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """values (N, K) int32 from -2^(bits - 1) on, scales (N, G), zeros (N, G) int32: w = (values - zeros) * scales."""
    groups = weight_NK.float().unflatten(1, (-1, weight_NK.shape[1] if group_size == -1 else group_size))
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if symmetric:
        scale = (groups.abs().amax(2).clamp_min(1e-12) / high).to(dtype)
        zero = torch.zeros_like(scale, dtype=torch.int32)
    else:
        least, most = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
        scale = ((most - least).clamp_min(1e-12) / (high - low)).to(dtype)
        zero = (low - (least / scale.float()).round()).clamp(low, high).int()
    values = ((groups / scale.float()[..., None]).round() + zero[..., None]).clamp(low, high)
    return values.int().flatten(1), scale, zero


def pack(values: Tensor, bits: int, dim: int, order: Sequence[int] | None = None, word: torch.dtype = torch.int32
         ) -> Tensor:
    """Non-negative integers side by side in words along `dim`, of two; number i from bit `bits * order[i]` on."""
    count = torch.iinfo(word).bits // bits
    padding = [0, 0, 0, -values.shape[0] % count] if dim == 0 else [0, -values.shape[1] % count]
    numbers = F.pad(values.long(), padding).unflatten(dim, (-1, count))
    shifts = bits * torch.tensor(order or range(count))
    words = (numbers << (shifts[:, None] if dim == 0 else shifts)).sum(dim + 1)
    half = 1 << (torch.iinfo(word).bits - 1)
    return torch.where(words >= half, words - 2 * half, words).to(word)


def compressed_int(weight_NK: Tensor, bits: int = 8, group_size: int = -1, *, symmetric: bool = True,
                   packed: bool = False, dtype: torch.dtype = torch.float32) -> Tensors:
    """compressed-tensors: int-quantized, or packed."""
    values, scale, zero = integers(weight_NK, bits, group_size, symmetric=symmetric, dtype=dtype)
    zeros: Tensors = {} if symmetric else {"weight_zero_point": zero.to(torch.int8)}
    if not packed:
        return {"weight": values.to(torch.int8), "weight_scale": scale, **zeros}
    half = 1 << (bits - 1)
    if zeros:
        zeros = {"weight_zero_point": pack(zero + half, bits, 0)}
    return {"weight_packed": pack(values + half, bits, 1), "weight_scale": scale,
            "weight_shape": torch.tensor(weight_NK.shape), **zeros}


def awq(weight_NK: Tensor, group_size: int = 128) -> Tensors:
    """The gemm layout: (K, N / 8), its columns in an order of their own."""
    values, scale, zero = integers(weight_NK, 4, group_size, symmetric=False, dtype=torch.float16)
    return {"qweight": pack(values.T + 8, 4, 1, AWQ_ORDER), "qzeros": pack(zero.T + 8, 4, 1, AWQ_ORDER),
            "scales": scale.T.contiguous()}


def gptq(weight_NK: Tensor, bits: int = 4, group_size: int = 128, *, symmetric: bool = True, is_v2: bool = False,
         order_K: Tensor | None = None) -> Tensors:
    """`order_K`: the inputs in the order in which they make groups (desc_act); None: as they are."""
    num_inputs = weight_NK.shape[1]
    order_K = torch.arange(num_inputs) if order_K is None else order_K
    values, scale, zero = integers(weight_NK[:, order_K], bits, group_size, symmetric=symmetric, dtype=torch.float16)
    group_of_K = torch.empty(num_inputs, dtype=torch.int32)
    group_of_K[order_K] = (torch.arange(num_inputs) // (num_inputs if group_size == -1 else group_size)).int()
    half, back = 1 << (bits - 1), order_K.argsort()
    zero = (zero + half).T if is_v2 else (zero + half).clamp_min(1).T - 1  # v1 has no room for a zero of 0
    return {"qweight": pack((values + half).T[back], bits, 0), "qzeros": pack(zero, bits, 1),
            "scales": scale.T.contiguous(), "g_idx": group_of_K}


def modelslim_int8(weight_NK: Tensor, group_size: int = -1, *, symmetric: bool = True) -> Tensors:
    """W8A8_DYNAMIC by rows, W8A16 by rows or groups."""
    values, scale, zero = integers(weight_NK, 8, group_size, symmetric=symmetric)
    return {"weight": values.to(torch.int8), "weight_scale": scale, "weight_offset": zero.float()}


def modelslim_int4(weight_NK: Tensor, group_size: int = -1, *, layout: str = "rows") -> Tensors:
    """W4A16 and W4A8_DYNAMIC. `layout`: nibbles packed over "rows" (N) or "columns" (K), or "bytes", one a value."""
    values, scale, zero = integers(weight_NK, 4, group_size)
    nibbles = {"rows": lambda: pack(values & 15, 4, 0, word=torch.int8),
               "columns": lambda: pack(values & 15, 4, 1, word=torch.int8), "bytes": lambda: values.to(torch.int8)}
    return {"weight": nibbles[layout](), "weight_scale": scale, "weight_offset": zero.float()}


def compressed_static(weight_NK: Tensor, inputs: Range, bias_N: Tensor | None = None) -> Tensors:
    """compressed-tensors, int-quantized: inputs have one scale, [1], and no zero."""
    scale = max(-inputs.least, inputs.most, 1e-12) / 127
    own = {} if bias_N is None else {"bias": bias_N}
    return {**compressed_int(weight_NK), "input_scale": torch.tensor([scale]), **own}


def modelslim_static_of_range(weight_NK: Tensor, inputs: Range, bias_N: Tensor | None = None) -> Tensors:
    """`modelslim_static` with these inputs from -128 to 127."""
    scale = max(inputs.most - inputs.least, 1e-12) / 255
    return modelslim_static(weight_NK, scale, round(-128 - inputs.least / scale), bias_N)


def modelslim_static(weight_NK: Tensor, input_scale: float, input_offset: int, bias_N: Tensor | None = None, *,
                     as_integers: bool = False) -> Tensors:
    """W8A8: inputs have one scale and offset. `as_integers`: deq_scale as float16 models have it, bits in int64."""
    values, scale, _ = integers(weight_NK, 8)
    input_scale_1 = torch.tensor([input_scale], dtype=torch.float32)
    deq_scale_N = input_scale_1 * scale[:, 0]
    own_N = torch.zeros(len(weight_NK)) if bias_N is None else bias_N.float()
    sums_N = values.long().sum(1)
    quant_bias_N = (own_N.double() / deq_scale_N - input_offset * sums_N).round().int()
    found = {"weight": values.to(torch.int8), "input_scale": input_scale_1,
             "input_offset": torch.tensor([float(input_offset)]), "quant_bias": quant_bias_N,
             "deq_scale": deq_scale_N.view(torch.int32).long() if as_integers else deq_scale_N}
    return found if bias_N is None else {**found, "bias": own_N}
