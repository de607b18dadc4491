"""Paged attention on CUDA through our own kernels: Triton's, and in CUDA C++ for Hopper.

Knows nothing of models or requests.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, P parts that a context is split into.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
from torch import Tensor

from npu_runner.platforms.attention import AttentionBackend
from npu_runner.platforms.cuda.attention import paged_kernels as kernels
from npu_runner.platforms.cuda.attention.heads import norm_rotary_store
from npu_runner.platforms.cuda.attention.hopper_attention import (
    ImageAttention,
    PromptAttention,
    StepBlocks,
    why_no_prompts,
)
from npu_runner.platforms.cuda.attention.hopper_decode import DecodeAttention, why_no_decode
from npu_runner.platforms.cuda.attention.tiles import (
    NUMBERS_OF_PARTS,
    SPLIT_TOWER,
    decode_tile,
    head_width,
    num_decode_parts,
    prefill_tile,
    tower_tile,
)
from npu_runner.platforms.cuda.attention.vision import SplitHeads, VisionPlan, image_attention
from npu_runner.platforms.cuda.compile_ahead import is_ahead
from npu_runner.platforms.cuda.dependent_launch import launch_settings
from npu_runner.platforms.cuda.gpu import Gpu
from npu_runner.platforms.ops import HeadNorms, Ops
from npu_runner.platforms.step_inputs import AttentionMetadata
from npu_runner.platforms.transfers import upload

logger = logging.getLogger(__name__)
_Kernel = TypeVar("_Kernel")

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of a step, and its blocks."""

    tiles: Mapping[str, Tensor]
    """Lists by name, (tiles, 4) int32 on the device: sequence, first row of the tile in T, rows left from there, place
    in context. `tiles` are Triton's. `prompt_tiles` are PromptAttention's, where it accepts the step; in a graph their
    first row has their number, which may be 0, and the layers without a window launch both kernels. Such a graph has
    `window_tiles`, Triton's of the layers with a window."""
    blocks: StepBlocks | None
    """None in a graph."""

    @property
    def is_padded(self) -> bool:
        """It is a graph's, and some tokens are in no tile."""
        return self.blocks is None


class TritonAttention(AttentionBackend):
    def __init__(self, *, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype):
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.block_size = block_size
        self.dtype = dtype
        self.gpu = Gpu.current()
        self.group = num_heads // num_kv_heads
        self._head = head_width(head_dim)
        self.decode_tile, self.decode_tile_of_fp8 = (
            decode_tile(head_dim, self.group, dtype, self.gpu, from_fp8=from_fp8) for from_fp8 in (False, True))
        self.prefill_tile = prefill_tile(head_dim, self.group, dtype, self.gpu)
        self._tokens_a_tile = self.prefill_tile.rows // self.group
        self.kv_scales: Tensor | None = None
        self._has_combined = False
        self.prompts = self._make_prompts()
        self.decodes = self._make_kernel("decode steps", DecodeAttention, why_no_decode)
        self.images = ImageAttention()
        self._split_heads = SplitHeads(self.gpu.shared_bytes)

    def _make_prompts(self) -> PromptAttention | None:
        return self._make_kernel("prompts", PromptAttention, why_no_prompts)

    def _make_kernel(self, what: str, kernel: Callable[..., _Kernel],
                     why_not: Callable[[int, int, int, torch.dtype], str | None]) -> _Kernel | None:
        """The CUDA C++ kernel, where there is one for these heads."""
        reason = why_not(self.head_dim, self.group, self.block_size, self.dtype)
        if reason is not None:
            logger.debug("attention of %s: triton (%s)", what, reason)
            return None
        return kernel(num_kv_heads=self.num_kv_heads, group=self.group, block_size=self.block_size, dtype=self.dtype)

    def with_kv_scales(self, scales_2: Tensor) -> TritonAttention:
        scaled = copy.copy(self)
        scaled.kv_scales = scales_2
        return scaled

    def plan_prefill(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int], block_tables_BW: np.ndarray,
                     device: torch.device) -> Any:
        sizes = {"tiles": self._tokens_a_tile}
        if self.prompts is not None and self.prompts.accepts(query_lens_B):
            sizes["prompt_tiles"] = self.prompts.tokens_a_tile
        tiles = {name: upload(cut_into_tiles(query_lens_B, context_lens_B, tokens_a_tile), device)
                 for name, tokens_a_tile in sizes.items()}
        return PrefillPlan(tiles, StepBlocks(context_lens_B, block_tables_BW, self.block_size, device))

    def most_graph_tiles(self, num_tokens: int, num_sequences: int) -> dict[str, int]:
        most, prompts = num_tokens // self._tokens_a_tile + num_sequences, self._prompts_of_graph(num_tokens)
        if prompts is None:
            return {"tiles": most}
        return {"tiles": most, "window_tiles": most,
                "prompt_tiles": 1 + num_tokens // prompts.tokens_a_tile + num_sequences}

    def graph_tiles(self, query_lens_B: Sequence[int], context_lens_B: Sequence[int],
                    num_tokens: int) -> dict[str, np.ndarray]:
        lens, prompts = (query_lens_B, context_lens_B), self._prompts_of_graph(num_tokens)
        tiles = cut_into_tiles(*lens, self._tokens_a_tile)
        if prompts is None:
            return {"tiles": tiles}
        if not prompts.accepts(query_lens_B):
            return {"tiles": tiles, "window_tiles": tiles, "prompt_tiles": tiles[:0]}
        prompt_tiles = cut_into_tiles(*lens, prompts.tokens_a_tile)
        count = np.array([[len(prompt_tiles), 0, 0, 0]], dtype=np.int32)
        return {"tiles": tiles[:0], "window_tiles": tiles, "prompt_tiles": np.concatenate([count, prompt_tiles])}

    def plan_of_tiles(self, tiles: Mapping[str, Tensor]) -> PrefillPlan:
        return PrefillPlan(tiles, None)

    def _prompts_of_graph(self, num_tokens: int) -> PromptAttention | None:
        """The kernel that a graph of `num_tokens` tokens has beside Triton's: each step uses the faster of the two."""
        prompts = self.prompts if None in self.windows else None
        return prompts if prompts is not None and prompts.is_for_graph(num_tokens) else None

    def plan_decode(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, device: torch.device,
                    query_lens_B: Sequence[int] | None = None) -> Any:
        """The first eager step compiles `combine` for every number of parts that later steps may have.

        Graphs compile theirs in their warm-up step.
        """
        if self._has_combined:
            return None
        for num_parts in NUMBERS_OF_PARTS:
            parts = torch.zeros((1, self.num_heads, num_parts, self.head_dim), dtype=torch.float32, device=device)
            weights = torch.ones((1, self.num_heads, num_parts, 2), dtype=torch.float32, device=device)
            self._combine(parts, weights, torch.empty((1, self.num_heads, self.head_dim), dtype=self.dtype,
                                                      device=device))
        self._has_combined = True
        return None

    def write_kv(self, k_TKH: Tensor, v_TKH: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
        width = self.num_kv_heads * self.head_dim
        assert all(x.shape[1] == 1 or x.stride(1) == self.head_dim for x in (k_TKH, v_TKH)), "heads lie together"
        kernels.write_kv[(k_TKH.shape[0],)](
            k_TKH, v_TKH, k_cache, v_cache, slot_mapping_T, self._scales_or(k_TKH), k_TKH.stride(0), v_TKH.stride(0),
            width, BLOCK=triton.next_power_of_2(width), IS_SCALED=self.kv_scales is not None, num_warps=4,
        )

    def copy_blocks(self, k_cache: Tensor, v_cache: Tensor, pairs_N2: np.ndarray) -> None:
        num_layers, num_blocks = k_cache.shape[:2]
        words = [cache.view(num_layers, num_blocks, -1).view(torch.int32) for cache in (k_cache, v_cache)]
        num_words, size = words[0].shape[2], kernels.COPIED_WORDS
        kernels.copy_blocks[(len(pairs_N2), num_layers, triton.cdiv(num_words, size))](
            *words, upload(pairs_N2, k_cache.device), num_blocks, num_words, BLOCK=size, num_warps=4)

    def norm_rotary_store(self, ops: Ops, q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, norms: HeadNorms | None,
                          cos_TR: Tensor, sin_TR: Tensor, *, k_cache: Tensor, v_cache: Tensor,
                          slot_mapping_T: Tensor) -> Tensor:
        return norm_rotary_store(q_TNH, k_TKH, v_TKH, norms, cos_TR, sin_TR, k_cache=k_cache, v_cache=v_cache,
                                 slot_mapping_T=slot_mapping_T, kv_scales=self.kv_scales)

    def _scales_or(self, other: Tensor) -> Tensor:
        """The scales, or `other`, which a kernel without scales does not read."""
        return other if self.kv_scales is None else self.kv_scales

    def prefill(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
                window: int | None = None) -> Tensor:
        plan: PrefillPlan = metadata.plan
        tiles, prompt_tiles = plan.tiles["tiles"], plan.tiles.get("prompt_tiles")
        # During compile-ahead Triton's kernel must be met: short steps use it.
        if self.prompts is not None and window is None and not is_ahead():
            is_fp8 = k_cache.dtype == torch.float8_e4m3fn
            if is_fp8:
                self.prompts.make_room(len(q_TNH), q_TNH.device)
            if prompt_tiles is not None and plan.blocks is None:
                assert not is_fp8, "longer prefills over an FP8 cache are not recorded"
                self.prompts.attend(q_TNH, k_cache, v_cache, prompt_tiles[1:], metadata.block_tables_BW, scale,
                                    out_TNH=self._output_of(q_TNH, metadata), count=prompt_tiles[:1])
            elif prompt_tiles is not None and plan.blocks is not None:
                if k_cache.dtype == q_TNH.dtype:
                    return self.prompts.attend(q_TNH, k_cache, v_cache, prompt_tiles, metadata.block_tables_BW, scale)
                if is_fp8 and self.prompts.has_room(plan.blocks):
                    return self.prompts.attend_fp8(q_TNH, k_cache, v_cache, prompt_tiles, plan.blocks, scale,
                                                   self.kv_scales)
        if window is not None:
            tiles = plan.tiles.get("window_tiles", tiles)
        tile, out_TNH = self.prefill_tile, self._output_of(q_TNH, metadata)
        kernels.prefill[(len(tiles), self.num_kv_heads)](
            q_TNH, _readable(k_cache), _readable(v_cache), out_TNH, tiles, metadata.block_tables_BW,
            self._scales_or(q_TNH), q_TNH.stride(0), metadata.block_tables_BW.stride(0), FACTOR=scale * _LOG2_E,
            IS_SCALED=self.kv_scales is not None, WINDOW=window or 0,
            NUM_KV_HEADS=self.num_kv_heads, GROUP=self.group, HEAD_DIM=self.head_dim, BLOCK_SIZE=self.block_size,
            ROWS=tile.rows, COLUMNS=tile.columns, HEAD=self._head, num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out_TNH

    def _output_of(self, q_TNH: Tensor, metadata: AttentionMetadata) -> Tensor:
        """Memory for the output. No kernel writes rows in no tile: all layers share zeros for them."""
        if not metadata.plan.is_padded:
            return torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        key = ("padded output", q_TNH.shape)
        if key not in metadata.derived:
            metadata.derived[key] = torch.zeros(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        found: Tensor = metadata.derived[key]
        return found

    def decode(self, q_BNH: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float, *,
               window: int | None = None) -> Tensor:
        if self.decodes is not None and self.decodes.accepts(q_BNH, k_cache):
            return self.decodes.attend(q_BNH, k_cache, v_cache, metadata, scale, scales_2=self.kv_scales, window=window,
                                       num_sms=self.gpu.num_sms)
        batch_size = q_BNH.shape[0]
        tile = self.decode_tile_of_fp8 if k_cache.dtype == torch.float8_e4m3fn else self.decode_tile
        num_parts = self.num_parts(batch_size)
        out_BNH = torch.empty(q_BNH.shape, dtype=q_BNH.dtype, device=q_BNH.device)
        # With one part these are not written, but keep their dtypes for the compiler.
        shape = (batch_size, self.num_heads, num_parts) if num_parts > 1 else (1, 1, 1)
        parts = torch.empty((*shape, self.head_dim), dtype=torch.float32, device=q_BNH.device)
        weights = torch.empty((*shape, 2), dtype=torch.float32, device=q_BNH.device)
        kernels.decode[(self.num_kv_heads, num_parts, batch_size)](
            q_BNH, _readable(k_cache), _readable(v_cache), out_BNH, parts, weights, metadata.block_tables_BW,
            metadata.context_lens_B, self._scales_or(q_BNH), q_BNH.stride(0), metadata.block_tables_BW.stride(0),
            metadata.block_tables_BW.shape[1], len(k_cache), num_parts, FACTOR=scale * _LOG2_E,
            IS_SCALED=self.kv_scales is not None, WINDOW=window or 0, NUM_KV_HEADS=self.num_kv_heads, GROUP=self.group,
            HEAD_DIM=self.head_dim, BLOCK_SIZE=self.block_size, ROWS=tile.rows, COLUMNS=tile.columns, HEAD=self._head,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **launch_settings(),
        )
        if num_parts > 1:
            self._combine(parts, weights, out_BNH)
        return out_BNH

    def num_parts(self, batch_size: int) -> int:
        """The number of parts that a decode step splits contexts into."""
        return num_decode_parts(batch_size, self.num_kv_heads, self.gpu.num_sms)

    def _combine(self, parts_BNPH: Tensor, weights_BNP2: Tensor, out_BNH: Tensor) -> None:
        kernels.combine[(len(out_BNH), self.num_heads)](
            parts_BNPH, weights_BNP2, out_BNH, self.num_heads, self.head_dim, PARTS=parts_BNPH.shape[2],
            HEAD=self._head, num_warps=1, **launch_settings(),
        )

    def plan_vision(self, lengths: Sequence[int], device: torch.device) -> VisionPlan:
        return VisionPlan(lengths, device)

    def vision(self, q_TNH: Tensor, k_TNH: Tensor, v_TNH: Tensor, plan: VisionPlan, scale: float) -> Tensor:
        if self.images.accepts(q_TNH, k_TNH, v_TNH, plan):
            return self.images.attend(q_TNH, k_TNH, v_TNH, plan, scale)
        if self._split_heads.accepts(q_TNH, k_TNH, v_TNH, scale):
            return image_attention(q_TNH, k_TNH, v_TNH, plan, scale, SPLIT_TOWER, is_split=True)
        return image_attention(q_TNH, k_TNH, v_TNH, plan, scale,
                               tower_tile(q_TNH.shape[-1], q_TNH.dtype, self.gpu))


def cut_into_tiles(query_lens_B: Sequence[int], context_lens_B: Sequence[int], tokens_a_tile: int) -> np.ndarray:
    """(tiles, 4) int32 as in PrefillPlan: each sequence's new tokens, `tokens_a_tile` at a time."""
    queries_B, contexts_B = (np.asarray(lens, dtype=np.int32) for lens in (query_lens_B, context_lens_B))
    counts_B = -(-queries_B // tokens_a_tile)
    sequences = np.repeat(np.arange(len(queries_B), dtype=np.int32), counts_B)
    # The distance of each tile's first token from the first one of its sequence.
    starts = (np.arange(len(sequences), dtype=np.int32) - (counts_B.cumsum() - counts_B)[sequences]) * tokens_a_tile
    first_rows_B = queries_B.cumsum() - queries_B
    tiles = np.stack([sequences, first_rows_B[sequences] + starts, queries_B[sequences] - starts,
                      (contexts_B - queries_B)[sequences] + starts], axis=1)
    # Longest contexts first: the last programs to start are then the shortest.
    order = np.argsort(-tiles[:, 3], kind="stable")
    ordered: np.ndarray = tiles[order].astype(np.int32)
    return ordered


def _readable(cache: Tensor) -> Tensor:
    """The cache as kernels read it: e4m3 as bytes, because a masked load has no e4m3 value for masked elements."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache
