"""Paged attention on the CPU through torch's scaled_dot_product_attention. Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, G query heads of a kv head, H head dim, W blocks per sequence, S block
size, L context length, C tokens of all contexts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.base import AttentionBackend, AttentionMetadata
from npu_runner.platforms.torch_attention import segment_attention


@dataclass
class PrefillPlan:
    """Lengths of each sequence, and for each with a cached context the mask (Q, L) of what its tokens may see.

    rows_C, places_C: int64, the sequence and the place in it of every token of all contexts, one after the other.
    """

    query_lens: list[int]
    context_lens: list[int]
    masks: list[Tensor | None]
    rows_C: Tensor
    places_C: Tensor


class CpuAttention(AttentionBackend):
    name = "torch"

    def __init__(self, *, block_size: int):
        self.block_size = block_size

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> PrefillPlan:
        masks = [None if q == c else _suffix_mask(q, c) for q, c in zip(query_lens_B, context_lens_B, strict=True)]
        lengths_B = torch.tensor(context_lens_B)
        rows_C = torch.arange(len(lengths_B)).repeat_interleave(lengths_B)
        places_C = torch.arange(len(rows_C)) - (lengths_B.cumsum(0) - lengths_B)[rows_C]
        return PrefillPlan(list(query_lens_B), list(context_lens_B), masks, rows_C, places_C)

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        slots = slot_mapping_T.long()
        k_cache.flatten(0, 1).index_copy_(0, slots, k_TKH)
        v_cache.flatten(0, 1).index_copy_(0, slots, v_TKH)

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
                scale: float) -> Tensor:
        plan: PrefillPlan = metadata.plan
        blocks_C = metadata.block_tables_BW[plan.rows_C, plan.places_C // self.block_size]
        slots_C = blocks_C * self.block_size + plan.places_C % self.block_size
        k_CKH, v_CKH = (_read(cache, slots_C).split(plan.context_lens) for cache in (k_cache, v_cache))
        outputs = []
        for q_QNH, k_LKH, v_LKH, mask in zip(q_TNH.split(plan.query_lens), k_CKH, v_CKH, plan.masks, strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in (q_QNH, k_LKH, v_LKH))
            out_1NQH = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )
            outputs.append(out_1NQH[0].transpose(0, 1))
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
               scale: float) -> Tensor:
        tables_BW, lengths_B1 = metadata.block_tables_BW.long(), metadata.context_lens_B.long()[:, None]
        places_L = torch.arange(tables_BW.shape[1] * self.block_size, device=q_BNH.device)
        # Behind its end each sequence repeats its last token: a mask would not hide NaN that the last holder of a block
        # left there.
        written_BL = torch.minimum(places_L, lengths_B1 - 1)
        slots_BL = tables_BW.gather(1, written_BL // self.block_size) * self.block_size + written_BL % self.block_size
        k_BKLH, v_BKLH = (_read(cache, slots_BL).transpose(1, 2) for cache in (k_cache, v_cache))
        # The query heads that share a kv head are its queries: they see the same tokens.
        out_BKGH = F.scaled_dot_product_attention(
            q_BNH.unflatten(1, (k_cache.shape[2], -1)), k_BKLH, v_BKLH,
            attn_mask=(places_L < lengths_B1)[:, None, None], scale=scale,
        )
        return out_BKGH.flatten(1, 2)

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: list[int], scale: float) -> Tensor:
        return segment_attention(q_TNH, k_TNH, v_TNH, plan, scale)


def _read(cache: Tensor, slots: Tensor) -> Tensor:
    """(*slots.shape, K, H) from a cache (NB, S, K, H)."""
    return cache.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape)


def _suffix_mask(query_len: int, context_len: int) -> Tensor:
    """(Q, L) True where the token at place context_len - query_len + row may look."""
    return torch.ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)
