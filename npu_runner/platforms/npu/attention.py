"""Paged attention through npu_fused_infer_attention_score (FIA). Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, H head dim, NB blocks, S block size.

FIA wants the lengths of a step where the kernel's tiling is computed: on the host. There are three ways, by the kind of
`AttentionMetadata.plan`:
- eager and captured (aclgraph): lists of Python integers, `HostLengths`; a captured graph takes new ones at replay.
- the graph engine (GE): int64 tensors on the device, `DeviceLengths`, since GE computes the tiling itself.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch_npu
from torch import Tensor

from npu_runner.errors import ConfigError
from npu_runner.platforms.base import AttentionBackend, AttentionMetadata

logger = logging.getLogger(__name__)

_MASK_SIDE = 2048  # what sparse mode 3 ("right-down causal") asks for, whatever the lengths
_CAUSAL, _FULL = 3, 0
# Head dims that the kernel takes without a cache; a tower's 72 is laid out as the next of them.
_VISION_HEAD_DIMS = (64, 128, 256)


class HostLengths(NamedTuple):
    """Running totals of the query lengths, and each sequence's context length."""

    query_totals: list[int]
    context_lens: list[int]


class DeviceLengths(NamedTuple):
    """The same, as int64 tensors on the device."""

    query_totals_B: Tensor
    context_lens_B: Tensor


class NpuAttention(AttentionBackend):
    name = "fused"

    def __init__(self, *, num_heads: int, num_kv_heads: int, block_size: int, device: torch.device,
                 masks_decode: bool = True):
        """`masks_decode` False: decode goes without a mask, as the kernel's own paths for one query a row ask for."""
        self.masks_decode = masks_decode
        self.pads_with_real_rows = not masks_decode
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.block_size = block_size
        self.mask = torch.ones(_MASK_SIDE, _MASK_SIDE, dtype=torch.bool).triu(1).to(device)

    def takes(self, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether the kernel does: one token is tried, and the device asked for the answer."""
        device = self.mask.device
        cache = torch.zeros((1, self.block_size, self.num_kv_heads, head_dim), dtype=dtype, device=device)
        zeros_1, ones_1 = (torch.full((1,), value, dtype=torch.int32, device=device) for value in (0, 1))
        metadata = AttentionMetadata(False, zeros_1, ones_1, zeros_1[:, None], HostLengths([1], [1]))
        q_1NH = torch.zeros((1, self.num_heads, head_dim), dtype=dtype, device=device)
        try:
            self.decode(q_1NH, cache, cache, metadata, 1.0)
            torch.npu.synchronize()
        except RuntimeError as refusal:
            logger.info("the attention kernel does not take %s: %s", dtype, str(refusal).strip().partition("\n")[0])
            return False
        return True

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> HostLengths:
        return HostLengths(list(accumulate(query_lens_B)), list(context_lens_B))

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                    device: torch.device) -> HostLengths:
        return HostLengths(list(range(1, len(context_lens_B) + 1)), list(context_lens_B))

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        # The kernel takes no strided input: v is a slice of the qkv product and costs a copy. The caches go in as they
        # are: torchair leaves a write in place only when it is into an input of the graph, not into a view of one.
        torch_npu.npu_scatter_pa_kv_cache(
            k_TKH.contiguous(), v_TKH.contiguous(), k_cache, v_cache, slot_mapping_T, cache_mode="Norm"
        )

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
                scale: float) -> Tensor:
        return self._attend(q_TNH, k_cache, v_cache, metadata, scale, is_masked=True)

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
               scale: float) -> Tensor:
        return self._attend(q_BNH, k_cache, v_cache, metadata, scale, is_masked=self.masks_decode)

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> list[int]:
        return list(accumulate(lengths))

    def vision_head_dim(self, head_dim: int) -> int:
        for dim in _VISION_HEAD_DIMS:
            if dim >= head_dim:
                return dim
        raise ConfigError(f"vision head dim {head_dim}: the attention of Ascend devices takes {_VISION_HEAD_DIMS[-1]} "
                          "at most; use another platform for this model")

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: list[int], scale: float) -> Tensor:
        return torch_npu.npu_fused_infer_attention_score(
            q_TNH.contiguous(), k_TNH.contiguous(), v_TNH.contiguous(), input_layout="TND", actual_seq_lengths=plan,
            actual_seq_lengths_kv=plan, num_heads=q_TNH.shape[1], num_key_value_heads=k_TNH.shape[1], scale=scale,
            sparse_mode=_FULL,
        )[0]

    def _attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                is_masked: bool) -> Tensor:
        plan = metadata.plan
        kernel: Any = torch_npu.npu_fused_infer_attention_score
        if isinstance(plan, DeviceLengths):
            kernel = torch.ops.air.npu_fused_infer_attention_score  # torchair registers it; graphs.py loads that
            query_totals, context_lens = plan.query_totals_B, plan.context_lens_B
        else:
            query_totals, context_lens = plan.query_totals, plan.context_lens
        return kernel(
            q_TNH.contiguous(), k_cache.flatten(2), v_cache.flatten(2), atten_mask=self.mask if is_masked else None,
            block_table=metadata.block_tables_BW, input_layout="TND", block_size=self.block_size,
            actual_seq_lengths=query_totals, actual_seq_lengths_kv=context_lens, num_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads, scale=scale, sparse_mode=_CAUSAL if is_masked else _FULL,
        )[0]
