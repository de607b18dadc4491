"""Paged attention on CUDA through our own Triton kernels. Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, P parts that a context is split into.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor

from npu_runner.platforms.base import AttentionBackend
from npu_runner.platforms.cuda import attention_kernels as kernels
from npu_runner.platforms.cuda.heads import norm_rotary_store
from npu_runner.platforms.cuda.vision_attention import VisionPlan, picture_attention, plan_pictures
from npu_runner.platforms.ops import HeadNorms, Ops
from npu_runner.platforms.step_inputs import AttentionMetadata

# Query rows of one program of the prefill kernel.
_TILE_ROWS = 64
# Enough programs to fill a GPU of this many multiprocessors twice.
_WANTED_PROGRAMS = 264
_NUMBERS_OF_PARTS = (1, 2, 4, 8, 16, 32)


@dataclass
class PrefillPlan:
    """(tiles, 4) int32 on the device: sequence, first row of its tile in T, rows left from there, place in context."""

    tiles: Tensor


class TritonAttention(AttentionBackend):
    name = "triton"

    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self._has_combined = False

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> Any:
        tiles = []
        first_row = 0
        for row, (query_len, context_len) in enumerate(zip(query_lens_B, context_lens_B, strict=True)):
            for start in range(0, query_len, _TILE_ROWS):
                tiles.append((row, first_row + start, query_len - start, context_len - query_len + start))
            first_row += query_len
        # Longest contexts first: the last programs to start are then the shortest.
        tiles.sort(key=lambda tile: -tile[3])
        host = torch.from_numpy(np.array(tiles, dtype=np.int32)).pin_memory()
        return PrefillPlan(host.to(device, non_blocking=True))

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device) -> Any:
        """Nothing to plan; the first eager step compiles `combine` for every number of parts that later ones may have.

        Graphs have theirs from the step that warms them up.
        """
        if self._has_combined:
            return None
        for num_parts in _NUMBERS_OF_PARTS:
            parts = torch.zeros((1, self.num_heads, num_parts, self.head_dim), dtype=torch.float32, device=device)
            weights = torch.ones((1, self.num_heads, num_parts, 2), dtype=torch.float32, device=device)
            self._combine(parts, weights, torch.empty((1, self.num_heads, self.head_dim), dtype=self.dtype,
                                                      device=device))
        self._has_combined = True
        return None

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        width = self.num_kv_heads * self.head_dim
        assert k_TKH.stride(1) == v_TKH.stride(1) == self.head_dim, "heads of one token lie together"
        kernels.write_kv[(k_TKH.shape[0],)](
            k_TKH, v_TKH, k_cache, v_cache, slot_mapping_T, k_TKH.stride(0), v_TKH.stride(0), width,
            BLOCK=triton.next_power_of_2(width), num_warps=4,
        )

    def norm_rotary_store(self, ops: Ops, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
                          cos_TR: Tensor, sin_TR: Tensor, *, k_cache: Tensor, v_cache: Tensor,
                          slot_mapping_T: Tensor) -> Tensor:
        return norm_rotary_store(q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR, k_cache=k_cache, v_cache=v_cache,
                                 slot_mapping_T=slot_mapping_T)

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        plan: PrefillPlan = metadata.plan
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        kernels.prefill[(len(plan.tiles), self.num_heads)](
            q_TNH, k_cache, v_cache, out_TNH, plan.tiles, metadata.block_tables_BW, q_TNH.stride(0),
            metadata.block_tables_BW.stride(0), self.num_heads, self.num_kv_heads, self.head_dim, self.block_size,
            SCALE=scale, WINDOW=window or 0, ROWS=_TILE_ROWS, COLUMNS=self._columns(q_TNH),
            HEAD=max(16, triton.next_power_of_2(self.head_dim)), num_warps=4, num_stages=2,
        )
        return out_TNH

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        batch_size = q_BNH.shape[0]
        wanted = triton.cdiv(_WANTED_PROGRAMS, batch_size * self.num_kv_heads)
        num_parts = min(_NUMBERS_OF_PARTS[-1], triton.next_power_of_2(wanted))
        shape = (batch_size, self.num_heads, num_parts)
        parts = torch.empty((*shape, self.head_dim), dtype=torch.float32, device=q_BNH.device)
        weights = torch.empty((*shape, 2), dtype=torch.float32, device=q_BNH.device)
        group = self.num_heads // self.num_kv_heads
        head = max(16, triton.next_power_of_2(self.head_dim))
        kernels.decode[(batch_size, self.num_kv_heads, num_parts)](
            q_BNH, k_cache, v_cache, parts, weights, metadata.block_tables_BW, metadata.context_lens_B,
            q_BNH.stride(0), metadata.block_tables_BW.stride(0), self.num_heads, self.num_kv_heads, group,
            self.head_dim, self.block_size, num_parts,
            SCALE=scale, WINDOW=window or 0, GROUP=max(16, triton.next_power_of_2(group)),
            COLUMNS=self._columns(q_BNH), HEAD=head, num_warps=4, num_stages=2,
        )
        out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
        self._combine(parts, weights, out_BNH)
        return out_BNH

    def _combine(self, parts_BNPH: Tensor, weights_BNP2: Tensor, out_BNH: Tensor) -> None:
        kernels.combine[(len(out_BNH), self.num_heads)](
            parts_BNPH, weights_BNP2, out_BNH, self.num_heads, self.head_dim, PARTS=parts_BNPH.shape[2],
            HEAD=max(16, triton.next_power_of_2(self.head_dim)), num_warps=1,
        )

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> VisionPlan:
        return plan_pictures(lengths, device)

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float) -> Tensor:
        return picture_attention(q_TNH, k_TNH, v_TNH, plan, scale)

    def _columns(self, q: Tensor) -> int:
        """Context tokens of one loop step; float32 tiles are twice as large in shared memory."""
        return 32 if q.dtype == torch.float32 else 64
