"""Jobs of attention for which a second kernel exists: the cache write, and a vision tower's attention. Knows no lengths
of a step and no probe.

The first of each is used. On CANN 8.5, where a start compares it with the CPU (probes.py), the second may take its
place. Both of a job take and give the same.

T tokens, N heads, K kv heads, H head dim, P patches of a tower.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch_npu
from torch import Tensor

CacheWrite = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Keys and values (T, K, H) into both caches at their slots (T,)."""
VisionAttention = Callable[[Tensor, Tensor, Tensor, list[int], float], Tensor]
"""(P, N, H) of q, k and v of the same shape, the running totals of images, and the scale."""

_FULL = 0  # no mask


def _scatter(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    torch_npu.npu_scatter_pa_kv_cache(k_TKH, v_TKH, k_cache, v_cache, slots_T, cache_mode="Norm")


def _reshape_and_cache(k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slots_T: Tensor) -> None:
    torch_npu._npu_reshape_and_cache(k_TKH, v_TKH, k_cache, v_cache, slots_T)


def _infer(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, totals: list[int], scale: float) -> Tensor:
    return torch_npu.npu_fused_infer_attention_score(
        q_PNH, k_PNH, v_PNH, input_layout="TND", actual_seq_lengths=totals, actual_seq_lengths_kv=totals,
        num_heads=q_PNH.shape[1], num_key_value_heads=k_PNH.shape[1], scale=scale, sparse_mode=_FULL)[0]


def _fusion(q_PNH: Tensor, k_PNH: Tensor, v_PNH: Tensor, totals: list[int], scale: float) -> Tensor:
    return torch_npu.npu_fusion_attention(
        q_PNH, k_PNH, v_PNH, q_PNH.shape[1], input_layout="TND", scale=scale, actual_seq_qlen=totals,
        actual_seq_kvlen=totals, sparse_mode=_FULL)[0]


CACHE_WRITES: dict[str, CacheWrite] = {
    "npu_scatter_pa_kv_cache": _scatter,
    "_npu_reshape_and_cache": _reshape_and_cache,
}
VISION_ATTENTIONS: dict[str, VisionAttention] = {
    "npu_fused_infer_attention_score": _infer,
    "npu_fusion_attention": _fusion,
}


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The kernel for each job, by its name in torch_npu."""

    cache_write: str = "npu_scatter_pa_kv_cache"
    vision: str = "npu_fused_infer_attention_score"


FIRST_CHOICES = Kernels()
