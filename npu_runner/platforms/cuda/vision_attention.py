"""The vision tower's attention on CUDA: all pictures of a call in one kernel. Knows no cache and no model.

What torch's scaled_dot_product_attention takes first on recent GPUs, cuDNN, builds a plan for every new pair of picture
size and number of pictures: 35 ms each on an H200, in the midst of serving. Nothing here depends on sizes.

T tokens, N heads, H head dim, B pictures.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from npu_runner.platforms.torch_attention import segment_attention
from npu_runner.platforms.upload import upload

# What flash attention takes beside 16 bits.
_HEAD_DIM_STEP, _LARGEST_HEAD_DIM = 8, 256
_WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class VisionPlan(NamedTuple):
    """Tokens of each picture, and where they begin: `starts_B1` int32 on the device, the end of the last behind it."""

    lengths: list[int]
    starts_B1: Tensor


def plan_pictures(lengths: Sequence[int], device: torch.device) -> VisionPlan:
    starts_B1 = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=starts_B1[1:])
    return VisionPlan(list(lengths), upload(starts_B1, device))


def picture_attention(q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float) -> Tensor:
    """Full attention within each picture, (T, N, H)."""
    varlen = _varlen_attention()
    head_dim = q_TNH.shape[-1]
    is_taken = q_TNH.dtype != torch.float32 and head_dim % _HEAD_DIM_STEP == 0 and head_dim <= _LARGEST_HEAD_DIM
    if varlen is None or not is_taken:
        with sdpa_kernel(_WITHOUT_PLANS):
            return segment_attention(q_TNH, k_TNH, v_TNH, plan.lengths, scale)
    longest = max(plan.lengths)
    out_TNH: Tensor = varlen(q_TNH, k_TNH, v_TNH, plan.starts_B1, plan.starts_B1, longest, longest, scale=scale)
    return out_TNH


@cache
def _varlen_attention() -> Callable[..., Any] | None:
    """torch's flash attention over sequences of any lengths; None where torch or the GPU is too old for it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    takes_scale = "scale" in inspect.signature(varlen_attn).parameters
    return varlen_attn if takes_scale and torch.cuda.get_device_capability() >= (8, 0) else None
