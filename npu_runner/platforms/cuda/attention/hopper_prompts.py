"""Attention of prompts on Hopper through the kernel in CUDA C++. Knows nothing of models.

T tokens, B sequences, N query heads, K kv heads, G = N / K, H head dim, W blocks a sequence, NB blocks of S tokens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from npu_runner.platforms.cuda import FP8_PROMPT_ROOM
from npu_runner.platforms.cuda.attention.hopper_attention import HopperAttention, Shape, why_not_hopper
from npu_runner.platforms.cuda.compiled_source import LoadedKernel, tensor_map
from npu_runner.platforms.transfers import upload_together

_SHAPE = Shape(dims=128)
# Tokens of one TMA copy, all of one block.
_CHUNK = 64
# New tokens of a step, and of a sequence on average, from which on it is faster than Triton's kernel (H100).
_LEAST_TOKENS, _LEAST_A_SEQUENCE = 1024, 64
# Programs that convert one e4m3 block to 16 bits.
_WIDENERS = 16


def why_no_prompts(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> str | None:
    """None where the kernel supports these heads on this GPU, else the reason. `group`: query heads of a kv head."""
    if head_dim != _SHAPE.dims or group > _SHAPE.rows:
        return f"the kernel for Hopper has head dim {_SHAPE.dims} and up to {_SHAPE.rows} query heads of a kv head"
    if block_size % _CHUNK:
        return f"the kernel for Hopper takes block sizes that are multiples of {_CHUNK}"
    return why_not_hopper(dtype)


class StepBlocks:
    """The blocks of a step's contexts, one behind the other."""

    def __init__(self, context_lens_B: Sequence[int], block_tables_BW: np.ndarray, block_size: int,
                 device: torch.device):
        self._counts_B = -(-np.asarray(context_lens_B) // block_size)
        self._block_tables_BW, self._device = block_tables_BW, device
        self.count = int(self._counts_B.sum())

    @functools.cached_property
    def on_device(self) -> list[Tensor]:
        """int32: their numbers in the cache (`count`,), and block tables (B, W) of a cache with only these blocks."""
        is_there_BW = np.arange(self._block_tables_BW.shape[1]) < self._counts_B[:, None]
        tables_BW = np.zeros(is_there_BW.shape, dtype=np.int32)
        tables_BW[is_there_BW] = np.arange(self.count, dtype=np.int32)
        return upload_together([self._block_tables_BW[is_there_BW].astype(np.int32), tables_BW], self._device)


class PromptAttention:
    """The kernel for one shape of heads. Blocks of an e4m3 cache are converted to 16 bits first, in a buffer.

    All layers share the buffer. It has the size of the largest step so far, by which memory is measured.
    """

    def __init__(self, *, num_kv_heads: int, group: int, block_size: int, dtype: torch.dtype):
        self._num_kv_heads, self._group = num_kv_heads, group
        self.tokens_a_tile = _SHAPE.rows // group
        self._block_size, self._dtype = block_size, dtype
        self.kernel = HopperAttention("prompt", _SHAPE, {"QUERY_HEADS": group, "BLOCK_SIZE": block_size,
                                                         "WIDENERS": _WIDENERS}, dtype)
        self._wide: Tensor | None = None

    def accepts(self, query_lens_B: Sequence[int]) -> bool:
        """Whether the kernel is the fastest for a step. The first call waits until it is compiled."""
        least = max(_LEAST_TOKENS, _LEAST_A_SEQUENCE * len(query_lens_B))
        return self.kernel.is_available and sum(query_lens_B) >= least

    def make_room(self, num_tokens: int, device: torch.device) -> None:
        """Allocate the buffer for a step of `num_tokens` new tokens over an e4m3 cache."""
        num_blocks = -(-FP8_PROMPT_ROOM * num_tokens // self._block_size)
        if self.kernel.is_available and (self._wide is None or self._wide.shape[1] < num_blocks):
            self._wide = None
            self._wide = torch.empty((2, num_blocks, self._block_size, self._num_kv_heads, _SHAPE.dims),
                                     dtype=self._dtype, device=device)

    def has_room(self, blocks: StepBlocks) -> bool:
        return self._wide is not None and blocks.count <= self._wide.shape[1]

    def attend_fp8(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, blocks: StepBlocks,
                   scale: float, scales_2: Tensor | None) -> Tensor:
        """`attend` over caches in e4m3, where there is room for `blocks`."""
        assert self._wide is not None, "callers ask `has_room`"
        keys, values = self._wide
        numbers, tables_BW = blocks.on_device
        self._widen.launch(blocks.count * _WIDENERS, 256, [k_cache, v_cache, keys, values, numbers,
                                                           ctypes.c_int(k_cache[0].numel() // 16)])
        return self.attend(q_TNH, keys, values, tiles, tables_BW, scale, scales_2)

    @functools.cached_property
    def _widen(self) -> LoadedKernel:
        return self.kernel.load("widen_blocks")

    def attend(self, q_TNH: Tensor, k_cache: Tensor, v_cache: Tensor, tiles: Tensor, tables_BW: Tensor,
               scale: float, scales_2: Tensor | None = None) -> Tensor:
        """Causal attention of a step, (T, N, H). `tiles` as in PrefillPlan, of `tokens_a_tile` tokens; `scale` above 0;
        `scales_2` as in `AttentionBackend.with_kv_scales`.

        Queries and caches: 16-byte addresses and strides, heads of consecutive elements.
        """
        out_TNH = torch.empty(q_TNH.shape, dtype=q_TNH.dtype, device=q_TNH.device)
        box_dims = _SHAPE.span // 2
        maps = [tensor_map(q_TNH, (self.tokens_a_tile, self._group, box_dims)),
                *(tensor_map(cache, (1, _CHUNK, 1, box_dims)) for cache in (k_cache, v_cache))]
        self.kernel.launch(maps, tiles, self._num_kv_heads, out_TNH, scale, tables_BW,
                           ctypes.c_int(tables_BW.stride(0)),
                           ctypes.c_void_p(0) if scales_2 is None else scales_2)
        return out_TNH
