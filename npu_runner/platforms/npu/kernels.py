"""Jobs for which there is a second kernel, or another way without one. Knows no lengths of a step and no case.

The first of each is used, unless a start finds that it computes otherwise than the CPU (cases.py): then the next takes
its place. All of a job take and give the same.

T tokens, N heads, K kv heads, H head dim, P patches of a tower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

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


KERNELS: dict[str, tuple[str, ...]] = {
    "cache_write": tuple(CACHE_WRITES),
    "vision": tuple(VISION_ATTENTIONS),
    "window": ("npu_fused_infer_attention_score", "gathered blocks"),
    "drafts": ("queries of a row together", "one query a row"),
    "layout": ("NZ", "ND"),
    "norm": ("npu_add_rms_norm_quant", "two operators"),
    "experts": ("npu_grouped_matmul_swiglu_quant_v2", "npu_dequant_swiglu_quant", "three operators"),
}
"""Job to its kernels, by their names in torch_npu, the first choice first."""
WITHOUT: dict[str, str] = {form: "dequantised" for form in ("int8", "int8_static", "int8_experts", "grouped")} | {
    "graphs": "eager"}
"""Job to what is done where no kernel computes it right: weights of a form are dequantised, steps run eagerly."""


def kernels_for(fallbacks: Mapping[str, str]) -> dict[str, str]:
    """The kernel of each job: that of `Platform.fallbacks`, else the first."""
    return {job: fallbacks.get(job, names[0]) for job, names in KERNELS.items()}


FIRST_CHOICES = kernels_for({})
