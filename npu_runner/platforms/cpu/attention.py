"""Paged attention on the CPU through torch's scaled_dot_product_attention. Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, H head dim, W blocks per sequence, S block size, L context length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from npu_runner.platforms.base import AttentionBackend, AttentionMetadata
from npu_runner.platforms.torch_attention import segment_attention


@dataclass
class PrefillPlan:
    """Host lengths, and for each sequence with a cached context the mask (Q, L) of what its tokens may see."""

    query_lens: list[int]
    context_lens: list[int]
    masks: list[Tensor | None]


class CpuAttention(AttentionBackend):
    def __init__(self, *, block_size: int):
        self.block_size = block_size

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int],
                     device: torch.device) -> PrefillPlan:
        masks = [None if q == c else _suffix_mask(q, c) for q, c in zip(query_lens_B, context_lens_B, strict=True)]
        return PrefillPlan(list(query_lens_B), list(context_lens_B), masks)

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        slots = slot_mapping_T.long()
        k_cache.flatten(0, 1).index_copy_(0, slots, k_TKH)
        v_cache.flatten(0, 1).index_copy_(0, slots, v_TKH)

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
                scale: float) -> Tensor:
        plan: PrefillPlan = metadata.plan
        outputs = []
        start = 0
        for row, (query_len, context_len) in enumerate(zip(plan.query_lens, plan.context_lens, strict=True)):
            num_blocks = -(-context_len // self.block_size)
            blocks = metadata.block_tables_BW[row, :num_blocks]
            k_1KLH = self._gather(k_cache, blocks[None])[:, :, :context_len]
            v_1KLH = self._gather(v_cache, blocks[None])[:, :, :context_len]
            q_1NQH = q_TNH[start : start + query_len].transpose(0, 1)[None]
            mask = plan.masks[row]
            outputs.append(F.scaled_dot_product_attention(
                q_1NQH, k_1KLH, v_1KLH, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
            )[0].transpose(0, 1))
            start += query_len
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata,
               scale: float) -> Tensor:
        k_BKLH = self._gather(k_cache, metadata.block_tables_BW)
        v_BKLH = self._gather(v_cache, metadata.block_tables_BW)
        places_L = torch.arange(k_BKLH.shape[2], device=q_BNH.device)
        mask_B11L = (places_L < metadata.context_lens_B[:, None])[:, None, None, :]
        # A mask does not hide what is no number: NaN left in a block by its last holder would spread to the next one.
        unwritten_B1L1 = ~mask_B11L.transpose(2, 3)
        k_BKLH.masked_fill_(unwritten_B1L1, 0.0)
        v_BKLH.masked_fill_(unwritten_B1L1, 0.0)
        out_BN1H = F.scaled_dot_product_attention(
            q_BNH[:, :, None, :], k_BKLH, v_BKLH, attn_mask=mask_B11L, scale=scale, enable_gqa=True
        )
        return out_BN1H[:, :, 0, :]

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        return segment_attention(q_TNH, k_TNH, v_TNH, lengths, scale)

    def _gather(self, cache: Tensor, block_tables_BW: Tensor) -> Tensor:
        """(B, K, W*S, H) from (NB, S, K, H)."""
        return cache[block_tables_BW].flatten(1, 2).transpose(1, 2)


def _suffix_mask(query_len: int, context_len: int) -> Tensor:
    """(Q, L) True where the token at place context_len - query_len + row may look."""
    return torch.ones(query_len, context_len, dtype=torch.bool).tril(context_len - query_len)
